"""Megatron-LM's dynamic context parallelism: small cases by hand, a twin, the original if it loads.

The small cases were worked out on paper from the original's rules: a rank's work is the sum of
squares of the lengths over the degree.
"""

import dataclasses
import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hdp.data.presets import preset_lengths
from megatron_hdp.planner import Plan, evaluate, plan, slice_tokens
from tests.planner.problems import (
    Problem,
    agree,
    fixed_problems,
    longest_that_fits,
    problems,
    repeatable,
    rings,
)

STRATEGY = "dynamic-cp"

Rings = list[tuple[tuple[int, ...], tuple[int, ...]]]
Rounds = list[list[list[int]]]
"""By round and rank: the sequences of the rank's micro-batch."""

quickly = repeatable(100)


def made_of(lengths: list[int], ranks: int, tokens_per_rank: int = 10, **others: Any) -> Rings:
    made = plan(lengths, ranks=ranks, tokens_per_rank=tokens_per_rank, strategy=STRATEGY, **others)
    made.validate(pipeline_stages=2)
    return rings(made)


BY_HAND: dict[str, tuple[list[int], int, int, Rings]] = {
    # 20 needs two ranks, work 200; 10 alone has 100; 6 alone 36, and 4 beside it 36 + 16
    "short ones stay whole where long ones give them time": (
        *([6, 20, 4, 10], 4, 10),
        [((0, 1), (1,)), ((2,), (3,)), ((3,), (0, 2))],
    ),
    # 12 on two ranks: 72; 10 on one would be 100, on two it is 50; 4 joins it: 58, not 72 + 8
    "more ranks than needed where that lowers the most work": (
        *([12, 10, 4], 4, 10),
        [((0, 1), (0,)), ((2, 3), (1, 2))],
    ),
    # 20 on two, 10 and 10 on one each: of the three ranks left two make pairs of the tens; then all
    # groups are pairs, and the first grows to four if there are two more
    "ranks left over widen the least groups, oldest first": (
        *([20, 10, 10], 6, 10),
        [((0, 1), (0,)), ((2, 3), (1,)), ((4, 5), (2,))],
    ),
    "and then the first of these": (
        *([20, 10, 10], 8, 10),
        [((0, 1, 2, 3), (0,)), ((4, 5), (1,)), ((6, 7), (2,))],
    ),
    "every rank runs a micro-batch in every round": (
        *([10] * 5, 4, 10),
        [*[((rank,), (rank,)) for rank in range(4)], ((0, 1, 2, 3), (4,))],
    ),
    # neither 9 nor 5 has room beside a ten: the next round has both
    "a round ends where nothing fits any more": (
        *([10, 9, 10, 5], 2, 10),
        [((0,), (0,)), ((1,), (2,)), ((0,), (1,)), ((1,), (3,))],
    ),
    # two pairs and one rank left: the first pair would need two; a fifth of 20 is padded to 4
    "all ranks form one group where doubling does not come out even": (
        *([20, 20], 5, 10),
        [((0, 1, 2, 3, 4), (0, 1))],
    ),
    # a group of four and two left: the six ranks are one group, as there are no eight
    "six ranks, not eight": ([40], 6, 10, [((0, 1, 2, 3, 4, 5), (0,))]),
    # one token takes two on each of two ranks: a third one would not fit once they are shared
    "a tiny one keeps room for the padding of two ranks": (
        *([1, 1, 1], 2, 2),
        [((0,), (0,)), ((1,), (1,)), ((0, 1), (2,))],
    ),
}


@pytest.mark.parametrize("case", BY_HAND)
def test_by_hand(case: str) -> None:
    *given, expected = BY_HAND[case]
    assert made_of(*given) == expected


def test_a_context_that_no_power_of_two_of_ranks_holds_is_refused() -> None:
    message = (
        r"dynamic-cp: a context of 41 tokens does not fit on 4 ranks, the greatest power of two of "
        r"6, at 10 tokens each \(.*\): raise tokens_per_rank or add ranks"
    )
    with pytest.raises(ValueError, match=message):
        made_of([5], ranks=6, max_length=41)
    assert made_of([5], ranks=6, max_length=40) == [((0, 1, 2, 3, 4, 5), (0,))]


def test_a_capacity_below_the_least_shared_slice_is_refused() -> None:
    message = r"on 2 ranks, .* at 3 tokens each \(a slice of a shared sequence has at least 2 x 2\)"
    with pytest.raises(ValueError, match=message):
        made_of([2], ranks=2, tokens_per_rank=3, slice_multiple=2)
    assert made_of([2], ranks=1, tokens_per_rank=3, slice_multiple=2) == [((0,), (0,))]


