"""What a share has its rank compute is what the evaluator says of the whole plan."""

from dataclasses import replace

import numpy as np
import pytest

from megatron_hdp.data.steps import StepShares, work_of
from megatron_hdp.planner import LLAMA_7B
from tests.data.steps.test_share import step_of
from tests.support import machine
from tests.support.random_plans import random_plan

BASE = replace(LLAMA_7B, block_s=1e-4, b_experts=1e-6, attention_b=1e-7, g=0.3)


@pytest.mark.parametrize("ranks", [1, 2, 5, 8])
@pytest.mark.parametrize("seed", range(4))
def test_a_share_has_its_part_of_the_plan(ranks, seed):
    lengths = np.random.default_rng(seed).integers(1, 8192 * min(ranks, 4), 60)
    made = random_plan(lengths, ranks=ranks, tokens_per_rank=8192, seed=seed)
    shares = StepShares(step_of(lengths), made).of(range(ranks))
    found = np.array([work_of(share, BASE) for share in shares])
    assert found == pytest.approx(machine.work_of(made, BASE), rel=1e-9)
    assert ranks == 1 or len(made.local_sequences) > 0
