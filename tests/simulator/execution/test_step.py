"""A whole step: equal to the evaluation where both know the same, and what stands behind it."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hdp.planner import CostModel, evaluate
from megatron_hdp.planner.lockstep import end_together, slots
from megatron_hdp.planner.pipeline import Pipeline
from megatron_hdp.simulator.execution import Disturbance, Machine, execute
from megatron_hdp.simulator.execution.step import reduced_s
from tests.planner.problems import COST_MODELS, EXECUTED_STRATEGIES, Problem, problems
from tests.simulator.execution.plans import COSTS, plan_of
from tests.support.examples import some

STRATEGIES = [*EXECUTED_STRATEGIES, "pp-balance"]
OTHERS = ("latency", "blocks", "latency, blocks", "double rings", "wide nodes")
THIRDS = [name for name in COST_MODELS if name not in OTHERS]
"""Cost models whose backward takes twice the time of a forward, as the evaluation has it."""


@settings(max_examples=some(80))
@given(problems(), st.sampled_from(STRATEGIES))
def test_without_stages_it_is_the_evaluation(problem: Problem, strategy: str) -> None:
    problem = dataclasses.replace(problem, speeds=())
    plan = problem.plan(strategy)
    expected, run = evaluate(plan, problem.model), execute(plan, problem.model)
    assert run.makespan_s == pytest.approx(expected.makespan_s, rel=1e-9)
    starts = run.forward_start_s[0, : plan.num_micro_batches]
    np.testing.assert_allclose(starts, expected.start_s, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(run.busy_s, expected.busy_s, rtol=1e-9, atol=1e-12)
    assert run.record.ring_bytes == pytest.approx(expected.ring_bytes)
    assert run.step_s == run.makespan_s
    if run.step_s:
        assert run.record.bubble_share == pytest.approx(expected.idle_share, abs=1e-9)


@settings(max_examples=some(50))
@given(problems(), st.sampled_from(STRATEGIES))
def test_slow_members_take_at_least_what_the_evaluation_says(
    problem: Problem, strategy: str
) -> None:
    plan = problem.plan(strategy)
    expected, run = evaluate(plan, problem.model), execute(plan, problem.model)
    assert run.makespan_s >= expected.makespan_s * (1 - 1e-9)
    np.testing.assert_allclose(run.busy_s, expected.busy_s, rtol=1e-9, atol=1e-12)


@settings(max_examples=some(80))
@given(
    problems(),
    st.sampled_from(["pp-balance", "static", "dynamic-cp"]),
    st.integers(2, 4),
    st.integers(1, 3),
    st.booleans(),
)
def test_with_stages_it_is_the_evaluation(
    problem: Problem, strategy: str, stages: int, chunks: int, is_even: bool
) -> None:
    if problem.cost_model not in THIRDS:
        problem = dataclasses.replace(problem, cost_model="attention")
    problem = dataclasses.replace(problem, speeds=())
    try:
        plan = problem.plan(strategy, pipeline_stages=stages, virtual_stages=chunks)
    except ValueError:
        assert strategy == "dynamic-cp"  # it needs room on powers of two
        return
    model = problem.model
    if chunks > 1:
        model = dataclasses.replace(model, g=0.0)  # the evaluation's padding takes no time
    weights = () if is_even else tuple(range(stages * chunks, 0, -1))
    expected = evaluate(plan, model, stages, chunks, weights)
    run = execute(plan, model, pipeline=Pipeline(stages, chunks, weights))
    num = plan.num_micro_batches
    assert run.makespan_s == pytest.approx(expected.makespan_s, rel=1e-9)
    for found, known in (
        (run.forward_start_s, expected.forward_start_s),
        (run.backward_start_s, expected.backward_start_s),
    ):
        np.testing.assert_allclose(found[:, :num], known, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(run.busy_s, expected.busy_s, rtol=1e-9, atol=1e-12)


@settings(max_examples=some(60))
@given(problems(), st.integers(2, 4), st.integers(0, 99))
def test_parts_pass_the_stages_as_the_evaluation_says(
    problem: Problem, stages: int, seed: int
) -> None:
    """Random numbers of parts, some recomputed or streams, with hops, launches, traffic by part."""
    if problem.cost_model not in THIRDS:
        problem = dataclasses.replace(problem, cost_model="network-bound")
    problem = dataclasses.replace(problem, speeds=())
    whole = problem.plan("pp-balance", pipeline_stages=stages)
    draw = np.random.default_rng(seed)
    parts = draw.integers(1, 6, whole.num_micro_batches)
    recomputed = draw.random(len(parts)) < 0.3 * (seed % 2)
    is_one = (np.diff(whole.sequence_offsets) == 1) & (np.diff(whole.local_offsets) == 0)
    streams = (draw.random(len(parts)) < 0.3 * (seed % 5)) & (parts > 1) & ~recomputed & is_one
    on_host = np.where(streams, draw.integers(0, parts + 1), 0)
    plan = dataclasses.replace(
        whole,
        num_parts=parts,
        linear_tokens=float(seed),
        recomputed=recomputed,
        streams=streams,
        offload_ratios=on_host / parts,
    )
    model = dataclasses.replace(problem.model, query_ratio=0.7 * (seed % 3))
    slow_host = dataclasses.replace(model, host_bytes_per_s=10.0 ** (seed % 7))
    expected = evaluate(plan, slow_host, stages)
    run = execute(plan, slow_host, pipeline=Pipeline(stages))
    np.testing.assert_allclose(run.busy_s, expected.busy_s, rtol=1e-9, atol=1e-12)
    model = dataclasses.replace(model, host_bytes_per_s=1e300)  # copies are no third of a pass
    expected = evaluate(plan, model, stages)
    run = execute(plan, model, pipeline=Pipeline(stages))
    assert run.makespan_s == pytest.approx(expected.makespan_s, rel=1e-9)
    np.testing.assert_allclose(run.busy_s, expected.busy_s, rtol=1e-9, atol=1e-12)
    assert run.record.ring_bytes == pytest.approx(expected.ring_bytes)
    if plan.num_parts is not None:
        num = int(parts.sum())
        for found, known in zip(run.part_starts_s, expected.part_starts_s, strict=True):
            np.testing.assert_allclose(found[:, :num], known, rtol=1e-9, atol=1e-12)


def test_each_part_is_a_message() -> None:
    """Two stages, one micro-batch of 12 s in four parts, 1 s of latency, 1 s for 8 tokens."""
    whole = plan_of([[0]], [32])
    plan = dataclasses.replace(whole, num_parts=[4], linear_tokens=9.0)
    model = CostModel(a=0.0, b=12 / 32, kv_bytes_per_token=0.0)
    machine = Machine(message_bytes_per_token=1.0, network_bytes_per_s=8.0, message_latency_s=1.0)
    run = execute(plan, model, pipeline=Pipeline(2), machine=machine)
    # a part takes 0.5 and 1 s of a stage; one is ahead, and a message of 2 s either way
    assert run.makespan_s == pytest.approx((0.5 + 2 + 4 * 0.5) + (4 * 1 + 2 + 1))
    assert run.part_starts_s[0].tolist() == [[0, 0.5, 1, 1.5], [2.5, 3, 3.5, 4]]
    assert run.backward_end_s[0, 0] - run.backward_start_s[0, 0] == pytest.approx(4)


@settings(max_examples=some(20))
@given(problems(), st.sampled_from(["pp-balance", "static"]), st.integers(2, 3))
def test_padding_of_virtual_stages_costs_time(problem: Problem, strategy: str, chunks: int) -> None:
    if problem.cost_model not in THIRDS:
        problem = dataclasses.replace(problem, cost_model="launch-bound")
    plan = problem.plan(strategy, pipeline_stages=2, virtual_stages=chunks)
    expected = evaluate(plan, problem.model, 2, chunks)
    run = execute(plan, problem.model, pipeline=Pipeline(2, chunks))
    assert run.makespan_s >= expected.makespan_s * (1 - 1e-9)
    counts = np.bincount(plan.ranks, minlength=plan.num_ranks)
    assert len(run.padding_ranks) >= (counts % 2).sum()


@settings(max_examples=some(30))
@given(problems(offload=True), st.sampled_from(STRATEGIES), st.floats(1.0, 20.0))
def test_a_slower_network_or_host_is_never_faster(
    problem: Problem, strategy: str, factor: float
) -> None:
    plan, model = problem.plan(strategy), problem.model
    slower = dataclasses.replace(
        model,
        intra_node_bytes_per_s=model.intra_node_bytes_per_s / factor,
        inter_node_bytes_per_s=model.inter_node_bytes_per_s / factor,
        host_bytes_per_s=model.host_bytes_per_s / factor,
    )
    one, other = execute(plan, model), execute(plan, slower)
    assert other.makespan_s >= one.makespan_s * (1 - 1e-9)
    assert (other.forward_start_s >= one.forward_start_s * (1 - 1e-9)).all()


def costs_of(seconds: float, **others: int) -> CostModel:
    """A micro-batch takes so many seconds, and as many bytes of a token may leave, 1 a second."""
    free = {"a": 0.0, "b": 0.0, "kv_bytes_per_token": 0.0, "host_bytes_per_s": 1.0}
    return CostModel(**free, **others, g=seconds, activation_bytes_per_token=seconds)


def test_the_host_is_the_bottleneck() -> None:
    # 6 layers, 1 s forward and 2 s backward each; 12 bytes leave, 1 a second: 3 s a layer
    costs = costs_of(18.0, num_layers=6)
    run = execute(plan_of([[0], [0]], ratios=[1.0, 0.0]), costs)
    assert run.forward_s[0].tolist() == [13.0, 6.0]  # the last layer begins when all has left
    assert run.backward_s[0].tolist() == [16.0, 12.0]  # 1 s of waiting for each of four
    assert run.record.copies_s == pytest.approx(7.0 + 4.0)
    assert run.makespan_s == 47.0


def test_each_chunk_sends_its_share_to_the_host() -> None:
    # 6 layers in 2 chunks: 3 leave of the first, 1 of the second; 3 s of copies a layer
    costs = costs_of(36.0, num_layers=6)
    pipeline = Pipeline(2, 2)
    run = execute(plan_of([[0], [0]], ratios=[1.0, 0.0]), costs, pipeline=pipeline)
    # on a row 3 s forward and 6 s backward, 1 and 2 s a layer
    assert run.forward_s.tolist() == [[9.0, 3.0], [9.0, 3.0], [4.0, 3.0], [4.0, 3.0]]
    # the last layer of the first chunk waits 3 s for its own, two more 1 s each
    assert run.backward_s.tolist() == [[11.0, 6.0], [11.0, 6.0], [7.0, 6.0], [7.0, 6.0]]
    assert run.record.copies_s == pytest.approx(6.0 + 5.0 + 1.0 + 1.0)
    assert run.busy_s.tolist() == [36.0 + 13.0]


def test_stages_of_unequal_layers_send_their_own() -> None:
    # 2 layers of 1 s, which stay; 8 of 1 s, of which 6 leave in 3 s each
    pipeline = Pipeline(2, 1, (2, 8))
    run = execute(
        plan_of([[0]], ratios=[1.0]), costs_of(30.0), pipeline=pipeline, row_layers=(2, 8)
    )
    assert run.forward_s[:, 0].tolist() == pytest.approx([2.0, 8.0 + 11.0])
    assert run.backward_s[:, 0].tolist() == pytest.approx([4.0, 16.0 + 6 * 1.0])


MACHINE = Machine(
    gradient_bytes=(80.0,),
    parameter_bytes=(40.0,),
    network_bytes_per_s=10.0,
    gradient_buckets=4,
    optimizer_s=0.5,
)


def test_gradients_the_optimizer_and_parameters_stand_behind_the_last_backward() -> None:
    run = execute(plan_of([[0], [1], [1]]), COSTS, machine=MACHINE)
    record = run.record
    assert (record.makespan_s, record.sync_s) == (12.0, 4.0)  # half of 80 bytes at 10 a second
    assert (record.optimizer_s, record.gather_s, record.step_s) == (0.5, 2.0, 18.5)
    assert run.reduced_s.tolist() == [16.0]


def test_reductions_inside_of_the_last_backward() -> None:
    overlapping = dataclasses.replace(MACHINE, overlaps_sync=True)
    # both ranks end together: parts are ready at 9, 10, 11 and 12
    run = execute(plan_of([[0], [1], [0], [1]]), COSTS, machine=overlapping)
    assert run.record.sync_s == 1.0
    # rank 1 waits for nobody in its last micro-batch, but rank 0's ring has one that goes on
    run = execute(plan_of([[0, 1], [1]]), COSTS, machine=overlapping)
    assert run.record.sync_s == 1.0
    slow = dataclasses.replace(overlapping, network_bytes_per_s=1.0)
    run = execute(plan_of([[0, 1], [1]]), COSTS, machine=slow)  # parts from 6 on, on rank 0
    assert run.record.sync_s == pytest.approx(9 + 40 - 12)


def test_with_virtual_stages_reductions_begin_behind_the_last_backward() -> None:
    overlapping = dataclasses.replace(MACHINE, overlaps_sync=True)
    plan = plan_of([[0], [1], [0], [1]])
    plain = execute(plan, COSTS, pipeline=Pipeline(2), machine=overlapping)
    virtual = execute(plan, COSTS, pipeline=Pipeline(2, 2), machine=overlapping)
    assert (plain.record.sync_s, virtual.record.sync_s) == (2.5, 4.0)
    assert virtual.reduced_s.tolist() == [7.5 + 4.0, 6.5 + 4.0]


def test_without_the_distributed_optimizer_all_ranks_have_all_gradients() -> None:
    machine = dataclasses.replace(MACHINE, distributed_optimizer=False)
    record = execute(plan_of([[0], [1]]), COSTS, machine=machine).record
    assert (record.sync_s, record.gather_s) == (8.0, 0.0)


def test_each_stage_has_its_own_gradients() -> None:
    machine = dataclasses.replace(MACHINE, gradient_bytes=(80.0, 20.0), parameter_bytes=(8.0, 40.0))
    run = execute(plan_of([[0], [1]]), COSTS, pipeline=Pipeline(2), machine=machine)
    assert run.end_s.tolist() == [[6.0, 6.0], [4.0, 4.0]]
    assert run.reduced_s.tolist() == [10.0, 5.0]
    assert (run.record.sync_s, run.record.gather_s) == (4.0, 2.0)
    with pytest.raises(ValueError, match="found bytes of 2 stages; expected those of stage 2"):
        execute(plan_of([[0], [1]]), COSTS, pipeline=Pipeline(3), machine=machine)


def test_in_one_node_nothing_takes_the_network() -> None:
    machine = dataclasses.replace(MACHINE, one_node=True, nvlink_bytes_per_s=20.0)
    record = execute(plan_of([[0], [1]]), COSTS, machine=machine).record
    assert (record.sync_s, record.gather_s) == (2.0, 1.0)


def test_loading_hides_behind_the_step_before() -> None:
    for loading_s, exposed_s in ((5.0, 0.0), (6.0, 0.0), (7.5, 1.5)):
        record = execute(plan_of([[0]]), COSTS, machine=Machine(loading_s=loading_s)).record
        assert (record.loading_s, record.step_s) == (exposed_s, 6.0 + exposed_s)


def test_noise_belongs_to_step_micro_batch_and_rank() -> None:
    def runs(rings: list[list[int]], step: int = 0, seed: int = 1) -> list[float]:
        disturbed = Disturbance(noise=0.2, seed=seed)
        run = execute(plan_of(rings), COSTS, disturbance=disturbed, step=step)
        return run.forward_s[0].tolist()

    first = runs([[0], [1], [2]])
    assert len(set(first)) == 3
    assert runs([[0], [1], [3]])[:2] == first[:2]
    assert runs([[1], [0], [2]])[0] != first[0]  # another rank has its own
    assert runs([[0], [1], [2]]) == first
    assert runs([[0], [1], [2]], step=1) != first != runs([[0], [1], [2]], seed=2)
    many = np.log(runs([[rank] for rank in range(4000)])) - np.log(2.0)
    assert many.std() == pytest.approx(0.2, rel=0.05)
    assert many.mean() == pytest.approx(0.0, abs=0.01)


def test_blocks_and_hops_take_as_long_backward_as_forward() -> None:
    # 3 layers; a block is 1 s; a hop 0.5 s, which nothing hides
    costs = CostModel(
        a=0.0, b=3.0, kv_bytes_per_token=0.0, num_layers=3, block_s=1.0, intra_node_hop_s=0.5
    )
    run = execute(plan_of([[0], [0, 1]], lengths=[1, 2]), costs)
    assert run.forward_s[0].tolist() == [3.0 + 1.0, 3.0 * 2 + 1.0 + 3 * 0.5]
    assert run.backward_s[0].tolist() == [3.0 + 2.0, 3.0 * 2 + 2.0 + 3 * 0.5]
    assert run.record.ring_exposed_s == pytest.approx(3.0)


def test_slow_ranks_slow_their_rings() -> None:
    run = execute(plan_of([[0, 1], [2]]), COSTS, disturbance=Disturbance(slow={1: 0.5}))
    assert run.forward_s[0].tolist() == [4.0, 2.0]
    assert run.busy_s.tolist() == [6.0, 12.0, 6.0]
    with pytest.raises(ValueError, match="slow rank is 3; expected 0 to 2"):
        execute(plan_of([[0, 1], [2]]), COSTS, disturbance=Disturbance(slow={3: 0.5}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"network_bytes_per_s": 0}, "network_bytes_per_s is 0; expected a finite number > 0"),
        ({"gradient_bytes": (-1.0,)}, "gradient_bytes is -1.0; expected a finite number >= 0"),
        ({"gradient_bytes": ()}, "gradient_bytes is empty"),
        ({"optimizer_s": float("nan")}, "optimizer_s is nan"),
        ({"loading_s": "5"}, "loading_s is '5'"),
        ({"loading_s": True}, "loading_s is True; expected a finite number >= 0"),
        ({"one_node": 1}, "one_node is 1; expected true or false"),
    ],
)
def test_a_machine_of_no_use_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Machine(**changes)  # type: ignore[arg-type]


def parts_slowly(
    end: list[float], last: list[float], inside: list[bool], reduction: float, parts: int
) -> float:
    now = 0.0
    for part in range(1, parts + 1):
        ready = max(
            e - (1 - part / parts) * d if is_inside else e
            for e, d, is_inside in zip(end, last, inside, strict=True)
        )
        now = max(now, ready) + reduction / parts
    return now


@pytest.mark.parametrize(
    ("overlaps", "reduction", "parts", "expected"),
    [
        (False, 2.0, 4, 12.0),
        (True, 2.0, 4, 10.5),  # all but the last part is done in the last backward
        (True, 2.0, 1, 12.0),  # one part is there at the end
        (True, 8.0, 4, 15.0),  # the first part is there at 10 - 3/4 of 4 = 7
    ],
)
def test_two_ranks(overlaps: bool, reduction: float, parts: int, expected: float) -> None:
    end, last = [8.0, 10.0], [4.0, 4.0]
    found = reduced_s(np.array(end), np.array(last), overlaps, reduction, parts)
    assert found == expected == parts_slowly(end, last, [overlaps] * 2, reduction, parts)


def test_only_the_first_and_the_last_part_decide() -> None:
    random = np.random.default_rng(0)
    for _ in range(300):
        ranks, parts = int(random.integers(1, 6)), int(random.integers(1, 9))
        end = random.uniform(5, 9, ranks)
        last, overlaps = random.uniform(0, 5, ranks), bool(random.random() < 0.5)
        reduction = float(random.uniform(0, 8))
        found = reduced_s(end, last, overlaps, reduction, parts)
        inside = [overlaps] * ranks
        slowly = parts_slowly(end.tolist(), last.tolist(), inside, reduction, parts)
        assert found == pytest.approx(slowly, rel=1e-12)


@settings(max_examples=some(30))
@given(problems(), st.sampled_from(["naive", "bytescale", "dp-balance"]), st.sampled_from([1, 3]))
def test_ranks_that_may_not_begin_decide_nothing(
    problem: Problem, strategy: str, stages: int
) -> None:
    plan = problem.plan(strategy)
    run = execute(plan, problem.model, pipeline=Pipeline(stages))
    of_ranks = slots(plan, aligned=stages > 1)
    inside = end_together(plan, of_ranks).tolist()
    padding = iter(range(plan.num_micro_batches, run.backward_s.shape[1]))
    named = [[next(padding) if m < 0 else m for m in one.tolist()] for one in of_ranks]
    last_s = run.backward_s[0][[one[-1] for one in named]]
    reduction = run.makespan_s
    for end_s in run.end_s:
        slowly = parts_slowly(end_s.tolist(), last_s.tolist(), inside, reduction, 5)
        assert reduced_s(end_s, last_s, True, reduction, 5) == pytest.approx(slowly, rel=1e-9)