def test_it_sends_nothing_to_the_host_and_knows_no_slow_ranks() -> None:
    common: dict[str, Any] = {"ranks": 4, "tokens_per_rank": 8192, "strategy": STRATEGY}
    lengths = [30_000, 9000, 800, 700]
    made = plan(lengths, **common)
    slow = plan(lengths, **common, rank_speeds=[0.5, 1.0, 1.0, 1.0])
    offloaded = plan(lengths, **common, offload="auto")
    assert made.fingerprint() == slow.fingerprint() == offloaded.fingerprint()
    assert not offloaded.offload_ratios.any()


def greatest_power(ranks: int) -> int:
    """The greatest power of two of so many ranks."""
    return 1 << (ranks.bit_length() - 1)


def cut(problem: Problem) -> Problem:
    """The problem with what a power of two of its ranks holds."""
    multiple = problem.slice_multiple
    capacity = max(problem.tokens_per_rank, 2 * multiple)
    longest = longest_that_fits(greatest_power(problem.ranks), capacity, multiple)
    lengths = tuple(min(length, longest) for length in problem.lengths)
    return dataclasses.replace(problem, lengths=lengths, tokens_per_rank=capacity)


def made_rounds(made: Plan) -> Rounds:
    lists: Rounds = [[] for _ in range(made.num_ranks)]
    for m in range(made.num_micro_batches):
        batch = made.micro_batch(m)
        for rank in batch.ranks:
            lists[rank].append(list(batch.sequences))
    return [list(of_ranks) for of_ranks in zip(*lists, strict=True)]


@quickly
@given(problem=problems().map(cut), stages=st.integers(1, 5))
def test_rules_hold_and_figures_agree_with_the_evaluator(problem: Problem, stages: int) -> None:
    made = problem.plan(STRATEGY, pipeline_stages=stages)
    made.validate(pipeline_stages=stages)
    agree(made, evaluate(made, problem.model, stages))
    assert made.summary["max_tokens_on_a_rank"] <= problem.tokens_per_rank
    assert problem.plan(STRATEGY, pipeline_stages=stages).fingerprint() == made.fingerprint()
    copy = Plan.from_json(made.to_json())
    assert copy.fingerprint() == made.fingerprint()


@quickly
@given(problem=problems().map(cut))
def test_rounds_are_of_consecutive_groups_that_never_grow(problem: Problem) -> None:
    made = problem.plan(STRATEGY)
    counts = {len(made.micro_batches_of(rank)) for rank in range(problem.ranks)}
    assert len(counts) == 1
    batches = [made.micro_batch(m) for m in range(made.num_micro_batches)]
    last = problem.ranks
    for batch in batches:
        if last == problem.ranks:  # a round begins
            last, degree = 0, problem.ranks
        assert batch.ranks == tuple(range(last, last + len(batch.ranks)))
        assert len(batch.ranks) <= degree
        last, degree = last + len(batch.ranks), len(batch.ranks)
        assert degree == problem.ranks or degree & (degree - 1) == 0
        assert batch.sequences
        if problem.ranks & (problem.ranks - 1) == 0:
            assert batch.ranks[0] % degree == 0  # so communicators of aligned blocks serve
    assert last == problem.ranks


@dataclasses.dataclass
class Group:
    degree: int
    room: int
    work: float = 0.0
    sequences: list[int] = dataclasses.field(default_factory=list)


def rounds_of_twin(problem: Problem) -> Rounds:
    """The rules said again, without anything that makes them fast."""
    lengths, ranks, multiple = problem.lengths, problem.ranks, problem.slice_multiple
    degrees = [2**i for i in range(ranks.bit_length())]

    def room(sequence: int, degree: int) -> int:
        slices = (slice_tokens(lengths[sequence], d, multiple) for d in range(degree, ranks + 1))
        return max(slices)

    def work(sequence: int, degree: int) -> float:
        return lengths[sequence] ** 2 / degree

    def chosen(sequence: int, groups: list[Group]) -> Group | None:
        """The group that takes the sequence; a new one, if it is not in the list."""
        num_free = ranks - sum(group.degree for group in groups)
        fitting = [d for d in degrees if room(sequence, d) <= problem.tokens_per_rank]
        formed = [Group(d, problem.tokens_per_rank) for d in fitting if d <= num_free]
        if not groups:
            return formed[0]
        most = max(group.work for group in groups)
        open_ones = [
            group
            for group in groups
            if group.degree in fitting and room(sequence, group.degree) <= group.room
        ]
        places = sorted(open_ones + formed, key=lambda group: group.degree)  # stable: formed last
        new_most = [max(most, place.work + work(sequence, place.degree)) for place in places]
        return places[new_most.index(min(new_most))] if places else None

    def widened(groups: list[Group]) -> bool:
        while (num_free := ranks - sum(group.degree for group in groups)) > 0:
            group = min(groups, key=lambda group: group.degree)  # the first of several
            added = min(group.degree, ranks - group.degree)
            if added > num_free:
                return False
            group.degree += added
        return True

    def on_all(waiting: list[int]) -> Group:
        group = Group(ranks, problem.tokens_per_rank)
        for sequence in waiting:
            tokens = slice_tokens(lengths[sequence], ranks, multiple)
            if tokens <= group.room:
                group.room -= tokens
                group.sequences.append(sequence)
        return group

    rounds = []
    waiting = sorted(range(len(lengths)), key=lambda sequence: -lengths[sequence])
    while waiting:
        groups: list[Group] = []
        for sequence in waiting:
            group = chosen(sequence, groups)
            if group is None:
                continue
            if not group.sequences:
                groups.append(group)
            group.sequences.append(sequence)
            group.work += work(sequence, group.degree)
            group.room -= room(sequence, group.degree)
        if not widened(groups):
            groups = [on_all(waiting)]
        rounds.append([group.sequences for group in groups for _ in range(group.degree)])
        taken = set(itertools.chain(*(group.sequences for group in groups)))
        waiting = [sequence for sequence in waiting if sequence not in taken]
    return rounds


