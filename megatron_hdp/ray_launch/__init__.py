"""``python -m megatron_hdp.ray_launch``: a job's ranks started by Ray instead of torchrun.

Design: `docs/design/slurm.md`.
"""
