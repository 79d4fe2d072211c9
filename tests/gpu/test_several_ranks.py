"""Ranks in new processes: whose failure is reported, and when; the benchmark uses results."""

import pytest
import torch.distributed as dist

from scripts.gpu.several_ranks import run


def fail_or_wait(failing):
    if dist.get_rank() == failing:
        raise ValueError("a planted fault")
    dist.barrier()


def test_a_failure_is_reported_at_once_with_its_rank():
    with pytest.raises(RuntimeError, match=r"(?s)rank 1 failed: .*a planted fault"):
        run(2, fail_or_wait, 1, timeout_s=120)
