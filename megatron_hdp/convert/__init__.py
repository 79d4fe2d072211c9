"""Weights of Hugging Face's files to a checkpoint of Megatron's, and back, tensor by tensor.

Design: `docs/design/convert.md`.
"""
