"""A step whose items are encoded beside a pipeline's micro-batches, replayed exactly."""

from dataclasses import replace

import numpy as np

from megatron_hdp.media import ItemBatch, ItemCostModel, ItemPlan, gaps_of, slots_of_micro_batches
from megatron_hdp.media.evaluation import run_phase
from megatron_hdp.planner import Evaluation, Plan
from megatron_hdp.planner.pipeline_evaluation import pipeline_schedule


def joined_step_s(
    plan: Plan,
    times: Evaluation,
    batch: ItemBatch,
    items: ItemPlan,
    cost: ItemCostModel,
    *,
    tensor_ranks: int = 1,
) -> float:
    """Return the time of a step from the first item to the last gradient, exchanges left out.

    Each rank encodes its items of all waves, then runs its part of the schedule. Micro-batches wait
    on the first stage for the rows of their wave. Behind its last backward a rank goes through its
    items again, wave by wave, once all gradients of a wave are there.

    Args:
        plan: of the step's sequences; ranks share no experts.
        times: of that plan, with the pipeline that each rank is; several stages.
        batch: the items of the step, with their waves and gaps.
        items: of that batch.
        cost: of items.
        tensor_ranks: of each stage; ranks of the job lie by tensor, HDP, stage.
    """
    assert batch.waves is not None and batch.gaps is not None, "items have waves and gaps"
    wave_starts = batch.gaps.wave_starts
    pipeline, phases = times.pipeline, np.unique(items.phases)
    waves = [int(batch.waves[items.phases == phase][0]) for phase in phases]
    rows_s = np.zeros(batch.num_ranks)
    come_s = np.zeros(len(wave_starts))  # rows of each wave
    for wave, phase in zip(waves, phases, strict=True):
        run_phase(rows_s, batch, items, cost, phase, cost.forward_share)
        come_s[wave:] = rows_s.max()
    begin_s = rows_s.reshape(pipeline.stages, plan.num_ranks, tensor_ranks).max(axis=2)
    earliest_s = np.maximum.reduceat(begin_s[:, plan.ranks], plan.rank_offsets[:-1], axis=1)
    earliest_s = np.tile(earliest_s, (pipeline.chunks, 1))
    slots = slots_of_micro_batches(plan, pipeline)
    wave_of = np.searchsorted(wave_starts, slots, side="right") - 1
    earliest_s[0] = np.maximum(earliest_s[0], come_s[wave_of])
    schedule = pipeline_schedule(plan, times.duration_s, pipeline, earliest_s)
    ran = replace(
        times,
        forward_start_s=schedule.forward_start_s,
        backward_start_s=schedule.backward_start_s,
        part_starts_s=schedule.part_starts_s,
        makespan_s=schedule.makespan_s,
    )
    gaps = gaps_of(plan, ran, wave_starts, tensor_ranks=tensor_ranks)
    clock = gaps.free_from_s.copy()
    if cost.forward_share < 1:
        for wave, phase in zip(waves, phases, strict=True):
            np.maximum(clock, gaps.given_s[wave], out=clock)
            run_phase(clock, batch, items, cost, phase, 1 - cost.forward_share)
    return max(float(clock.max()), schedule.makespan_s)
