"""A trace of real ranks: every micro-batch where the plan has it, waits in their lanes, totals."""

import json
import os
from collections import Counter, defaultdict
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest

from megatron_hdp.megatron.parallel import RankPlace
from megatron_hdp.megatron.step.hdp_steps import HdpSteps
from megatron_hdp.planner import Plan, evaluate
from megatron_hdp.runtime import timeline
from megatron_hdp.runtime.timeline import BACKWARD, FORWARD, PIPELINE_WAIT, RING_WAIT, SYNC, Span
from megatron_hdp.training import step_trace
from megatron_hdp.training.loop import pretrain
from megatron_hdp.training.step_trace import LANES, RankSpans, step_events, step_facts
from tests.simulator.test_plan_bars import COST, TWO_STAGES, plan_of
from tests.simulator.test_trace import overlaps
from tests.support.gradients import write_corpus
from tests.training.runs import run

TO_HOST, TO_DEVICE = timeline.TO_HOST, timeline.TO_DEVICE
LENGTHS = [900, 500, 300, 20, 30, 60, 410, 7, 350, 250, 90, 15, 33, 610, 120]
TRACED = (2, 3)
NUM_RANKS = 4
LAYOUTS = {  # stages, parts of the model on each, parts of a micro-batch
    "four HDP ranks": (1, 1, 1),
    "two HDP ranks of two stages": (2, 1, 1),
    "two HDP ranks of two stages of two parts": (2, 2, 1),
    "two HDP ranks of two stages, in parts": (2, 1, 4),
}
MICROSECONDS = 1e6


def trained(arguments):
    """Body of a rank: the metrics of every step, and the plans of the traced ones."""
    plans = {}
    report = HdpSteps._report

    def noting(self, *args):
        plans[len(plans) + 1] = self.latest_plan()
        return report(self, *args)

    with mock.patch.object(HdpSteps, "_report", noting):
        metrics = pretrain(arguments)
    return {m.step: m for m in metrics}, {step: plans[step].to_json() for step in TRACED}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(
            one,
            marks=pytest.mark.slow if LAYOUTS[one][:2] == (2, 1) or one == "four HDP ranks" else (),
        )
        for one in LAYOUTS
    ],
)
def traced(request, run_ranks, tmp_path_factory):
    """The trace of steps 2 and 3, their plans, and their metrics on the first rank."""
    folder, (stages, chunks, parts) = tmp_path_factory.mktemp("trace"), LAYOUTS[request.param]
    settings = dict.fromkeys(("seq_length", "max_position_embeddings"), max(LENGTHS))
    settings |= {"hdp_tokens_per_rank": 256 * stages, "global_batch_size": 8}
    settings |= {"pipeline_model_parallel_size": stages, "num_layers": 2 * chunks}
    settings |= {"num_virtual_stages_per_pipeline_rank": chunks if chunks > 1 else None}
    settings |= {"hdp_sequence_parts": parts}
    settings |= {"hdp_trace": folder / "traces", "hdp_trace_steps": "2-3"}
    arguments = run(write_corpus(folder, LENGTHS), steps=4, **settings)
    metrics, plans = run_ranks(NUM_RANKS, trained, arguments)[0]
    (path,) = (folder / "traces").iterdir()
    assert path.name == "steps-2-3.json"
    plans = {step: Plan.from_json(plan) for step, plan in plans.items()}
    assert any(max(plan.parts_of_each) > 1 for plan in plans.values()) == (parts > 1)
    return Trace(json.loads(path.read_bytes()), stages, chunks), plans, metrics


class Trace:
    """A trace taken apart; ranks are processes from the second on, a stage each."""

    def __init__(self, document, num_stages, num_chunks):
        self.num_stages = num_stages
        self.num_chunks = num_chunks
        self.about = document["otherData"]
        self.events = document["traceEvents"]
        self.bars = [event for event in self.events if event["ph"] == "X"]
        self.names = {
            (event["name"], event["pid"], event["tid"]): event["args"]["name"]
            for event in self.events
            if event["name"].endswith("_name")
        }

    def steps(self):
        """The bar of every step, by number."""
        return {int(b["name"].split()[1]): b for b in self.bars if b["pid"] == 1}

    def lane(self, step, kind, process=None):
        """The bars of one lane in one step, of one process or of all, in the order of the file."""
        whole = self.steps()[step]
        first, last = whole["ts"], whole["ts"] + whole["dur"]
        return [
            b
            for b in self.bars
            if b["pid"] > 1
            and b["tid"] // 1000 == b["pid"]
            and b["tid"] % 10 == LANES.index(kind)
            and first <= b["ts"] <= last
            and process in (None, b["pid"])
        ]

    def processes(self):
        """Every rank's process, with its HDP rank and its stage."""
        return [(p + 2, *divmod(p, self.num_stages)) for p in range(NUM_RANKS)]

    def changed(self, change):
        """The trace with every event changed, or left out where `change` returns None."""
        events = [change(dict(event)) for event in self.events]
        document = {"otherData": {}, "traceEvents": [e for e in events if e is not None]}
        return Trace(document, self.num_stages, self.num_chunks)


