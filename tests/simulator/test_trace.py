"""A trace opens in a viewer: events in order, none over another, as long as the ranks are busy."""

import json
import os
import tracemalloc

import numpy as np
import pytest

from megatron_hdp.planner import LLAMA_7B, evaluate, plan
from megatron_hdp.simulator.trace import write_trace
from tests.simulator.test_plan_bars import COST, TWO_STAGES, plan_of


def trace_of(made, evaluation, folder, ranks_per_node=8):
    path = folder / "trace.json"
    write_trace(made, evaluation, path, ranks_per_node=ranks_per_node)
    assert os.listdir(folder) == ["trace.json"]
    return json.loads(path.read_bytes())["traceEvents"]


def overlaps(events):
    """Neighbours on a thread that are out of order or over each other, by more than 1 ns."""
    found = []
    for before, after in zip(events, events[1:], strict=False):
        same = (before["pid"], before["tid"]) == (after["pid"], after["tid"])
        if same and after["ts"] < before["ts"] + before["dur"] - 1e-3:
            found.append((before, after))
    return found


def test_a_worked_example(tmp_path):
    made = plan_of(
        [30, 4, 2, 7],
        [
            {"ranks": [2, 0, 1], "sequences": [0], "local": {"1": [1], "2": [2]}},
            {"ranks": [1], "sequences": [3]},
        ],
        num_ranks=3,
    )
    events = trace_of(made, evaluate(made, COST), tmp_path, ranks_per_node=2)
    bars = [event for event in events if event["ph"] == "X"]
    placed = [(event["pid"], event["tid"], event["ts"], event["dur"]) for event in bars]
    second = 1e6
    assert placed == [
        (0, 0, 0, 10 * second),
        (0, 1, 0, 14 * second),
        (0, 1, 14 * second, 7 * second),
        (1, 2, 0, 12 * second),
    ]
    assert [event["name"] for event in bars] == ["degree 3", "degree 3", "degree 1", "degree 3"]
    assert bars[1]["args"] == {
        "micro_batch": 0,
        "degree": 3,
        "num_sequences": 1,
        "sequences": "0",
        "tokens": 30,
        "offload_ratio": 0.0,
        "recomputed": False,
        "local_sequences": "1",
        "local_tokens": 4,
    }
    names = {
        (event["name"], event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["name"].endswith("_name")
    }
    assert names["process_name", 1, 0] == "node 1"
    assert names["thread_name", 1, 2] == "rank 2"


@pytest.mark.parametrize("strategy", ["static", "naive", "dp-balance"])
def test_durations_are_the_busy_time(tmp_path, strategy):
    lengths = np.random.default_rng(0).integers(1, 5000, size=60)
    made = plan(lengths, ranks=7, tokens_per_rank=2000, strategy=strategy)
    evaluation = evaluate(made, LLAMA_7B)
    bars = [event for event in trace_of(made, evaluation, tmp_path) if event["ph"] == "X"]
    assert overlaps(bars) == []
    busy = np.bincount(
        [event["tid"] for event in bars], weights=[event["dur"] for event in bars], minlength=7
    )
    np.testing.assert_allclose(busy, evaluation.busy_s * 1e6, atol=0.1)


def test_a_planted_overlap_is_found():
    bars = [{"pid": 0, "tid": 0, "ts": 0, "dur": 5}, {"pid": 0, "tid": 0, "ts": 4.9, "dur": 1}]
    assert len(overlaps(bars)) == 1
    assert len(overlaps(bars[::-1])) == 1


@pytest.mark.parametrize("chunks", [1, 2])
def test_a_thread_a_stage_and_chunk(tmp_path, chunks):
    made = plan_of([48, 12, 30], TWO_STAGES, num_ranks=2)
    evaluation = evaluate(made, COST, 2, chunks)
    events = trace_of(made, evaluation, tmp_path)
    bars = [event for event in events if event["ph"] == "X"]
    assert overlaps(bars) == []
    assert bars[0]["name"] == "degree 2, forward"
    busy = np.bincount([event["tid"] for event in bars], weights=[event["dur"] for event in bars])
    np.testing.assert_allclose(busy, 1e6 * np.repeat(evaluation.busy_s, 2 * chunks) / chunks)
    assert [event["args"]["name"] for event in events if event["name"] == "thread_name"] == [
        f"rank {rank}, stage {stage}" + (f", chunk {chunk}" if chunks > 1 else "")
        for rank in (0, 1)
        for stage in (0, 1)
        for chunk in range(chunks)
    ]
    first = {event["tid"]: event["ts"] for event in reversed(bars)}
    # the first micro-batch passes chunk 0 of both stages before chunk 1 of the first
    passed = [first[stage * chunks + chunk] for chunk in range(chunks) for stage in (0, 1)]
    assert passed == sorted(set(passed))


def test_many_sequences_are_not_all_named(tmp_path):
    made = plan([1] * 100, ranks=1, tokens_per_rank=100)
    events = trace_of(made, evaluate(made, COST), tmp_path)
    details = events[-1]["args"]
    assert details["num_sequences"] == 100
    assert details["sequences"].count(",") == 16 and details["sequences"].endswith(", ...")


def test_writing_takes_less_memory_than_the_file(tmp_path):
    made = plan([5] * 10_000, ranks=1000, tokens_per_rank=5, strategy="static")
    evaluation = evaluate(made, COST)
    tracemalloc.start()
    write_trace(made, evaluation, tmp_path / "trace.json", ranks_per_node=8)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3 * (tmp_path / "trace.json").stat().st_size
