"""Flags that users of Megatron-LM are used to, on a real checkout: as one rank, so several.

Needs what test_training.py needs. Training is counted in samples, and a step has ever more of them.
"""

from functools import partial

import pytest
from megatron.core import package_info

from tests.megatron.lm.runs import HDP, LENGTHS, MARKS, drive, planned, scalars
from tests.support.gradients import write_corpus

pytestmark = [*MARKS, pytest.mark.slow]

IS_18 = tuple(map(int, package_info.__version__.split(".")[:2])) >= (0, 18)
# sizes of the steps: 4, 4, 6, 8, 8 of 32 samples
GROWS = "--step-batch-size-schedule 0:4,2K:6,3K:8" if IS_18 else "--rampup-batch-size 4 2 12"
SAMPLED = f"--train-samples 36 --lr-decay-samples 60 --log-params-norm {GROWS}"
STEPS = range(1, 6)


def by_samples(run):
    """The same run counted in samples."""
    arguments, left_out = [], {"--train-iters", "--lr-decay-iters"}
    if IS_18:
        left_out.add("--global-batch-size")
    for flag, value in zip(run["arguments"], [*run["arguments"][1:], ""], strict=True):
        before = arguments[-1] if arguments else ""
        if flag in left_out:
            arguments.append(None)
        elif before is None:
            arguments[-1:] = []
        else:
            arguments.append(flag)
        del value
    return run | {"arguments": arguments}
