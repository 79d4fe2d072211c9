"""ep-balance: rules, figures, bounds, no deadlock, and how near to the bound it comes."""

import dataclasses
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hdp.cli.lengths import batch_of
from megatron_hdp.planner import LLAMA_7B, Plan, plan
from megatron_hdp.planner.experts import figures_in_lockstep
from megatron_hdp.planner.lockstep import PADDING, end_together, slots
from megatron_hdp.planner.pipeline import Pipeline
from tests.planner.blocking import run_blocking
from tests.planner.launch_model import Step, hangs
from tests.planner.problems import Problem, agree, problems, repeatable

quickly = repeatable(80)
HALF = dataclasses.replace(LLAMA_7B, b=LLAMA_7B.b / 2, b_experts=LLAMA_7B.b / 2)
"""Half of what is linear is experts'."""


@st.composite
def domains(draw: st.DrawFn, *, offload: bool = False) -> tuple[Problem, int, float]:
    """A problem, the ranks of a domain (a divisor of its ranks) and the experts' share of b."""
    problem = draw(problems(offload=offload))
    sizes = [size for size in range(1, problem.ranks + 1) if problem.ranks % size == 0]
    return problem, draw(st.sampled_from(sizes)), draw(st.sampled_from([0.0, 0.5, 0.9, 1.0]))


def costs_of(problem: Problem, share: float):
    """The problem's cost model with this share of what is linear in experts."""
    model = problem.model
    linear = model.b + model.b_experts
    return dataclasses.replace(model, b=linear * (1 - share), b_experts=linear * share)


def planned(
    problem: Problem, size: int, costs, strategy: str = "ep-balance", stages=1, chunks=1, parts=1
) -> Plan:
    return problem.plan(
        strategy,
        cost_model=costs,
        expert_parallel_size=size,
        pipeline_stages=stages,
        virtual_stages=chunks,
        sequence_parts=parts,
    )


def check(
    problem: Problem, size: int, share: float, strategy="ep-balance", stages=1, chunks=1, parts=1
) -> None:
    costs = costs_of(problem, share)
    made = planned(problem, size, costs, strategy, stages, chunks, parts)
    made.validate(num_layers=costs.num_layers, pipeline_stages=stages)
    found = figures_in_lockstep(made, costs, size, Pipeline(stages, chunks))
    if size > 1:
        if parts == 1:
            agree(made, found)
        else:  # the planner's bound is that of every plan in so many parts
            assert made.summary["makespan_s"] == pytest.approx(found.makespan_s, rel=1e-9)
            assert made.summary["lower_bound_s"] <= found.makespan_s * (1 + 1e-9)
        assert made.summary["num_positions"] == found.num_positions
        assert made.summary["padding_share"] == pytest.approx(found.padding_share, abs=1e-12)
        assert (made.positions is not None) == (strategy == "ep-balance")
    assert found.lower_bound_s <= found.makespan_s * (1 + 1e-9)
    again = planned(problem, size, costs, strategy, stages, chunks, parts)
    assert again.fingerprint() == made.fingerprint()
    assert Plan.from_json(made.to_json()).fingerprint() == made.fingerprint()


@repeatable(80)
@given(found=domains() | domains(offload=True))
def test_rules_hold_and_figures_agree_with_the_evaluator(found) -> None:
    check(*found)


@pytest.mark.slow
@settings(quickly, max_examples=3000)
@given(found=domains() | domains(offload=True))
def test_rules_hold_on_many_problems(found) -> None:
    check(*found)


@pytest.mark.parametrize("strategy", ["static", "naive", "bytescale", "dp-balance", "pp-balance"])
@repeatable(25)
@given(found=domains())
def test_figures_of_the_other_strategies_are_those_of_lockstep(strategy, found) -> None:
    check(*found, strategy)


