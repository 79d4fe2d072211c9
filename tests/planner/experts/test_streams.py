"""Streams of ranks that share experts: what is planned, and what all of a domain take for one."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hdp.cli.lengths import batch_of
from megatron_hdp.planner import CostModel, evaluate, plan
from megatron_hdp.planner.experts import figures_in_lockstep
from megatron_hdp.planner.lockstep import padding_parts, slots, streams_of
from megatron_hdp.planner.pipeline import Pipeline
from megatron_hdp.simulator.execution import execute
from tests.planner.experts.test_ep_balance import HALF
from tests.planner.experts.test_evaluation import plan_of
from tests.planner.problems import repeatable
from tests.planner.test_streams import asked

quickly = repeatable(60)
STAGES = [(1, 1, 1), (1, 1, 1), (2, 1, 1), (3, 1, 8), (2, 2, 4)]
"""And virtual stages, and the most parts of what does not stream."""


@st.composite
def of_domains(draw):
    """A batch with streams, arguments of `plan`, and stages, virtual stages and parts."""
    lengths, how = draw(asked())
    size = draw(st.integers(1, 4))
    how["ranks"] = size * draw(st.integers(1, 3))
    number = st.sampled_from
    if how["rank_speeds"]:
        count = how["ranks"]
        how["rank_speeds"] = draw(st.lists(number([0.5, 1.0]), min_size=count, max_size=count))
    costs = how["cost_model"]
    how["cost_model"] = dataclasses.replace(
        costs, b=costs.b / 2, b_experts=costs.b / 2, input_share=1e-3
    )
    return lengths, how | {"expert_parallel_size": size}, draw(number(STAGES))


def check(found, strategy):
    lengths, how, (stages, chunks, parts) = found
    how |= {"pipeline_stages": stages, "virtual_stages": chunks, "sequence_parts": parts}
    try:
        made = plan(lengths, **how, streams=True, strategy=strategy)
    except ValueError as error:
        assert "tokens_per_rank" in str(error)
        return
    size = how["expert_parallel_size"]
    costs = dataclasses.replace(how["cost_model"], rank_speeds=how["rank_speeds"] or ())
    made.validate(num_layers=4, pipeline_stages=stages)
    replayed = figures_in_lockstep(made, costs, size, Pipeline(stages, chunks))
    assert made.summary["lower_bound_s"] <= replayed.makespan_s * (1 + 1e-9)
    assert replayed.lower_bound_s <= replayed.makespan_s * (1 + 1e-9)
    if size > 1:
        assert replayed.makespan_s == pytest.approx(made.summary["makespan_s"], rel=1e-9)
    lists = slots(made, aligned=True, lockstep_ranks=size)
    twice = streams_of(made, lists, lockstep_ranks=size)
    beside = np.concatenate([one[here > 0] for one, here in zip(lists, twice, strict=True)])
    others = beside[(beside >= 0) & ~made.is_stream[beside]]
    behind = padding_parts(made, lists, lockstep_ranks=size)
    for one, parts, streams in zip(lists, behind, twice, strict=True):
        assert not parts[(one >= 0) & (streams == 0)].any(), "a domain has equally many parts"
    assert not made.offload_ratios[others].any(), "what is computed twice leaves no device"


@quickly
@given(of_domains(), st.sampled_from(["auto", "auto", "static"]))
def test_plans_of_domains_take_what_the_evaluator_finds(found, strategy):
    check(found, strategy)


@pytest.mark.slow
@settings(quickly, max_examples=3000)
@given(of_domains(), st.sampled_from(["auto", "auto", "static"]))
def test_many_plans_of_domains_take_what_the_evaluator_finds(found, strategy):
    check(found, strategy)


@pytest.mark.parametrize("stages", [1, 4])
def test_domains_stream_as_well_as_ranks_by_themselves(stages):
    costs = dataclasses.replace(HALF, input_share=0.02)
    ranks = {"ranks": 16, "tokens_per_rank": 8192}
    lengths = batch_of("preset:github", **ranks, num_tokens=2**20, max_length=2**17, seed=5).lengths
    how = ranks | {"cost_model": costs, "pipeline_stages": stages, "streams": True}
    how["sequence_parts"] = 16 if stages > 1 else 1
    alone, shared = (
        plan([*lengths, 2**18], **how, expert_parallel_size=size).summary["efficiency"]
        for size in (1, 8)
    )
    assert shared >= 0.97 * alone > 0.5


@quickly
@given(of_domains())
def test_the_simulator_finds_the_same_where_nothing_travels(found):
    lengths, how, (stages, chunks, parts) = found
    how |= {"pipeline_stages": stages, "virtual_stages": chunks, "sequence_parts": parts}
    how["cost_model"] = dataclasses.replace(
        how["cost_model"],
        kv_bytes_per_token=0.0,
        intra_node_hop_s=0.0,
        inter_node_hop_s=0.0,
        halo_bytes=0.0,
        block_s=0.0,
        g=how["cost_model"].g * (chunks == 1),  # the planner's padding of chunks takes no time
    )
    how["offload"], how["host_memory_bytes"] = "off", math.inf
    try:
        made = plan(lengths, **how, streams=True)
    except ValueError as error:
        assert "tokens_per_rank" in str(error)
        return
    size, pipeline = how["expert_parallel_size"], Pipeline(stages, chunks)
    costs = dataclasses.replace(how["cost_model"], rank_speeds=how["rank_speeds"] or ())
    step = execute(made, costs, pipeline=pipeline, lockstep_ranks=size)
    evaluated = evaluate(made, costs, stages, chunks)
    if size > 1:
        evaluated = figures_in_lockstep(made, costs, size, pipeline)
    assert step.makespan_s == pytest.approx(evaluated.makespan_s, rel=1e-9)
    assert step.busy_s == pytest.approx(evaluated.busy_s, rel=1e-9)


def test_all_of_a_domain_compute_twice_what_stands_beside_a_stream():
    """By hand: three ranks of a domain, a stream of 8 tokens beside 4 tokens, and padding."""
    made = plan_of([[0], [1]], [8, 4], ranks=3, num_parts=[2, 1], streams=[True, False])
    costs = CostModel(a=0.0, b=1.0, b_experts=3.0, g=0.3, kv_bytes_per_token=0.0)
    found = figures_in_lockstep(made, costs, 3)
    # the stream: 8 tokens and two parts of g, twice forward; of 12 tokens' experts each a third
    assert found.makespan_s == pytest.approx(4 / 3 * (8 + 2 * 0.3) + 4 / 3 * 3 * 12 / 3)
    assert found.own_s[1] == pytest.approx(4 / 3 * (4 + 0.3) + 4 / 3 * 3 * 12 / 3)
    padding = plan_of([[0], [1]], [1, 1], ranks=3, num_parts=[2, 1], streams=[True, False])
    slow = dataclasses.replace(costs, rank_speeds=(1.0, 1.0, 0.01), b_experts=0.0)
    found = figures_in_lockstep(padding, slow, 3)
    assert found.makespan_s == pytest.approx(4 / 3 * 0.3 / 0.01)
