"""Streams: what the planner makes of sequences that no ring holds, or of which a ring is slow."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hdp.planner import CostModel, evaluate, plan, tight_bound_s
from megatron_hdp.planner.evaluation import figures
from megatron_hdp.planner.parts import time_shares
from megatron_hdp.planner.pipeline import Pipeline
from megatron_hdp.planner.pipeline_evaluation import pipeline_schedule
from tests.planner.problems import repeatable

slowly = repeatable(60)


@st.composite
def asked(draw):
    """Arguments of `plan` for a batch whose longest sequences no ring may hold."""
    ranks, capacity = draw(st.integers(1, 9)), draw(st.integers(40, 200))
    lengths = draw(st.lists(st.integers(1, 300), max_size=20))
    lengths += draw(st.lists(st.integers(100, 12_000), min_size=1, max_size=4))
    number = st.sampled_from
    cost = CostModel(
        a=draw(number([0.0, 1e-8])),
        b=1e-5,
        attention_b=draw(number([0.0, 1e-6])),
        kv_bytes_per_token=draw(number([10.0, 1e3])),
        g=draw(number([0.0, 1e-3])),
        block_s=draw(number([0.0, 1e-6])),
        intra_node_hop_s=draw(number([0.0, 1e-5])),
        inter_node_hop_s=draw(number([0.0, 2e-5])),
        intra_node_bytes_per_s=draw(number([1e7, 1e9])),
        inter_node_bytes_per_s=draw(number([1e6, 1e9])),
        host_bytes_per_s=draw(number([1e6, 1e9])),
        query_ratio=draw(number([0.0, 0.8, 3.0])),
        activation_bytes_per_token=draw(number([1e3, 1e4, 1e5])),
        **draw(number([{}, {"merge_b": 1e-7}, {"merge_b": 3e-7, "projection_b": 2e-7}])),
        sum_ratio=draw(number([1.0, 2.0])),
        **draw(number([{}, {"window_tokens": 50, "window_share": 0.5, "halo_bytes": 3e4}])),
        num_layers=4,
        ranks_per_node=draw(number([1, 2, 4])),
    )
    speeds = draw(st.none() | st.lists(number([0.5, 1.0]), min_size=ranks, max_size=ranks))
    offload = draw(number(["off", "auto"]))
    return lengths, {
        "ranks": ranks,
        "tokens_per_rank": capacity,
        "cost_model": cost,
        "rank_speeds": speeds,
        "offload": offload,
        "host_memory_bytes": draw(number([math.inf, 1e4, 1e6])) if offload == "auto" else math.inf,
        "slice_multiple": draw(number([1, 3])),
    }


STAGES = [(1, 1, 1), (1, 1, 1), (2, 1, 1), (3, 1, 8), (2, 2, 1)]
"""And virtual stages, and the most parts of what does not stream."""


@slowly
@given(asked(), st.sampled_from(STAGES), st.sampled_from([1e-4, 0.02]))
def test_plans_with_streams_fit_and_take_what_is_said(asked, stages, share):
    lengths, how = asked
    names = ("pipeline_stages", "virtual_stages", "sequence_parts")
    how |= dict(zip(names, stages, strict=True))
    how["cost_model"] = replace(how["cost_model"], input_share=share)
    stages = stages[:2]
    inputs = share / 4 * stages[1] * max(lengths) / how["ranks"] * (stages[0] > 1)
    try:
        made = plan(lengths, **how, streams=True)
    except ValueError as error:  # the host has no room for what parts came with
        is_full = inputs > how["tokens_per_rank"] / 2
        assert "offload" in str(error) or how["offload"] == "auto" or is_full
        return
    made.validate(num_layers=4, pipeline_stages=stages[0])
    assert (_host_bytes(made, how["cost_model"]) <= how["host_memory_bytes"]).all()
    assert made.fingerprint() == plan(lengths, **how, streams=True).fingerprint()
    replayed = evaluate(made, _with_speeds(how), *stages)
    assert replayed.makespan_s == pytest.approx(made.summary["makespan_s"], rel=1e-9)
    assert figures(made, _with_speeds(how), *stages).makespan_s == replayed.makespan_s
    tight_s = tight_bound_s(lengths, **how, streams=True)
    for bound_s in (made.summary["lower_bound_s"], replayed.lower_bound_s, tight_s):
        assert bound_s <= made.summary["makespan_s"] * (1 + 1e-9)
    try:
        without = plan(lengths, **how)
    except ValueError:
        assert made.streams is not None
        return
    assert made.summary["makespan_s"] <= without.summary["makespan_s"] * 1.003, "streams are slower"


@slowly
@given(asked(), st.sampled_from([1, 1, 2]))
def test_the_static_mesh_streams_what_all_ranks_cannot_hold(asked, stages):
    """It serves where the strategy fails, so it must plan whatever a stream on all ranks holds."""
    lengths, how = asked
    how |= {"cost_model": replace(how["cost_model"], input_share=1e-3), "pipeline_stages": stages}
    try:
        made = plan(lengths, **how, streams=True, strategy="static")
    except ValueError as error:
        assert "offload" in str(error) or how["offload"] == "auto"
        return
    made.validate(num_layers=4, pipeline_stages=stages)
    replayed = evaluate(made, _with_speeds(how), stages)
    assert replayed.makespan_s == pytest.approx(made.summary["makespan_s"], rel=1e-9)
    degrees = np.diff(made.rank_offsets)
    assert (degrees[made.is_stream] == how["ranks"]).all()


def _with_speeds(how):
    return replace(how["cost_model"], rank_speeds=how["rank_speeds"] or ())


def _host_bytes(made, cost):
    """Of each stream on a rank, by hand: keys, values and sums of the parts that leave."""
    kept = (1 + cost.sum_ratio) * cost.kv_bytes_per_token
    halo = (1 + cost.sum_ratio) * cost.halo_bytes / 6
    found = []
    for m in np.flatnonzero(made.is_stream).tolist():
        batch = made.micro_batch(m)
        tokens = made.lengths[batch.sequences[0]] / len(batch.ranks)
        parts = made.host_parts_of(m)
        found.append(parts / made.parts_of_each[m] * tokens * kept + parts * halo)
    return np.array(found)


LLAMA_8B = {
    "num_layers": 32,
    "hidden_size": 4096,
    "num_parameters": 8e9,
    "kv_bytes_per_token": 131_072,
}


def test_a_stream_computes_its_forward_twice():
    """Of one rank without g, by hand: 4/3 of the compute, and copies that take longer than that."""
    cost = CostModel(
        a=0.0,
        b=3e-6,
        kv_bytes_per_token=1.0,
        host_bytes_per_s=1e6,
        activation_bytes_per_token=1.0,
        num_layers=4,
    )
    how = {"ranks": 1, "tokens_per_rank": 100, "offload": "auto", "streams": True}
    made = plan([400], **how, cost_model=replace(cost, activation_bytes_per_token=0.01))
    assert made.num_parts.tolist() == [4] and made.offload_ratios.tolist() == [1.0]
    # parts of 100 tokens: 1e-4 s a forward; 100, 200 and 300 tokens come back, at 1e-6 s each
    exposed = sum(2 * max(0, n - 100) + max(0, 3 * n - 200) for n in (0, 100, 200, 300)) * 1e-6
    assert made.summary["makespan_s"] == pytest.approx(400 * 4e-6 + exposed)
    # with room for 50 / 3 tokens' keys and sums beside parts of 50, for none of a whole part's;
    # for those of two with sums in the type of the keys, and half as many bytes
    for changes, on_device, of_sums in (({}, 0, 3), ({"sum_ratio": 1.0}, 2, 2)):
        of_token = {"activation_bytes_per_token": 1.0 if not changes else 4.0}
        made = plan([400], **how, cost_model=replace(cost, **changes, **of_token))
        parts = 8 if on_device else 4
        assert made.num_parts.tolist() == [parts]
        assert made.offload_ratios.tolist() == [1 - on_device / parts]
        size = 400 // parts
        there = [max(0, n - on_device) * size for n in range(parts)]
        exposed = sum(2 * max(0, n - size) + max(0, of_sums * n - 2 * size) for n in there) * 1e-6
        assert made.summary["makespan_s"] == pytest.approx(400 * 4e-6 + exposed)


def test_parts_of_a_stream_pass_two_stages_as_by_hand():
    """Of 2 tokens each, they take 2^2 + 4 x 2 and 4^2 - 2^2 + 4 x 2; a quarter is forward."""
    whole = plan([4], ranks=1, tokens_per_rank=4)
    made = replace(whole, num_parts=[2], streams=[True], linear_tokens=4.0)
    assert time_shares(made).tolist() == [3 / 8, 5 / 8]
    found = pipeline_schedule(made, np.array([32.0]), Pipeline(2))
    forward, backward = found.part_starts_s
    assert forward.tolist() == [[0.0, 1.5], [1.5, 4.0]]
    assert backward.tolist() == [[21.5, 14.0], [14.0, 6.5]]
    assert found.makespan_s == 26.0


def test_stages_keep_what_parts_came_with():
    """An eightieth of a token's activations on each of its stages, by which lengths end."""
    cost = CostModel(
        *(0.0, 3e-6, 0.0), activation_bytes_per_token=1.0, num_layers=8, input_share=0.1
    )
    how = {"ranks": 1, "tokens_per_rank": 100, "cost_model": cost, "pipeline_stages": 4}
    made = plan([4000], **how, streams=True)
    assert made.num_parts.tolist() == [80]  # 50 tokens of the capacity are left for one
    # parts of equal time: 4/3 of the compute on a stage, and three parts more
    step_s = 4000 * 4e-6 / 4 * (1 + 3 / 80)
    assert made.summary["makespan_s"] == pytest.approx(step_s, rel=1e-4)
    chunks = plan([2000], **how, streams=True, virtual_stages=2)  # which keep twice as much
    assert chunks.num_parts.tolist() == [64]  # 16 for each stage, more than the 40 that it needs
    with pytest.raises(ValueError, match="needs 40 ranks"):
        plan([4000], **how, streams=True, virtual_stages=2)