@pytest.mark.parametrize("strategy", ["static", "pp-balance", "ep-balance"])
@repeatable(50)
@given(
    found=domains() | domains(offload=True),
    stages=st.sampled_from([2, 3, 4, 8]),
    chunks=st.integers(1, 3),
    parts=st.sampled_from([1, 2, 7, 16]),
)
def test_rules_hold_with_stages(strategy, found, stages, chunks, parts) -> None:
    check(*found, strategy, stages, chunks, parts)


@repeatable(60)
@given(found=domains(), stages=st.sampled_from([2, 4]), chunks=st.sampled_from([1, 2, 3]))
def test_pipelines_that_share_experts_never_deadlock(found, stages, chunks) -> None:
    problem, size, share = found
    made = planned(problem, size, costs_of(problem, share), stages=stages, chunks=chunks)
    lists = slots(made, aligned=True, lockstep_ranks=size)
    assert run_blocking(lists, Pipeline(stages, chunks), size=size) is not None


@pytest.mark.parametrize("late", [1, 2], ids=["a rank", "a domain"])
def test_pipelines_that_share_experts_deadlock_at_other_positions(late) -> None:
    rings = {"ranks": 4, "tokens_per_rank": 128, "pipeline_stages": 2}
    made = plan([512, 512], **rings, expert_parallel_size=2)
    lists = [one.tolist() for one in slots(made, aligned=True, lockstep_ranks=2)]
    assert run_blocking(lists, Pipeline(2), size=2) is not None
    wrong = [[first, PADDING, second] for first, second in lists[:late]] + lists[late:]
    assert run_blocking(wrong, Pipeline(2), size=2) is None


@repeatable(40)
@given(found=domains(), stages=st.sampled_from([1, 2, 3]))
def test_plans_run_to_their_end_however_drivers_wait(found, stages) -> None:
    """With streams that run in order, and drivers that wait at every launch."""
    problem, size, share = found
    if problem.ranks > 16 or size == 1:
        return
    made = planned(problem, size, costs_of(problem, share), stages=stages)
    lists = slots(made, aligned=True, lockstep_ranks=size)
    step = Step(made, lists, stages, 2, size)
    assert not hangs(step, end_together(made, lists, lockstep_ranks=size).tolist(), lambda: True)


