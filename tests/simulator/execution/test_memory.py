"""Memory over time: micro-batches between forward and backward, what works, what left."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from megatron_hdp.planner.memory import fullest_stage, stage_memory
from megatron_hdp.planner.pipeline import Pipeline
from megatron_hdp.simulator.execution import MemoryCosts, execute
from megatron_hdp.simulator.execution.memory import Kept
from tests.simulator.execution.plans import COSTS, plan_of
from tests.support.jobs import job_of


def bytes_of(*row_layers: int) -> MemoryCosts:
    """A byte a layer and token."""
    rows = tuple(map(float, row_layers))
    return MemoryCosts(fixed_bytes=(100.0, 50.0), row_bytes_per_token=rows)


def test_one_forward_one_backward_over_time() -> None:
    plan = plan_of([[0], [0], [0]], lengths=[10, 20, 5])
    run = execute(plan, COSTS, pipeline=Pipeline(2), row_layers=(4, 4), memory=bytes_of(4, 4))
    trace = run.memory
    assert trace is not None and (trace.rank, trace.stage) == (0, 0)
    # order of stage 0: forwards 0 and 1, backward 0, forward 2, backwards 1 and 2; 4 layers each
    levels = dict(zip(trace.time_s.tolist(), trace.num_bytes.tolist(), strict=True))
    assert levels[0.0] == 140.0  # forward 0
    assert levels[1.0] == 220.0  # forward 1 as well
    assert levels[4.0] == 220.0  # backward 0 still has its own
    assert levels[6.0] == 200.0  # forward 2, behind it
    assert levels[9.0] == 120.0  # backward 1 has ended
    assert levels[float(run.end_s[0, 0])] == 100.0 == trace.fixed_bytes
    assert trace.peak_bytes == 220.0 == run.record.peak_memory_bytes


def test_the_fullest_rank_is_found() -> None:
    plan = plan_of([[0], [1], [1], [2, 0]], lengths=[10, 30, 5, 8])
    trace = execute(plan, COSTS, row_layers=(4,), memory=bytes_of(4)).memory
    assert trace is not None
    assert (trace.rank, trace.stage, trace.peak_bytes) == (1, 0, 100.0 + 4 * 30)


def test_what_left_for_the_host_is_not_here() -> None:
    plan = plan_of([[0], [0]], lengths=[10, 9], ratios=[0.5, 0.0])
    trace = execute(plan, COSTS, row_layers=(4,), memory=bytes_of(4)).memory
    assert trace is not None
    assert trace.num_bytes.max() == 136.0  # the second; of the first 2 + 0.5 x 2 layers stay
    assert 130.0 in trace.num_bytes.tolist()


def test_what_is_recomputed_is_hardly_here() -> None:
    plan = plan_of([[0], [0]], lengths=[10, 9])
    plan = dataclasses.replace(plan, recomputed=[True, False], recomputed_share=0.3)
    trace = execute(plan, COSTS, row_layers=(4,), memory=bytes_of(4)).memory
    assert trace is not None
    assert sorted(set(trace.num_bytes.tolist())) == [100.0, 112.0, 136.0]


def test_a_stream_keeps_keys_and_inputs_and_runs_a_part() -> None:
    """40 tokens in four parts, the keys of the last one on the host."""
    plan = plan_of([[0], [0]], lengths=[40, 9], ratios=[0.25, 0.0])
    plan = dataclasses.replace(plan, num_parts=[4, 1], streams=[True, False])
    costs = dataclasses.replace(
        bytes_of(4, 4), row_stream_per_token=(1.0, 1.0), row_inputs_per_token=(0.5,)
    )
    run = execute(plan, COSTS, pipeline=Pipeline(2), row_layers=(4, 4), memory=costs)
    assert run.memory is not None and run.memory.stage == 0
    kept, running, other = 30 + 20, 40, 36
    levels = [100 + kept + running, 100 + kept + other, 100 + kept + other + running]
    assert sorted({*levels, 100 + kept, 100 + other, 100.0}) == sorted(
        set(run.memory.num_bytes.tolist())
    )


JOB = dataclasses.replace(
    job_of(8, 512, 128_256, num_gpus=16, tensor_ranks=2, stages=2, tokens_per_rank=8192),
    sequence_parallel=True,
)


@pytest.mark.parametrize("chunks", [1, 2, 4])
@pytest.mark.parametrize("tokens", [1, 100, 4096, 8192])
def test_of_a_job_it_is_the_memory_of_check(tokens: int, chunks: int) -> None:
    job = dataclasses.replace(JOB, model_chunks=chunks)
    costs = MemoryCosts.of_job(job, 8192)
    for stage in (0, 1):
        alive = job.alive(stage)
        pipeline = Pipeline(2, chunks)
        layers = np.full(pipeline.rows, JOB.shape.num_layers // pipeline.rows)
        of_one = np.array([8192]), Kept(np.array([0.0]), np.array([1.0]), np.array([0]))
        rows = costs.resident_bytes(*of_one, pipeline, layers)
        one = rows[stage::2].sum()
        found = costs.fixed_bytes[stage] + alive * one
        found += costs.working_bytes(stage, np.array([tokens]))[0]
        assert found == pytest.approx(stage_memory(job, stage, tokens).total, rel=1e-9)


@pytest.mark.parametrize(
    ("layers", "changes"),
    [
        *(((8 // rows,) * rows, {}) for rows in (2, 4, 8)),
        # two chunks of each stage
        *(((1, 3, 2, 2), {"recompute": recompute}) for recompute in (None, "full")),
        ((4, 4), {"runs_parts": True}),
    ],
)
def test_full_micro_batches_take_what_check_says(
    layers: tuple[int, ...], changes: dict[str, Any]
) -> None:
    chunks = len(layers) // 2
    job = dataclasses.replace(JOB, model_chunks=chunks, stage_layers=layers, **changes)
    plan = plan_of([[rank] for _ in range(8) for rank in range(4)], lengths=[8192] * 32)
    pipeline, memory = Pipeline(2, chunks), MemoryCosts.of_job(job, 8192)
    run = execute(plan, COSTS, pipeline=pipeline, row_layers=layers, memory=memory)
    assert run.record.peak_memory_bytes == pytest.approx(fullest_stage(job).total, rel=1e-9)


def test_stages_of_unequal_layers_hold_what_they_have() -> None:
    plan = plan_of([[0]], lengths=[10])
    for layers, stage, peak in (((3, 18), 1, 50 + 180.0), ((5, 4), 0, 100 + 50.0)):
        memory = bytes_of(*layers)
        trace = execute(plan, COSTS, pipeline=Pipeline(2), row_layers=layers, memory=memory).memory
        assert trace is not None and (trace.stage, trace.peak_bytes) == (stage, peak)


def test_a_pass_holds_the_layers_of_its_chunk() -> None:
    plan = plan_of([[0], [0]], lengths=[10, 20], ratios=[0.5, 0.0])
    rows, memory = (2,) * 4, bytes_of(2, 2, 2, 2)
    run = execute(plan, COSTS, pipeline=Pipeline(2, 2), row_layers=rows, memory=memory)
    trace = run.memory
    assert trace is not None and (trace.rank, trace.stage) == (0, 0)
    levels = dict(zip(trace.time_s.tolist(), trace.num_bytes.tolist(), strict=True))
    # of the first chunk half of its two layers leaves, of the second none: 10 and 20 bytes
    assert [levels[time_s] for time_s in (0.0, 0.5, 1.0, 1.5)] == [110.0, 150.0, 170.0, 210.0]
    # backwards of the second chunk, then of the first
    assert [levels[time_s] for time_s in (4.0, 5.5, 6.5, 7.5)] == [190.0, 150.0, 140.0, 100.0]
