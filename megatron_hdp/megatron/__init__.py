"""The only room that names Megatron; each room in it knows one side of it.

Design: `docs/design/megatron.md`.
"""