def pass_of(bar):
    """Forward or backward, of which micro-batch, and of which part of it."""
    about = bar["args"]
    return bar["name"].split()[0].strip(","), about.get("micro_batch"), about.get("part")


def chunk_of(bar):
    return bar["tid"] // 10 % 100


def parts_of(plan, m):
    """The passes of a micro-batch through a chunk of the model: its number, and a part's."""
    num_parts = 1 if m is None else int(plan.parts_of_each[m])
    return [(m, part if num_parts > 1 else None) for part in range(num_parts)]


def missing_or_twice(trace, plan, step):
    """What the plan has a rank run and the trace does not have exactly once, or the reverse."""
    found = []
    for process, hdp_rank, _ in trace.processes():
        mine = plan.micro_batches_of(hdp_rank).tolist() or [None]
        if trace.num_chunks > 1:
            mine += [None] * (-len(mine) % trace.num_stages)
        difference = Counter(pass_of(b) for b in trace.lane(step, "compute", process))
        passes = trace.num_chunks * [FORWARD, BACKWARD]
        difference.subtract(
            (kind, *one) for kind in passes for m in mine for one in parts_of(plan, m)
        )
        found += [(process, what) for what, count in difference.items() if count]
    return found


def test_every_micro_batch_once_forward_and_once_backward(traced):
    trace, plans, _ = traced
    for step, plan in plans.items():
        assert max(np.diff(plan.rank_offsets)) >= 2, "the data should need rings"
        assert missing_or_twice(trace, plan, step) == []


def test_a_bar_that_is_missing_or_of_another_micro_batch_is_found(traced):
    trace, plans, _ = traced
    one = trace.lane(2, "compute")[0]

    def of_another(event):
        if event == one:
            event["args"] = event["args"] | {"micro_batch": 99}
        return event

    assert len(missing_or_twice(trace.changed(of_another), plans[2], 2)) == 2
    missing = trace.changed(lambda event: None if event == one else event)
    assert len(missing_or_twice(missing, plans[2], 2)) == 1


def test_names_lanes_and_order(traced):
    trace, plans, _ = traced
    assert trace.names["process_name", 1, 1000] == "job"
    for process, hdp_rank, stage in trace.processes():
        suffix = f", stage {stage}" if trace.num_stages > 1 else ""
        assert (
            trace.names["process_name", process, 1000 * process] == f"HDP rank {hdp_rank}{suffix}"
        )
    lanes = [name for (kind, process, _), name in trace.names.items() if process == 3][1:]
    unused = {TO_HOST, TO_DEVICE} | ({PIPELINE_WAIT} if trace.num_stages == 1 else set())
    chunked = [
        lane + (f", chunk {chunk}" if trace.num_chunks > 1 else "")
        for chunk in range(trace.num_chunks)
        for lane in ("plan", "compute")
    ]
    assert lanes == chunked + [name for name in LANES[2:-1] if name not in unused]
    threads = {(event["pid"], event["tid"]) for event in trace.bars}
    for process, thread in threads:
        one = [b for b in trace.bars if (b["pid"], b["tid"]) == (process, thread)]
        assert overlaps(one) == []
    first, second = trace.steps()[2], trace.steps()[3]
    assert first["ts"] == 0 and second["ts"] > first["dur"]
    assert "on GPUs" in trace.about["times"]


def chunks_out_of_order(trace, step):
    """What of a rank's compute is not, in its order, what its plan has: pass and chunk."""
    found = []
    for process, _, _ in trace.processes():
        lanes = [
            [
                (*pass_of(b), chunk_of(b))
                for b in sorted(trace.lane(step, kind, process), key=lambda b: b["ts"])
                if "micro_batch" in b["args"]
            ]
            for kind in ("plan", "compute")
        ]
        found += [process] if lanes[0] != lanes[1] else []
    return found


def test_chunks_run_in_the_order_of_the_plan(traced):
    trace, plans, _ = traced
    for step in plans:
        if trace.num_stages > 1:
            assert chunks_out_of_order(trace, step) == []
        of_chunks = {chunk_of(b) for b in trace.lane(step, "compute")}
        assert of_chunks == set(range(trace.num_chunks))
        for b in trace.lane(step, "compute") + trace.lane(step, RING_WAIT):
            expected = b["args"].get("chunk", 0)
            assert ("chunk" in b["args"]) == (trace.num_chunks > 1)
            assert chunk_of(b) == (expected if "ring" not in b["name"] else 0)


