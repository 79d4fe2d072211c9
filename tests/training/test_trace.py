"""A trace of real ranks: every micro-batch where the plan has it, waits in their lanes, totals."""

import json
from collections import Counter, defaultdict
from unittest import mock

import numpy as np
import pytest

from megatron_hdp.megatron.hdp_steps import HdpSteps
from megatron_hdp.megatron.parallel import Place
from megatron_hdp.planner import Plan, evaluate
from megatron_hdp.runtime.timeline import BACKWARD, FORWARD, RING_WAIT, SYNC, Span
from megatron_hdp.training import step_trace
from megatron_hdp.training.loop import pretrain
from megatron_hdp.training.step_trace import LANES, RankSpans, clock_starts, step_events
from megatron_hdp.training.tracer import StepTracer
from tests.gradients import tiny_arguments, write_corpus
from tests.simulator.test_lanes import COST, TWO_STAGES, plan_of
from tests.simulator.test_trace import overlaps

LENGTHS = [900, 500, 300, 20, 30, 60, 410, 7, 350, 250, 90, 15, 33, 610, 120]
TRACED = (2, 3)
NUM_RANKS = 4
MICROSECONDS = 1e6


def trained(arguments):
    """Body of a rank: the metrics of every step, and the plans of the traced ones."""
    plans = {}
    report = HdpSteps._report

    def noting(self, *args):
        plans[len(plans) + 1] = self.planned.plan
        return report(self, *args)

    with mock.patch.object(HdpSteps, "_report", noting):
        metrics = pretrain(arguments)
    return {m.step: m for m in metrics}, {step: plans[step].to_json() for step in TRACED}


@pytest.fixture(scope="module")
def traced(run_ranks, tmp_path_factory):
    """The trace of steps 2 and 3, their plans, and their metrics on the first rank."""
    folder = tmp_path_factory.mktemp("trace")
    arguments = tiny_arguments(
        write_corpus(folder, LENGTHS),
        seq_length=900,
        max_position_embeddings=900,
        hdp_tokens_per_rank=256,
        global_batch_size=8,
        train_iters=4,
        lr_decay_iters=4,
        log_interval=1000,
        hdp_trace=folder / "traces",
        hdp_trace_steps="2-3",
    )
    metrics, plans = run_ranks(NUM_RANKS, trained, arguments)[0]
    (path,) = (folder / "traces").iterdir()
    assert path.name == "steps-2-3.json"
    plans = {step: Plan.from_json(plan) for step, plan in plans.items()}
    return Trace(json.loads(path.read_bytes())), plans, metrics


class Trace:
    """A trace taken apart; HDP ranks are processes from the second on."""

    def __init__(self, document):
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

    def lane(self, step, kind, rank=None):
        """The bars of one lane in one step, of one rank or of all, in the order of the file."""
        whole = self.steps()[step]
        first, last = whole["ts"], whole["ts"] + whole["dur"]
        return [
            b
            for b in self.bars
            if b["pid"] > 1
            and b["tid"] == 10 * b["pid"] + LANES.index(kind)
            and first <= b["ts"] <= last
            and rank in (None, b["pid"] - 2)
        ]


def computed(trace, step, rank):
    """(pass, micro-batch) of a rank's bars of compute."""
    bars = trace.lane(step, "compute", rank)
    return [(b["name"].split(",")[0].split()[0], b["args"].get("micro_batch")) for b in bars]


def missing_or_twice(trace, plan, step):
    """What the plan has a rank run and the trace does not have exactly once, or the reverse."""
    found = []
    for rank in range(plan.num_ranks):
        mine = plan.micro_batches_of(rank).tolist() or [None]
        expected = Counter((kind, m) for kind in (FORWARD, BACKWARD) for m in mine)
        difference = Counter(computed(trace, step, rank))
        difference.subtract(expected)
        found += [(rank, what) for what, count in difference.items() if count]
    return found


def test_every_micro_batch_once_forward_and_once_backward(traced):
    trace, plans, _ = traced
    for step, plan in plans.items():
        assert max(np.diff(plan.rank_offsets)) >= 3, "the data should need wide rings"
        assert missing_or_twice(trace, plan, step) == []


def test_a_bar_that_is_missing_or_of_another_micro_batch_is_found(traced):
    trace, plans, _ = traced
    document = {"otherData": {}, "traceEvents": [dict(event) for event in trace.events]}
    compute = [e for e in document["traceEvents"] if e["ph"] == "X" and e["tid"] == 21]
    compute[0]["args"] = compute[0]["args"] | {"micro_batch": 99}
    assert len(missing_or_twice(Trace(document), plans[2], 2)) == 2
    document["traceEvents"].remove(compute[0])
    assert len(missing_or_twice(Trace(document), plans[2], 2)) == 1


def test_names_lanes_and_order(traced):
    trace, plans, _ = traced
    assert trace.names["process_name", 1, 10] == "job"
    assert [trace.names["process_name", p, 10 * p] for p in range(2, 6)] == [
        f"HDP rank {rank}" for rank in range(4)
    ]
    lanes = {name for (kind, process, _), name in trace.names.items() if process == 3}
    assert lanes == {"HDP rank 1", "plan", "compute", RING_WAIT, SYNC}  # no pipeline to wait for
    threads = {(event["pid"], event["tid"]) for event in trace.bars}
    for process, thread in threads:
        one = [b for b in trace.bars if (b["pid"], b["tid"]) == (process, thread)]
        assert overlaps(one) == []
    first, second = trace.steps()[2], trace.steps()[3]
    assert first["ts"] == 0 and second["ts"] > first["dur"]
    assert "on GPUs" in trace.about["times"]


