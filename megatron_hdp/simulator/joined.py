"""A step whose items are encoded beside a pipeline's micro-batches, replayed exactly."""

from dataclasses import dataclass, replace

import numpy as np

from megatron_hdp.arrays import Float64Array
from megatron_hdp.media import ItemBatch, ItemCostModel, ItemPlan, gaps_of, slots_of_micro_batches
from megatron_hdp.media.evaluation import run_phase
from megatron_hdp.planner import Evaluation, Plan
from megatron_hdp.planner.pipeline_evaluation import pipeline_schedule


@dataclass(frozen=True, kw_only=True)
class JoinedStep:
    """When ranks encode, and when they run micro-batches; seconds since the first item began."""

    times: Evaluation
    """Of the step's sequences."""
    encoding_s: Float64Array
    """When each rank begins and ends the items of each wave, ``[waves, 2, ranks of the job]``."""
    encoding_again_s: Float64Array
    """The same behind the schedule; of a frozen encoder none, ``[0, 2, ranks of the job]``."""

    @property
    def step_s(self) -> float:
        """Until the last gradient."""
        return max(float(self.encoding_again_s.max(initial=0)), self.times.makespan_s)


def joined_step(
    plan: Plan,
    times: Evaluation,
    batch: ItemBatch,
    items: ItemPlan,
    cost: ItemCostModel,
    *,
    tensor_ranks: int = 1,
) -> JoinedStep:
    """Return what runs when in a step, exchanges left out.

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
    encoding_s = []
    for wave, phase in zip(waves, phases, strict=True):
        begin_s = rows_s.copy()
        run_phase(rows_s, batch, items, cost, phase, cost.forward_share)
        encoding_s.append([begin_s, rows_s.copy()])
        come_s[wave:] = rows_s.max()
    first_s = rows_s.reshape(pipeline.stages, plan.num_ranks, tensor_ranks).max(axis=2)
    earliest_s = np.maximum.reduceat(first_s[:, plan.ranks], plan.rank_offsets[:-1], axis=1)
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
    clock, again_s = gaps.free_from_s.copy(), []
    if cost.forward_share < 1:
        for wave, phase in zip(waves, phases, strict=True):
            begin_s = np.maximum(clock, gaps.given_s[wave], out=clock).copy()
            run_phase(clock, batch, items, cost, phase, 1 - cost.forward_share)
            again_s.append([begin_s, clock.copy()])
    shape = -1, 2, batch.num_ranks
    return JoinedStep(
        times=ran,
        encoding_s=np.array(encoding_s).reshape(shape),
        encoding_again_s=np.array(again_s).reshape(shape),
    )
