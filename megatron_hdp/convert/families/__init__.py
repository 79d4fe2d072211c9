"""What the configurations and tensors of each family of models mean to Megatron, as tables."""