def test_waits_lie_inside_compute_and_sync_behind_it(traced):
    trace, plans, _ = traced
    for step in plans:
        for rank in range(NUM_RANKS):
            compute = trace.lane(step, "compute", rank)
            for wait in trace.lane(step, RING_WAIT, rank):
                around = [b for b in compute if _within(wait, b)]
                assert len(around) == 1
                assert around[0]["args"]["micro_batch"] == wait["args"]["micro_batch"]
            (sync,) = trace.lane(step, SYNC, rank)
            assert sync["ts"] >= compute[-1]["ts"] + compute[-1]["dur"] - 1e-3


def _within(inner, outer):
    inner_end, outer_end = inner["ts"] + inner["dur"], outer["ts"] + outer["dur"]
    return outer["ts"] - 1e-3 <= inner["ts"] and inner_end <= outer_end + 1e-3


def apart(trace, plan, step):
    """Rings of which two members do not compute at one time: their clocks are not aligned."""
    spans = defaultdict(list)
    for b in trace.lane(step, "compute"):
        spans[b["name"].split(":")[0]].append((b["ts"], b["ts"] + b["dur"]))
    return [
        name
        for name, members in spans.items()
        if max(start for start, _ in members) > min(end for _, end in members)
    ]


def test_members_of_a_ring_run_at_one_time(traced):
    """Nobody leaves a ring before everybody has entered it."""
    trace, plans, _ = traced
    for step, plan in plans.items():
        assert apart(trace, plan, step) == []


def test_a_clock_that_is_off_is_found(traced):
    trace, plans, _ = traced
    document = {"otherData": {}, "traceEvents": [dict(event) for event in trace.events]}
    length = trace.steps()[2]["dur"]
    for event in document["traceEvents"]:
        if event["ph"] == "X" and event["pid"] == 3:
            event["ts"] += length / 2
    for event in document["traceEvents"]:
        if event["name"] == "step 2":
            event["dur"] *= 2
    assert apart(Trace(document), plans[2], 2)


def test_totals_are_those_of_the_metrics(traced):
    trace, plans, metrics = traced
    for step in plans:
        facts = trace.steps()[step]["args"]
        left_out_s = facts["waits_too_short_to_draw_s"]
        for kind, mean_s in (
            (RING_WAIT, metrics[step].ring_wait_s),
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


def test_the_plan_is_laid_over_it(traced):
    trace, plans, _ = traced
    for step, plan in plans.items():
        facts = trace.steps()[step]["args"]
        scale = facts["plan_stretched_by"]
        assert scale == facts["measured_compute_s"] / facts["predicted_compute_s"]
        for rank in range(NUM_RANKS):
            bars = trace.lane(step, "plan", rank)
            found = [b["args"]["micro_batch"] for b in bars]
            assert found == plan.micro_batches_of(rank).tolist()
            for b in bars:
                assert b["args"]["stretched_by"] == scale
                predicted = b["args"]["predicted_s"] * scale * MICROSECONDS
                assert b["dur"] == pytest.approx(predicted, abs=2e-3)
        planned = sum(b["dur"] for b in trace.lane(step, "plan")) / MICROSECONDS
        assert planned == pytest.approx(facts["measured_compute_s"], rel=1e-3)


def test_two_machines_two_stages_two_tensor_ranks():
    """Clocks of two machines that are hours apart, and a stage for every bar of the plan."""
    plan = plan_of([48, 12, 30], TWO_STAGES, num_ranks=2)
    evaluation = evaluate(plan, COST, 2)
    ranks = []
    for h, s, t in np.ndindex(2, 2, 2):
        machine, zero = ("a", 100.0) if h == 0 else ("b", 50_000.0)
        started = zero + 0.001 * (s + t)  # they leave the agreement one after the other
        spans = [
            Span(FORWARD, zero + 1, zero + 2, 0),
            Span(BACKWARD, zero + 3, zero + 5, 0),
            Span(SYNC, zero + 5, zero + 6, None),
        ]
        ranks.append(RankSpans.of_rank(Place(h, s, t), machine, started, spans))
    assert clock_starts(ranks) == {"a": 100.0, "b": 50_000.0}
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


def test_short_waits_are_summed_not_drawn():
    spans = [Span(FORWARD, 0.0, 1.0, 0)]
    spans += [Span(RING_WAIT, 0.5, 0.50001, 0)] * 3 + [Span(RING_WAIT, 0.6, 0.7, 0)]
    rank = RankSpans.of_rank(Place(0, 0, 0), "a", 0.0, spans)
    assert len(rank.spans) == 2
    assert rank.left_out_s == {RING_WAIT: pytest.approx(3e-5)}
    assert rank.compute_s == pytest.approx(1.0 - 0.1 - 3e-5)


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        mock.patch("torch.distributed.get_rank", return_value=0),
        pytest.raises(ValueError, match="--hdp-trace .*give a folder that can be made"),
    ):
        StepTracer(tmp_path / "file", "1", None)