@pytest.mark.parametrize("offload", ["off", "auto"])
def test_streams_keep_stages_busy(offload):
    """Of four stages that take 4/3 of the compute no more than 3/4 can be used."""
    cost = replace(CostModel.from_model_shape(**LLAMA_8B), num_layers=8, input_share=0.06)
    how = {"ranks": 8, "tokens_per_rank": 16_384, "cost_model": cost, "offload": offload}
    how |= {"pipeline_stages": 4, "slice_multiple": 8}
    made = plan([1_000_000, *[5000] * 400], **how, streams=True)
    assert made.num_parts[made.is_stream].min() >= 32
    assert made.summary["efficiency"] > 0.7


def test_a_sequence_of_many_capacities_streams_on_all_ranks():
    cost = CostModel.from_model_shape(**LLAMA_8B)
    how = {"ranks": 8, "tokens_per_rank": 16_384, "cost_model": cost, "offload": "auto"}
    with pytest.raises(ValueError, match="needs 16 ranks.*streams=True"):
        plan([4_000_000], **how, slice_multiple=8)
    made = plan([4_000_000, *[5000] * 40], **how, streams=True, slice_multiple=8)
    at = int(np.flatnonzero(made.streams)[0])
    assert len(made.micro_batch(at).ranks) == 8 and made.num_parts[at] == 2 * 31
    assert 0.8 < made.offload_ratios[at] < 0.85  # half of the capacity keeps the other parts' keys
    assert made.summary["efficiency"] > 0.74  # of 3/4


def test_a_stream_takes_the_place_of_a_ring_that_is_slower():
    """Rings over slow links, where a rank alone would hold a part of the sequence at a time."""
    cost = CostModel.from_model_shape(**LLAMA_8B, inter_node_bytes_per_s=1e9, ranks_per_node=1)
    lengths, how = [40_000] * 8, {"ranks": 8, "tokens_per_rank": 16_384, "cost_model": cost}
    rings, streams = plan(lengths, **how), plan(lengths, **how, streams=True)
    assert streams.streams.all() and (np.diff(streams.rank_offsets) == 1).all()
    assert streams.summary["makespan_s"] < 0.8 * rings.summary["makespan_s"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"streams": 1}, "streams is 1; expected True or False"),
        (
            {"streams": True, "pipeline_stages": 2, "cost_model": CostModel(1.0, 1.0, 1.0)},
            "2 pipeline stages .* input_share is 0",
        ),
        ({"streams": True, "strategy": "naive"}, "streams=True with the strategy auto"),
    ],
)
def test_senseless_streams_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        plan([500], ranks=2, tokens_per_rank=100, **changes)