@quickly
@given(problem=problems().map(cut))
def test_the_plan_is_that_of_the_twin(problem: Problem) -> None:
    assert made_rounds(problem.plan(STRATEGY)) == rounds_of_twin(problem)


@pytest.mark.parametrize("problem", fixed_problems()[:4:2])
def test_larger_batches_are_those_of_the_twin(problem: Problem) -> None:
    assert made_rounds(problem.plan(STRATEGY)) == rounds_of_twin(problem)


def rounds_of_the_original(lengths: list[int], ranks: int, tokens_per_rank: int) -> Rounds:
    data_schedule = pytest.importorskip("megatron.core.datasets.data_schedule")
    if not hasattr(data_schedule, "DefaultDynamicCPScheduler"):
        pytest.skip(
            "this megatron-core has no default_dynamic_cp: put a checkout of Megatron-LM's dev "
            "branch first on PYTHONPATH"
        )
    scheduler = data_schedule.DefaultDynamicCPScheduler(tokens_per_rank, 1, ranks, None)
    found: Rounds = scheduler.get_groups_and_subsamples(list(enumerate(lengths)))
    return found


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 16, 32, 6, 12])
@pytest.mark.filterwarnings("ignore")  # megatron-core's, that there is no GPU
def test_rounds_are_those_of_the_original(ranks: int) -> None:
    rng = np.random.default_rng(ranks)
    unit = 2 * math.lcm(ranks, greatest_power(ranks))  # every degree cuts it evenly, as there
    compared = 0
    for _ in range(40):
        capacity = unit * int(rng.choice([1, 2, 3, 5, 8, 20]))
        longest = capacity * greatest_power(ranks) // unit
        drawn = rng.lognormal(rng.uniform(0, 3), 1.2, int(rng.choice([1, 3, 20, 60, 150])))
        lengths = [unit * max(1, min(longest, int(length))) for length in drawn]
        made = plan(lengths, ranks=ranks, tokens_per_rank=capacity, strategy=STRATEGY)
        try:
            expected = rounds_of_the_original(lengths, ranks, capacity)
        except IndexError:  # it widens a group beyond the last rank
            assert ranks & (ranks - 1)
            continue
        assert made_rounds(made) == expected
        compared += 1
    assert compared > 20


@pytest.mark.parametrize("preset", ["github", "byted"])
@pytest.mark.parametrize("stages", [1, 4])
def test_it_beats_the_static_mesh_and_ours_beat_it(preset: str, stages: int) -> None:
    lengths = preset_lengths(preset, num_tokens=4 * 64 * 8192, max_length=2**19)
    common: dict[str, Any] = {"ranks": 64, "tokens_per_rank": 8192, "pipeline_stages": stages}
    makespan_s = {
        strategy: plan(lengths, strategy=strategy, **common).summary["makespan_s"]
        for strategy in ("static", STRATEGY, "auto")
    }
    assert makespan_s["auto"] < makespan_s[STRATEGY] < makespan_s["static"]


@pytest.mark.parametrize("lengths", ["lognormal", "short", "many rounds"])
def test_it_is_near_linear(lengths: str) -> None:
    # quadratic in sequences, groups or rounds it would take minutes
    rng = np.random.default_rng(0)
    drawn, ranks = {
        "lognormal": (rng.lognormal(6.5, 1.5, 300_000).clip(1, 2**16), 16_384),
        "short": (np.full(1_000_000, 500), 2),
        "many rounds": (rng.integers(4000, 9000, 50_000), 8),
    }[lengths]
    made = plan(drawn.astype(np.int64), ranks=ranks, tokens_per_rank=8192, strategy=STRATEGY)
    assert made.summary["planning_ms"] < 20_000
