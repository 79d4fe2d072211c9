"""Tests of megatron_hdp.training."""
