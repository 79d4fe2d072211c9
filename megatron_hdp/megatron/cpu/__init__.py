"""Megatron, which assumes CUDA, on machines without a GPU."""