def ends(made: Plan, lists: list[list[int]], size: int) -> bool:
    """Whether threads that block in rings and exchanges of experts all come to their end."""
    rings = {
        m: threading.Barrier(len(made.micro_batch(m).ranks))
        for m in set(sum(lists, []))
        if m != PADDING
    }
    exchanges = {
        (domain, place): threading.Barrier(size)
        for domain in range(len(lists) // size)
        for place in range(max(map(len, lists)))
    }
    done = []

    def run(rank: int) -> None:
        for place, m in enumerate(lists[rank]):
            try:
                if m != PADDING:
                    rings[m].wait(0.5)
                exchanges[rank // size, place].wait(0.5)
            except threading.BrokenBarrierError:
                return
        done.append(rank)

    threads = [threading.Thread(target=run, args=(r,), daemon=True) for r in range(len(lists))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(done) == len(lists)


LENGTHS = [1 + (i * i * 7919) % 701 for i in range(60)] + [900, 1500, 380]


def of_twelve(size: int) -> Plan:
    return plan(
        LENGTHS, ranks=12, tokens_per_rank=128, strategy="ep-balance", expert_parallel_size=size
    )


@pytest.mark.parametrize("size", [2, 4, 6])
def test_blocking_ranks_end(size) -> None:
    made = of_twelve(size)
    rings = [made.micro_batch(m).ranks for m in range(made.num_micro_batches)]
    assert any(len({rank // size for rank in ring}) > 1 for ring in rings)
    lists = slots(made, aligned=True, lockstep_ranks=size)
    assert ends(made, [one.tolist() for one in lists], size)


def test_the_check_fails_without_padding() -> None:
    whole = {"ranks": 4, "tokens_per_rank": 6, "slice_multiple": 6}  # no slice is as small
    made = plan([6, 6, 6], **whole, strategy="ep-balance", expert_parallel_size=2)
    lists = [one.tolist() for one in slots(made, aligned=True, lockstep_ranks=2)]
    assert made.summary["padding_share"] > 0
    assert ends(made, lists, 2)
    assert not ends(made, [[m for m in one if m != PADDING] for one in lists], 2)


@pytest.mark.parametrize("size", [8, 32, 64])
@pytest.mark.parametrize("data", ["github", "byted"])
def test_near_the_bound(data, size) -> None:
    for seed in range(2):
        ranks = {"ranks": 64, "tokens_per_rank": 8192}
        lengths = batch_of(f"preset:{data}", **ranks, num_tokens=None, seed=seed).lengths
        made = plan(lengths, **ranks, cost_model=HALF, expert_parallel_size=size)
        assert made.strategy == "ep-balance"
        assert made.summary["efficiency"] >= 0.97


@pytest.mark.parametrize(
    "data, ranks, capacity, sizes",
    [
        ("github", 64, 8192, (8, 32, 64)),
        ("github", 64, 32768, (8, 32, 64)),
        ("byted", 64, 8192, (8, 32, 64)),
        ("byted", 64, 32768, (8, 32, 64)),
        ("github", 1024, 8192, (64,)),  # nested rings are better alone, and lose a quarter here
    ],
)
def test_pipelines_lose_little_to_lockstep(data, ranks, capacity, sizes) -> None:
    """Of what pp-balance reaches with experts on the ranks that own the tokens."""
    problem = {"ranks": ranks, "tokens_per_rank": capacity}
    num_tokens = 8 * ranks * capacity
    lengths = batch_of(f"preset:{data}", **problem, num_tokens=num_tokens, seed=5).lengths
    problem |= {"cost_model": dataclasses.replace(HALF, num_layers=8), "pipeline_stages": 4}
    alone = plan(lengths, **problem)
    for size in sizes:
        made = plan(lengths, **problem, expert_parallel_size=size)
        assert (alone.strategy, made.strategy) == ("pp-balance", "ep-balance")
        assert made.summary["efficiency"] >= 0.96 * alone.summary["efficiency"]


def test_a_domain_of_one_rank_is_dp_balance() -> None:
    one = plan(LENGTHS, ranks=12, tokens_per_rank=128, strategy="ep-balance")
    other = plan(LENGTHS, ranks=12, tokens_per_rank=128, strategy="dp-balance")
    assert dataclasses.replace(one, strategy="dp-balance").fingerprint() == other.fingerprint()
    stages = {"ranks": 12, "tokens_per_rank": 128, "pipeline_stages": 3}
    one, other = (plan(LENGTHS, **stages, strategy=f"{name}-balance") for name in ("ep", "pp"))
    assert dataclasses.replace(one, strategy="pp-balance").fingerprint() == other.fingerprint()


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"expert_parallel_size": 5}, "expert parallel size is 5; expected a divisor of the 12"),
        ({"expert_parallel_size": 24}, "expert parallel size is 24; expected"),
        ({"expert_parallel_size": 5, "pipeline_stages": 2}, "is 5; expected a divisor of the 12"),
        ({"expert_parallel_size": 0}, "expert_parallel_size is 0; expected at least 1"),
    ],
)
def test_what_makes_no_sense_is_refused(changes, message) -> None:
    with pytest.raises(ValueError, match=message):
        plan([3, 5], ranks=12, tokens_per_rank=8, **changes)


def test_offload_where_only_that_makes_a_sequence_fit() -> None:
    costs = dataclasses.replace(LLAMA_7B, num_layers=32, host_bytes_per_s=1e15)
    domains = {"ranks": 4, "tokens_per_rank": 64, "expert_parallel_size": 2}
    made = plan([300, 20, 20, 9], **domains, cost_model=costs, offload="auto")
    assert made.strategy == "ep-balance"
    made.validate(num_layers=32)
    assert (made.offload_ratios > 0).sum() == 1
