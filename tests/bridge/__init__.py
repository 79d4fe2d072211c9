"""Megatron-Bridge's own training loop under HDP."""
