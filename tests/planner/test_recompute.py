"""Recomputation in plans: what fits by it, what it takes, and where it makes a step shorter."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hdp.planner import CostModel, Plan, PlanError, evaluate, plan, tight_bound_s
from tests.planner.problems import repeatable
from tests.planner.test_streams import LLAMA_8B, asked

COST = CostModel(
    a=0.0, b=3e-6, kv_bytes_per_token=1.0, activation_bytes_per_token=1.0, input_share=0.05,
    num_layers=20,
)  # fmt: skip
"""A tenth of a micro-batch's activations stay."""


@repeatable(60)
@given(asked(), st.sampled_from([(1, 1), (1, 1), (2, 1), (3, 8)]), st.sampled_from([0.02, 0.3]))
def test_plans_fit_and_take_what_is_said(asked, stages_and_parts, share):
    lengths, how = asked
    stages, parts = stages_and_parts
    cost = replace(how["cost_model"], input_share=share)
    how |= {"cost_model": cost, "pipeline_stages": stages, "sequence_parts": parts}
    try:
        made = plan(lengths, **how, recompute="auto")
    except ValueError as error:
        assert "raise tokens_per_rank" in str(error)
        with pytest.raises(ValueError):
            plan(lengths, **how)
        return
    made.validate(num_layers=4, pipeline_stages=stages)
    assert made.fingerprint() == plan(lengths, **how, recompute="auto").fingerprint()
    with_speeds = replace(cost, rank_speeds=how["rank_speeds"] or ())
    replayed = evaluate(made, with_speeds, stages)
    assert replayed.makespan_s == pytest.approx(made.summary["makespan_s"], rel=1e-9)
    bounds_s = made.summary["lower_bound_s"], tight_bound_s(lengths, **how, recompute="auto")
    assert max(bounds_s) <= made.summary["makespan_s"] * (1 + 1e-9)
    try:
        without = plan(lengths, **how)
    except ValueError:
        assert made.recomputed is not None
        return
    assert made.summary["makespan_s"] <= without.summary["makespan_s"] * 1.003, "it is slower"


@pytest.mark.parametrize(("stages", "parts"), [(1, 1), (4, 1), (4, 8)])
def test_a_sequence_of_many_capacities_is_recomputed(stages, parts):
    lengths, how = [20_000, *[500] * 40], {"ranks": 2, "tokens_per_rank": 1000, "cost_model": COST}
    how |= {"pipeline_stages": stages, "sequence_parts": parts}
    with pytest.raises(ValueError, match=r'needs 20 ranks .*recompute="auto", which needs 2'):
        plan(lengths, **how)
    made = plan(lengths, **how, recompute="auto")
    (at,) = np.flatnonzero(made.recomputed)
    assert len(made.micro_batch(at).ranks) == 2 and made.recomputed_share == pytest.approx(0.1)
    evaluation = evaluate(made, COST, stages)
    assert evaluation.duration_s[at] == pytest.approx(20_000 * 3e-6 / 2 * 4 / 3, rel=1e-4)
    with pytest.raises(ValueError, match="needs 21 ranks at 1,000 tokens each; there are 2"):
        plan([20_001, 5], **how, recompute="auto")


def test_backward_takes_three_forwards():
    """Of two stages, by hand: forward, forward, then backwards of as much and a forward."""
    made = plan(
        [2000], ranks=1, tokens_per_rank=1000, cost_model=COST, pipeline_stages=2, recompute="auto"
    )
    forward_s = 2000 * 1e-6 / 2
    found = evaluate(made, COST, 2)
    assert found.forward_start_s[1, 0] == pytest.approx(forward_s)
    assert found.backward_start_s[1, 0] == pytest.approx(2 * forward_s)
    assert found.backward_start_s[0, 0] == pytest.approx((2 + 3) * forward_s)
    assert found.makespan_s == pytest.approx((2 + 2 * 3) * forward_s)
    assert found.makespan_s == pytest.approx(made.summary["makespan_s"])


def test_it_takes_the_place_of_a_ring_that_is_slower():
    """Rings over slow links, where a rank alone has room for the sequence if it is recomputed."""
    slow = CostModel.from_model_shape(**LLAMA_8B, inter_node_bytes_per_s=1e9, ranks_per_node=1)
    lengths, how = [40_000] * 8, {"ranks": 8, "tokens_per_rank": 16_384, "cost_model": slow}
    whole, made = (plan(lengths, **how, recompute=one) for one in ("off", "auto"))
    assert whole.recomputed is None and made.is_recomputed.all()
    assert made.summary["makespan_s"] < 0.9 * whole.summary["makespan_s"]
    fast = plan(lengths, **how | {"cost_model": CostModel.from_model_shape(**LLAMA_8B)})
    again = plan(
        lengths, **how | {"cost_model": CostModel.from_model_shape(**LLAMA_8B)}, recompute="auto"
    )
    assert again.fingerprint() == fast.fingerprint()


def test_a_plan_says_what_is_recomputed_and_is_checked():
    made = plan([2500, 10], ranks=2, tokens_per_rank=1000, cost_model=COST, recompute="auto")
    read = Plan.from_json(made.to_json())
    assert read.fingerprint() == made.fingerprint() != replace(made, recomputed=None).fingerprint()
    assert read.is_recomputed.any() and read.recomputed_share == made.recomputed_share
    with pytest.raises(PlanError, match="holds 1,250 tokens on rank"):
        replace(made, recomputed=None).validate()
    with pytest.raises(PlanError, match=r"1,250 tokens x 0\.9 resident"):
        replace(made, recomputed_share=0.9).validate()
    for changes, message in (
        ({"recomputed_share": 0.0}, "recomputed_share is 0.0"),
        ({"recomputed": [True]}, "recomputed has 1 entries"),
        ({"offload_ratios": np.full(2, 0.5)}, "is recomputed, and a stream or offloaded"),
    ):
        with pytest.raises(PlanError, match=message):
            replace(made, **changes).validate(num_layers=20)
    with pytest.raises(ValueError, match="recompute is 1; expected true or false"):
        Plan.from_json(made.to_json().replace(b'"recompute":true', b'"recompute":1'))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"recompute": True}, "recompute is True; expected one of auto, off"),
        ({"recompute": "auto", "expert_parallel_size": 2}, "with expert_parallel_size 2"),
        ({"recompute": "auto", "cost_model": replace(COST, input_share=0)}, "input_share is 0"),
    ],
)
def test_what_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        plan([5, 5], **{"ranks": 2, "tokens_per_rank": 8, "cost_model": COST} | changes)
