"""Experts that ranks share take what the evaluation of lockstep says, rank by rank and in all."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hdp.planner import LLAMA_7B, plan
from megatron_hdp.planner.experts import figures_in_lockstep
from megatron_hdp.planner.pipeline import Pipeline
from megatron_hdp.simulator.execution import Disturbance, execute
from tests.planner.problems import COST_MODELS
from tests.support.examples import some
from tests.support.random_plans import random_plan

EXPERTS = dataclasses.replace(COST_MODELS["linear"], a=1e-4, b_experts=3e-3)  # no ring traffic


@st.composite
def layouts(draw):
    size = draw(st.sampled_from([2, 3]))
    ranks = size * draw(st.integers(1, 4))
    lengths = draw(st.lists(st.integers(1, 60), min_size=1, max_size=20))
    made = random_plan(lengths, ranks=ranks, tokens_per_rank=64, seed=draw(st.integers(0, 99)))
    return made, size


@settings(max_examples=some(80), derandomize=True)
@given(layout=layouts(), stages=st.integers(1, 4), chunks=st.integers(1, 3), is_even=st.booleans())
def test_it_is_what_the_evaluation_finds(layout, stages, chunks, is_even):
    made, size = layout
    chunks = chunks if stages > 1 else 1
    weights = () if is_even else tuple(range(stages * chunks, 0, -1))
    pipeline = Pipeline(stages, chunks, weights)
    # the evaluation's padding of virtual stages takes no time
    costs = dataclasses.replace(EXPERTS, g=0.0) if chunks > 1 else EXPERTS
    found = execute(made, costs, pipeline=pipeline, lockstep_ranks=size)
    expected = figures_in_lockstep(made, costs, size, pipeline)
    assert found.makespan_s == pytest.approx(expected.makespan_s, rel=1e-9)
    np.testing.assert_allclose(found.busy_s, expected.busy_s, rtol=1e-9)
    starts = found.forward_start_s[:, : made.num_micro_batches]
    np.testing.assert_allclose(starts, expected.forward_start_s, rtol=1e-9, atol=1e-12)


def test_a_plan_of_a_mixture_takes_what_it_promises():
    costs = dataclasses.replace(LLAMA_7B, b=LLAMA_7B.b / 2, b_experts=LLAMA_7B.b / 2)
    lengths = np.random.default_rng(0).integers(100, 9000, 60)
    for stages in (1, 2):
        made = plan(
            lengths,
            ranks=8,
            tokens_per_rank=8192,
            cost_model=costs,
            expert_parallel_size=4,
            pipeline_stages=stages,
        )
        assert made.strategy == "ep-balance"
        found = execute(made, costs, pipeline=Pipeline(stages), lockstep_ranks=4)
        assert found.makespan_s == pytest.approx(made.summary["makespan_s"], rel=1e-9)


def test_a_slow_rank_holds_its_domain_up_alone():
    made = random_plan([20] * 16, ranks=4, tokens_per_rank=20, seed=0)
    found = execute(made, EXPERTS, lockstep_ranks=2, disturbance=Disturbance(slow={3: 0.25}))
    slow = dataclasses.replace(EXPERTS, rank_speeds=(1.0, 1.0, 1.0, 0.25))
    assert found.makespan_s == pytest.approx(figures_in_lockstep(made, slow, 2).makespan_s)


def test_ranks_with_all_experts_compute_them_themselves():
    made = random_plan([20] * 16, ranks=4, tokens_per_rank=20, seed=0)
    dense = dataclasses.replace(EXPERTS, b=EXPERTS.b + EXPERTS.b_experts, b_experts=0.0)
    assert execute(made, EXPERTS).makespan_s == pytest.approx(execute(made, dense).makespan_s)