def test_a_chunk_that_is_mixed_up_is_found(traced):
    trace, _, _ = traced
    if trace.num_chunks == 1:
        pytest.skip("one chunk has no other")

    def swapped(event):
        if event["pid"] > 1 and event["ph"] == "X" and event["tid"] % 10 == LANES.index("compute"):
            event["tid"] += 10 if chunk_of(event) == 0 else -10
        return event

    assert len(chunks_out_of_order(trace.changed(swapped), 2)) == NUM_RANKS


def test_waits_lie_inside_compute_and_sync_behind_it(traced):
    trace, plans, _ = traced
    for step in plans:
        for process, _, _ in trace.processes():
            compute = sorted(trace.lane(step, "compute", process), key=lambda b: b["ts"])
            for wait in trace.lane(step, RING_WAIT, process):
                around = [b for b in compute if _within(wait, b)]
                assert len(around) == 1
                assert around[0]["args"]["micro_batch"] == wait["args"]["micro_batch"]
            for wait in trace.lane(step, PIPELINE_WAIT, process):
                assert not any(_within(wait, b) for b in compute)
            (sync,) = trace.lane(step, SYNC, process)
            assert sync["ts"] >= compute[-1]["ts"] + compute[-1]["dur"] - 1e-3


def _within(inner, outer):
    inner_end, outer_end = inner["ts"] + inner["dur"], outer["ts"] + outer["dur"]
    return outer["ts"] - 1e-3 <= inner["ts"] and inner_end <= outer_end + 1e-3


def apart(trace, step):
    """Rings of which two members do not compute at one time: their clocks are not aligned."""
    spans = defaultdict(list)
    for process, _, stage in trace.processes():
        seen = Counter()  # a micro-batch passes each part of the model
        for b in trace.lane(step, "compute", process):
            if "micro_batch" in b["args"]:
                name = b["name"].split(":")[0]
                seen[name] += 1
                spans[name, stage, seen[name]].append((b["ts"], b["ts"] + b["dur"]))
    return [
        name
        for name, members in spans.items()
        if max(start for start, _ in members) > min(end for _, end in members)
    ]


def test_members_of_a_ring_run_at_one_time(traced):
    """Nobody leaves a ring before everybody has entered it."""
    trace, plans, _ = traced
    for step in plans:
        assert apart(trace, step) == []


def test_a_clock_that_is_off_is_found(traced):
    trace, _, _ = traced
    length = trace.steps()[2]["dur"]

    def late(event):
        if event["pid"] == 2 and event["ph"] == "X":
            event["ts"] += length
        if event["name"] == "step 2":
            event["dur"] *= 2
        return event

    assert apart(trace.changed(late), 2)


def test_totals_are_those_of_the_metrics(traced):
    trace, plans, metrics = traced
    for step in plans:
        facts = trace.steps()[step]["args"]
        left_out_s = facts["waits_too_short_to_draw_s"]
        for kind, mean_s in (
            (RING_WAIT, metrics[step].ring_wait_s),
            (PIPELINE_WAIT, metrics[step].pipeline_wait_s),
            (SYNC, metrics[step].sync_s),
        ):
            drawn_s = sum(b["dur"] for b in trace.lane(step, kind)) / MICROSECONDS
            total_s = drawn_s + left_out_s.get(kind, 0)
            assert total_s == pytest.approx(NUM_RANKS * mean_s, rel=1e-3, abs=1e-5)
        compute_s = sum(b["dur"] for b in trace.lane(step, "compute")) / MICROSECONDS
        ring_wait_s = NUM_RANKS * metrics[step].ring_wait_s
        assert facts["measured_compute_s"] == pytest.approx(compute_s - ring_wait_s, rel=1e-3)
        makespan_s = metrics[step].makespan_s
        busy_s = metrics[step].measured_efficiency * makespan_s * NUM_RANKS
        assert facts["measured_compute_s"] <= busy_s < NUM_RANKS * makespan_s
        last_sync = max(b["ts"] for b in trace.lane(step, SYNC)) - trace.steps()[step]["ts"]
        assert makespan_s <= last_sync / MICROSECONDS + 1e-3
        assert 0 < facts["cpu_s"] < os.cpu_count() * (metrics[step].seconds + 0.1)


def test_the_plan_is_laid_over_it(traced):
    trace, plans, _ = traced
    for step, plan in plans.items():
        facts = trace.steps()[step]["args"]
        scale = facts["plan_stretched_by"]
        assert scale == facts["measured_compute_s"] / facts["predicted_compute_s"]
        for process, hdp_rank, _ in trace.processes():
            bars = trace.lane(step, "plan", process)
            found = Counter(b["args"]["micro_batch"] for b in bars)
            passes = 2 * trace.num_chunks if trace.num_stages > 1 else 1
            mine = plan.micro_batches_of(hdp_rank).tolist()
            assert found == {m: passes * int(plan.parts_of_each[m]) for m in mine}
            for b in bars:
                assert b["args"]["stretched_by"] == scale
                predicted = b["args"]["predicted_s"] * scale * MICROSECONDS
                assert b["dur"] == pytest.approx(predicted, abs=2e-3)
        planned = sum(b["dur"] for b in trace.lane(step, "plan")) / MICROSECONDS
        assert planned == pytest.approx(facts["measured_compute_s"], rel=1e-3)


