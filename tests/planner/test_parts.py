"""Micro-batches in parts: where they are cut, and how pipelines run them, by workers that block."""

import math
from collections import deque
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from megatron_hdp.data.presets import preset_lengths
from megatron_hdp.planner import CostModel, Plan, evaluate, plan
from megatron_hdp.planner.experts import figures_in_lockstep
from megatron_hdp.planner.extension import _core
from megatron_hdp.planner.lockstep import PADDING, padding_parts, slots
from megatron_hdp.planner.parts import cut_in_parts, linear_tokens, part_sizes
from megatron_hdp.planner.pipeline import Pipeline
from megatron_hdp.planner.pipeline_evaluation import (
    RankLists,
    longest_paths,
    pipeline_schedule,
    waits_of_parts,
)
from megatron_hdp.planner.problem import Problem
from tests.planner.blocking import interleaved, one_forward_one_backward
from tests.planner.problems import Problem as Asked
from tests.planner.problems import problems, repeatable
from tests.planner.test_interleaved_execution import with_paddings_named
from tests.support.random_plans import random_plan

slowly = repeatable(40)
COSTS = CostModel(a=1e-9, b=1e-5, kv_bytes_per_token=1e5, g=1e-3, block_s=1e-6, num_layers=4)


@slowly
@given(
    lengths=st.lists(st.integers(1, 5000), max_size=9),
    num_parts=st.integers(1, 9),
    unit=st.sampled_from([1, 4, 16, 48]),
    linear_tokens=st.sampled_from([0.0, 50.0, 1e4, math.inf]),
)
def test_pieces_make_up_the_sequences_in_order(lengths, num_parts, unit, linear_tokens):
    parts = cut_in_parts(lengths, num_parts, unit, linear_tokens)
    assert len(parts) == num_parts
    pieces = [piece for part in parts for piece in part]
    assert all(first < stop for _, first, stop in pieces)
    held = [(i, token) for i, first, stop in pieces for token in range(first, stop)]
    assert held == [(i, token) for i, length in enumerate(lengths) for token in range(length)]
    assert all(stop % unit == 0 or stop == lengths[i] for i, _, stop in pieces)
    if math.isinf(linear_tokens):
        units = [sum(-(-(stop - first) // unit) for _, first, stop in part) for part in parts]
        assert max(units) == -(-sum(units) // num_parts)


@pytest.mark.parametrize("lengths", [[200_000], [3000] * 100, [500, 150_000, 700, 60_000]])
@pytest.mark.parametrize("linear_tokens", [0.0, 50_000.0])
def test_parts_take_equal_time(lengths, linear_tokens):
    found = [
        sum(
            stop * (stop + linear_tokens) - first * (first + linear_tokens)
            for _, first, stop in part
        )
        for part in cut_in_parts(lengths, 8, 16, linear_tokens)
    ]
    assert max(found) <= 1.3 * np.mean(found) and min(found) >= 0.7 * np.mean(found)


@slowly
@given(
    lengths=st.lists(st.integers(1, 5000), min_size=1, max_size=9),
    num_parts=st.integers(1, 9),
    linear_tokens=st.sampled_from([0.0, 50.0, 1e4]),
)
def test_sizes_of_parts_are_those_of_their_pieces(lengths, num_parts, linear_tokens):
    parts = cut_in_parts(lengths, num_parts, 1, linear_tokens)
    sizes = part_sizes(lengths, num_parts, linear_tokens)
    for part, size in zip(parts, sizes, strict=True):
        tokens = sum(stop - first for _, first, stop in part)
        squares = sum(stop**2 - first**2 for _, first, stop in part)
        assert size.tokens == pytest.approx(tokens, abs=1 + 1e-6)
        assert size.squares == pytest.approx(squares, abs=2 * max(lengths) * (1 + 1e-6))
        assert size.earlier == pytest.approx(part[0].first if part else 0, abs=0.5 + 1e-6)
    assert sum(size.tokens for size in sizes) == pytest.approx(sum(lengths))


def test_a_ring_in_parts_takes_what_the_formulas_say():
    """One sequence of 8 tokens on two ranks, in two parts: keys travel, then queries."""
    made = random_plan(np.array([8]), ranks=2, tokens_per_rank=4)
    made = replace(made, num_parts=[2], linear_tokens=4.0)
    costs = CostModel(
        a=3.0, b=1.0, kv_bytes_per_token=1.0, g=2.0, block_s=0.5, merge_b=1.0,
        intra_node_bytes_per_s=0.25, intra_node_hop_s=0.5,
    )  # fmt: skip
    first, second = part_sizes([8], 2, 4.0)
    for ratio, sent in ((0.0, (first.tokens, 8.0)), (2.0, (first.tokens, 2 * second.tokens))):
        exposed = 0.0
        for size, tokens in zip((first, second), sent, strict=True):
            hides = 3.0 * size.squares / 2 / 3 / 2  # of a third, one of two steps
            exposed += max(0, 0.5 + tokens / 2 / 0.25 - hides)
            exposed += max(0, 0.5 + 2 * tokens / 2 / 0.25 - 2 * hides)
        blocks = 2 * 2 + 2  # a step of each part, and one more a step of the second; two passes
        own = 3.0 * 64 / 2 + 4 + 2 * 2.0 + blocks * 2 * 0.5
        merged = 4 + 8 * (1 - 1 / 2)
        found = evaluate(made, replace(costs, query_ratio=ratio))
        assert found.duration_s[0] == pytest.approx(own + merged + exposed)
        assert found.ring_bytes == pytest.approx(2 * 3 * sum(sent) / 2)


@pytest.mark.parametrize("ratio", [0.0, 2.0, 0.1])
def test_keys_made_of_latents_are_made_again_for_each_part(ratio):
    """Where queries travel, on one member alone, once for all of them."""
    made = random_plan(np.array([60]), ranks=3, tokens_per_rank=20)
    made = replace(made, num_parts=[4], linear_tokens=4.0)
    costs = CostModel(a=1.0, b=1.0, kv_bytes_per_token=1e-9, query_ratio=ratio)
    again = 0.0
    for tokens, earlier, _ in part_sizes([60], 4, 4.0):
        queries = 0 < ratio * tokens < tokens + earlier
        again += (tokens + earlier) / 3 if queries else tokens * 2 / 3 + earlier
    plain = evaluate(made, costs)
    found = evaluate(made, replace(costs, merge_b=0.5, projection_b=0.5))
    assert found.duration_s[0] - plain.duration_s[0] == pytest.approx(0.5 * again)


@pytest.mark.parametrize("parts", [1, 4])
def test_heads_travel_made_as_far_as_attention_hides(parts):
    """What others then need not project, less a share that the network has no time for."""
    made = random_plan(np.array([60]), ranks=3, tokens_per_rank=20)
    made = replace(made, num_parts=[parts], linear_tokens=4.0)
    costs = CostModel(
        a=1e-3, b=1.0, kv_bytes_per_token=1.0, merge_b=0.5, projection_b=0.5,
        intra_node_bytes_per_s=1e3, intra_node_hop_s=1e-4,
    )  # fmt: skip
    spared, around, shares = 0.0, 0.0, []
    for tokens, earlier, squares in part_sizes([60], parts, 4.0):
        hides = 1e-3 * squares / 3 / 3 * 2 / 3  # of a member's third, two of three steps
        passed = (tokens + earlier) * 2 / 3
        shares.append(min(1.0, max(0.0, hides - 2e-4 - passed / 1e3) * 1e3 / (passed * 9)))
        spared += 0.5 * passed * shares[-1]
        around += passed * 9 * shares[-1]
    assert any(0 < share < 1 for share in shares)
    plain, found = (evaluate(made, replace(costs, made_bytes_per_token=x)) for x in (0.0, 9.0))
    assert plain.duration_s[0] - found.duration_s[0] == pytest.approx(spared)
    assert found.ring_bytes - plain.ring_bytes == pytest.approx(3 * 3 * around)


def parts_of(operations, parts, in_order=False):
    """Pass, micro-batch, chunk and part of each: forward in order, backward in reverse."""
    found = []
    for kind, m, chunk in operations:
        places = range(parts[m])
        is_back = kind == "B" and not in_order
        found += [(kind, m, chunk, place) for place in (reversed(places) if is_back else places)]
    return found


class Drawn:
    """A random plan in random parts, laid out in slots whose padding has a number of its own."""

    def __init__(self, lengths, ranks, stages, seed, chunks=1):
        made = random_plan(np.array(lengths), ranks=ranks, tokens_per_rank=64, seed=seed)
        self.pipeline = Pipeline(stages, chunks)
        lists = slots(made, aligned=True, group_size=self.pipeline.group_size)
        self.queues, self.rings = with_paddings_named(made, lists)
        draw = np.random.default_rng(seed)
        num_padding = len(self.rings) - made.num_micro_batches
        self.parts = np.append(
            draw.integers(1, 6, made.num_micro_batches), np.ones(num_padding, dtype=int)
        )
        self.duration_s = draw.uniform(0.5, 2, len(self.rings))

    def expected_s(self):
        """Seconds by the package's own rules of what waits for what."""
        parts, num = self.parts, int(self.parts.sum())
        lists = RankLists(
            np.concatenate(self.queues).astype(np.int64), np.array([len(q) for q in self.queues])
        )
        rows = self.pipeline.rows
        each_s = np.repeat(self.duration_s / parts, parts) / rows
        seconds = np.tile(np.concatenate([each_s / 3, 2 * each_s / 3]), rows)
        waits = waits_of_parts(lists, parts, self.pipeline)
        assert len(seconds) == 2 * num * rows
        starts, finished = longest_paths(waits, seconds)
        assert finished.all()
        return float((starts + seconds).max())

    def run(self, broken=()):
        """Seconds until all workers are done; None if they wait for each other for ever.

        A worker is a stage of a rank. It knows its own list, and what it waits for: members of its
        ring at the same part, and the next message of its way from the stage that feeds it, which
        must be that part. Nobody waits for what it sends.
        """
        stages, chunks = self.pipeline.stages, self.pipeline.chunks
        parts, rows = self.parts, self.pipeline.rows
        workers = [(rank, stage) for rank in range(len(self.queues)) for stage in range(stages)]
        queues = {}
        for rank, stage in workers:
            one = self.queues[rank]
            order = (
                one_forward_one_backward(one, stage, stages)
                if chunks == 1
                else interleaved(one, stage, stages, chunks, stages)
            )
            queues[rank, stage] = parts_of(order, parts, rank in broken)
        place, free_s = dict.fromkeys(workers, 0), dict.fromkeys(workers, 0.0)
        ways = {(kind, worker): deque() for kind in "FB" for worker in workers}
        ended_s = {}
        moved = True
        while moved:
            moved = False
            for worker in workers:
                stage, queue = worker[1], queues[worker]
                while place[worker] < len(queue):
                    kind, m, chunk, part = operation = queue[place[worker]]
                    row, step = chunk * stages + stage, 1 if kind == "F" else -1
                    ring = [(member, stage) for member in self.rings[m]]
                    if any(queues[one][place[one] : place[one] + 1] != [operation] for one in ring):
                        break
                    if 0 <= row - step < rows:
                        incoming = [ways[kind, one] for one in ring]
                        if not all(incoming):
                            break
                        came = [one[0] for one in incoming]
                        assert all(one[:3] == (m, row, part) for one in came), (came, operation)
                        fed_s = max(one[3] for one in came)
                    elif kind == "F":
                        fed_s = 0.0
                    else:
                        fed_s = ended_s.get((m, parts[m] - 1))
                        if fed_s is None:
                            break
                    seconds = self.duration_s[m] / parts[m] / rows
                    seconds *= (1 if kind == "F" else 2) / 3
                    end_s = max([fed_s, *(free_s[one] for one in ring)]) + seconds
                    for one in ring:
                        free_s[one], place[one] = end_s, place[one] + 1
                        if 0 <= row - step < rows:
                            ways[kind, one].popleft()
                        if 0 <= row + step < rows:
                            neighbour = one[0], (stage + step) % stages
                            ways[kind, neighbour].append((m, row + step, part, end_s))
                        elif kind == "F":
                            ended_s[m, part] = end_s
                    moved = True
        is_done = all(place[one] == len(queues[one]) for one in workers)
        return max(free_s.values()) if is_done else None


@slowly
@given(
    lengths=st.lists(st.integers(1, 120), min_size=1, max_size=30),
    ranks=st.integers(2, 4),
    stages=st.integers(2, 4),
    chunks=st.integers(1, 3),
    seed=st.integers(0, 10**6),
)
def test_pipelines_end_when_the_evaluation_says_so(lengths, ranks, stages, chunks, seed):
    drawn = Drawn(lengths, ranks, stages, seed, chunks)
    assert drawn.run() == pytest.approx(drawn.expected_s(), rel=1e-12)


@pytest.mark.slow
def test_ten_thousand_pipelines_end_when_the_evaluation_says_so():
    for seed in range(10_000):
        draw = np.random.default_rng(seed)
        lengths = draw.integers(1, 120, draw.integers(1, 12))
        ranks, stages, chunks = (int(draw.integers(*range_)) for range_ in ((2, 5), (2, 5), (1, 4)))
        drawn = Drawn(lengths, ranks, stages, seed, chunks)
        assert drawn.run() == pytest.approx(drawn.expected_s(), rel=1e-12), seed


def test_the_pass_of_one_micro_batch_is_known_to_the_part():
    """Each stage begins a part behind the one that feeds it; backward with the last part."""
    made = random_plan(np.array([40]), ranks=1, tokens_per_rank=64)
    made = replace(made, num_parts=[4], linear_tokens=9.0)
    found = pipeline_schedule(made, np.array([24.0]), Pipeline(2))  # a part takes 1 and 2 seconds
    assert found.forward_start_s.tolist() == [[0.0], [1.0]]
    assert found.backward_start_s.tolist() == [[7.0], [5.0]] and found.makespan_s == 15.0


@pytest.mark.parametrize("chunks", [1, 2])
def test_rings_that_take_parts_in_another_order_hang(chunks):
    """The planted fault: one rank goes back through the parts in their order."""
    stuck = 0
    for seed in range(20):
        drawn = Drawn([100, 40, 90, 7, 60, 120], 2, 3, seed, chunks)
        assert drawn.run() is not None
        stuck += drawn.run(broken={1}) is None
    assert stuck > 0


@slowly
@given(
    lengths=st.lists(st.integers(1, 120), min_size=1, max_size=30),
    ranks=st.integers(2, 4),
    stages=st.integers(2, 4),
    chunks=st.integers(1, 3),
    weighted=st.booleans(),
    speeds=st.booleans(),
    ratio=st.sampled_from([0.0, 0.6, 3.5]),
    made_bytes=st.sampled_from([0.0, 300.0, 3e4]),
    seed=st.integers(0, 10**6),
)
def test_cpp_and_python_execute_parts_alike(
    lengths, ranks, stages, chunks, weighted, speeds, ratio, made_bytes, seed
):
    draw = np.random.default_rng(seed)
    made = random_plan(np.array(lengths), ranks=ranks, tokens_per_rank=64, seed=seed)
    assume(not any(PADDING in one for one in slots(made, aligned=True)))  # C++ refuses the others
    weights = draw.uniform(0.5, 1.5, stages * chunks) if weighted else None
    costs = CostModel(
        a=1e-3, b=1e-2, kv_bytes_per_token=1e2, g=1e-3, block_s=1e-3, merge_b=1e-3, num_layers=2,
        projection_b=6e-4, made_bytes_per_token=made_bytes, double_rings=True,
        intra_node_bytes_per_s=1e5, inter_node_bytes_per_s=4e4, inter_node_hop_s=1e-3,
        ranks_per_node=2, query_ratio=ratio, rank_speeds=(0.5, 1.0, 2.0, 1.5)[: ranks * speeds],
    )  # fmt: skip
    problem = Problem.of(
        lengths, ranks=ranks, tokens_per_rank=64, cost_model=costs, pipeline_stages=stages,
        virtual_stages=chunks, stage_weights=weights, sequence_parts=9,
    )  # fmt: skip
    parts = draw.integers(1, 10, made.num_micro_batches)
    twice = draw.random(made.num_micro_batches) < 0.4
    tokens = linear_tokens(max(lengths), costs)
    expected = evaluate(
        replace(made, num_parts=parts, linear_tokens=tokens, recomputed=twice),
        costs,
        stages,
        chunks,
        problem.pipeline.weights,
    )
    arrays = ("rank_offsets", "ranks", "sequence_offsets", "sequences")
    arrays += ("local_offsets", "local_sequences", "local_ranks")
    told = {name: getattr(made, name) for name in arrays}
    found = _core.makespan_s(
        problem.core, **told, num_parts=parts, recomputed=twice, stream_parts=[]
    )
    assert found == pytest.approx(expected.makespan_s, rel=1e-9)


@pytest.mark.parametrize("strategy", ["auto", "static"])
def test_parts_make_a_step_shorter_or_the_plan_stays_as_it_is(strategy):
    """By executions of the plans, the whole one's too; the summary says what they say."""
    gains = []
    for seed in range(4):
        lengths = preset_lengths("byted", num_tokens=2**20, max_length=2**17, seed=seed)
        asked = {"ranks": 16, "tokens_per_rank": 8192, "pipeline_stages": 4, "cost_model": COSTS}
        asked["strategy"] = strategy
        whole, parts = (plan(lengths, **asked, sequence_parts=number) for number in (1, 16))
        assert parts.fingerprint() == plan(lengths, **asked, sequence_parts=16).fingerprint()
        parts.validate(pipeline_stages=4)
        found = [evaluate(one, COSTS, 4) for one in (whole, parts)]
        for one, figures in zip((whole, parts), found, strict=True):
            assert one.summary["makespan_s"] == pytest.approx(figures.makespan_s, rel=1e-9)
            assert one.summary["efficiency"] == pytest.approx(figures.efficiency, rel=1e-9)
        assert 1 < parts.parts_of_each.max() <= 16
        gains.append(found[0].makespan_s / found[1].makespan_s)
    assert min(gains) > 1.03, gains


def test_with_virtual_stages_a_few_parts_fill_the_ramp():
    """A part is back on the first stage behind the others: as many as stages leave no gap.

    So a ring need not be wider than memory wants it, as it is if it shall pass whole.
    """
    lengths = np.array([2**18, *[2048] * 3000])
    asked = {"ranks": 64, "tokens_per_rank": 8192, "pipeline_stages": 2, "cost_model": COSTS}
    found = {}
    for chunks, parts in ((8, 1), (1, 4), (8, 4)):
        made = plan(lengths, **asked, virtual_stages=chunks, sequence_parts=parts)
        found[chunks, parts] = evaluate(made, COSTS, 2, chunks).efficiency
    assert found.pop((8, 4)) > 1.08 * max(found.values()), found
    assert int(np.diff(made.rank_offsets).max()) == 32


@pytest.mark.parametrize("ranks, longest, size", [(16, 2**17, 1), (32, 2**18, 4)])
def test_with_many_chunks_parts_make_no_step_longer(ranks, longest, size):
    """Sketches have two chunks: what they say of whole plans is too slow; nor know they experts."""
    for data in ("byted", "github"):
        lengths = preset_lengths(data, num_tokens=ranks * 98_304, max_length=longest, seed=0)
        asked = {"ranks": ranks, "tokens_per_rank": 8192, "cost_model": COSTS}
        asked |= {"pipeline_stages": 4, "virtual_stages": 8, "expert_parallel_size": size}
        whole, parts = (plan(lengths, **asked, sequence_parts=number) for number in (1, 16))
        assert parts.summary["makespan_s"] < whole.summary["makespan_s"], data


def test_ranks_that_share_experts_run_as_many_parts_as_the_fullest_of_them():
    """A rank's padding behind its parts, and a domain's position in as many as it waits for."""
    lengths = np.array([60, 30, 20, 9])  # on ranks 0, 1 of a domain, then 0 and 2 of the other
    ranks = [0, 1, 0, 2]
    none = np.zeros(0, dtype=np.int64)
    made = Plan(
        num_ranks=4,
        tokens_per_rank=64,
        strategy="naive",
        lengths=lengths,
        rank_offsets=np.arange(5),
        ranks=np.array(ranks, dtype=np.int32),
        sequence_offsets=np.arange(5),
        sequences=np.arange(4),
        local_offsets=np.zeros(5, dtype=np.int64),
        local_sequences=none,
        local_ranks=none.astype(np.int32),
        offload_ratios=np.zeros(4),
        num_parts=[4, 1, 1, 3],
    )
    lists = slots(made, aligned=True, lockstep_ranks=2)
    found = padding_parts(made, lists, lockstep_ranks=2)
    assert [one.tolist() for one in found] == [[0, 0], [3, 0], [0], [2]]
    costs = replace(COSTS, g=0.0)
    parts_s, whole_s = (
        figures_in_lockstep(one, costs, 2, Pipeline(4)).makespan_s
        for one in (made, replace(made, num_parts=None))
    )
    assert parts_s < whole_s


@slowly
@given(
    problem=problems(offload=True),
    stages=st.integers(2, 4),
    chunks=st.integers(1, 3),
    parts=st.sampled_from([2, 5, 16]),
)
def test_plans_in_parts_are_sound_and_take_what_they_say(problem, stages, chunks, parts):
    """Whatever the costs: with offload, without times, with slow ranks, launch-bound."""
    layout = {"pipeline_stages": stages, "virtual_stages": chunks}
    for strategy in ("pp-balance", "static", "dynamic-cp"):
        try:
            made = problem.plan(strategy, **layout, sequence_parts=parts)
        except ValueError:
            assert strategy != "pp-balance" or problem.offload == "auto"
            continue
        made.validate(pipeline_stages=stages, num_layers=problem.model.num_layers)
        assert made.parts_of_each.max() <= parts
        found = evaluate(made, problem.model, stages, chunks)
        assert made.summary["makespan_s"] == pytest.approx(found.makespan_s, rel=1e-9)
        assert found.lower_bound_s <= found.makespan_s * (1 + 1e-9)


def test_a_sequence_that_fits_a_rank_only_by_offload_is_no_short_one():
    problem = Asked((400, *[50] * 200), 4, 300, 1, "fast host", offload="auto")
    made = problem.plan("pp-balance", pipeline_stages=2, sequence_parts=8)
    made.validate(pipeline_stages=2, num_layers=problem.model.num_layers)
    assert made.parts_of_each.max() > 1


@pytest.mark.parametrize(("stages", "most"), [(1, 1), (2, 16), (4, 32), (256, 1024)])
def test_auto_is_eight_parts_for_each_stage(stages, most):
    lengths, asked = [3000, 50, 700, 80], {"ranks": 2, "tokens_per_rank": 2048}
    auto, named = (
        plan(lengths, **asked, pipeline_stages=stages, sequence_parts=one) for one in ("auto", most)
    )
    assert auto.fingerprint() == named.fingerprint()
    assert auto.summary["lower_bound_s"] == named.summary["lower_bound_s"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sequence_parts": "all"}, "sequence_parts is 'all'; expected an integer"),
        ({"sequence_parts": 0, "pipeline_stages": 2}, "sequence_parts is 0"),
        ({"sequence_parts": 4}, "1 pipeline stages"),
    ],
)
def test_senseless_numbers_of_parts_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        plan([5, 5, 5, 5], ranks=2, tokens_per_rank=8, **changes)
