"""The plugin for Megatron-LM checkouts: what it replaces in their training loop, and by what.

Design: `docs/design/megatron.md`.
"""