def place_of(hdp_rank, stage, tensor_rank):
    """A place in a job of 2 HDP ranks x 2 stages x 2 tensor ranks."""
    return RankPlace(hdp_rank, 2, stage, 2, tensor_rank, 2, lockstep_ranks=1, token_multiple=1)


def ranks_of_two_machines():
    """A plan, its evaluation and what eight ranks noted on clocks that are hours apart."""
    plan = plan_of([48, 12, 30], TWO_STAGES, num_ranks=2)
    ranks = []
    for h, s, t in np.ndindex(2, 2, 2):
        machine, zero = ("a", 100.0) if h == 0 else ("b", 50_000.0)
        started = zero + 0.001 * (s + t)  # they leave the agreement one after the other
        spans = [
            Span(FORWARD, zero + 1, zero + 2, 0),
            Span(BACKWARD, zero + 3, zero + 5, 0),
            Span(SYNC, zero + 5, zero + 6, None),
        ]
        ranks.append(RankSpans.of_rank(place_of(h, s, t), machine, started, spans, 0.5))
    return plan, evaluate(plan, COST, 2), ranks


def test_two_machines_two_stages_two_tensor_ranks():
    """A stage for every bar of the plan, and one time for both machines."""
    plan, evaluation, ranks = ranks_of_two_machines()
    assert step_trace.clock_starts(ranks) == {"a": 100.0, "b": 50_000.0}
    names = [
        event["args"]["name"]
        for event in step_trace.name_events([rank.place for rank in ranks])
        if event["name"] == "process_name"
    ]
    assert names[1] == "HDP rank 0, stage 0, tensor rank 0" and len(names) == 9
    events = list(step_events(ranks, plan, evaluation, 7, 10.0))
    forwards = [e for e in events if e["tid"] % 10 == 1 and "forward" in e["name"]]
    assert {(e["ts"], e["dur"]) for e in forwards} == {(11e6, 1e6)} and len(forwards) == 8
    scale = events[0]["args"]["plan_stretched_by"]
    assert scale == pytest.approx(8 * 3.0 / (evaluation.busy_s.sum() * 2 * 2))
    drawn = sum(e["dur"] for e in events if e["tid"] % 10 == 0 and e["pid"] > 1)
    assert drawn / MICROSECONDS == pytest.approx(8 * 3.0)


def with_copies(ranks):
    """The same ranks, each of which copied activations during its forward and its backward."""
    kinds = (TO_HOST, TO_DEVICE)
    return [
        replace(
            rank,
            spans=rank.spans
            + [replace(one, kind=kind) for kind, one in zip(kinds, rank.spans, strict=False)],
        )
        for rank in ranks
    ]


def test_copies_have_lanes_of_their_own():
    plan, evaluation, ranks = ranks_of_two_machines()
    places = [rank.place for rank in ranks]
    names = [
        {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
        for events in (step_trace.name_events(places, offload) for offload in (False, True))
    ]
    assert sorted(set(names[1].values()) - set(names[0].values())) == [
        TO_DEVICE,
        TO_HOST,
    ]
    events = step_events(with_copies(ranks), plan, evaluation, 7, 0.0)
    copies = [(names[1][e["tid"]], e["dur"]) for e in events if e["name"].startswith("copy")]
    assert Counter(copies) == {(TO_HOST, 1e6): 8, (TO_DEVICE, 2e6): 8}
    facts = step_facts(ranks, evaluation)
    assert step_facts(with_copies(ranks), evaluation) == facts
    assert facts["cpu_s"] == len(ranks) * 0.5


def test_short_waits_are_summed_not_drawn():
    spans = [Span(FORWARD, 0.0, 1.0, 0)]
    spans += [Span(RING_WAIT, 0.5, 0.50001, 0)] * 3 + [Span(RING_WAIT, 0.6, 0.7, 0)]
    rank = RankSpans.of_rank(place_of(0, 0, 0), "a", 0.0, spans, 0.9)
    assert len(rank.spans) == 2
    assert rank.left_out_s == {RING_WAIT: pytest.approx(3e-5)}
    assert rank.compute_s == pytest.approx(1.0 - 0.1 - 3e-5)


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        mock.patch("torch.distributed.get_rank", return_value=0),
        pytest.raises(ValueError, match="--hdp-trace .*give a folder that can be made"),
    ):
        step_trace.StepTracer(tmp_path / "file", "1", None)
