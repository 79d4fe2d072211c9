"""Checkpoints of our own command: what they hold, when one is visible, whether it is sound.

Modules are named one by one: those of the folder (`folder`, `checksums`, `verification`, `owner`)
load neither torch nor Megatron, so that ``megatron-hdp verify`` starts at once.

Design: `docs/design/checkpoints.md`.
"""
