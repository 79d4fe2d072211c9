"""``megatron-hdp``: plan, check, preprocess, doctor, verify."""
