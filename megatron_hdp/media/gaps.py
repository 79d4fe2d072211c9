"""When ranks of pipelines wait for each other in a step, and so can encode for nothing."""

from dataclasses import dataclass

import numpy as np

from megatron_hdp.arrays import Float64Array, Int32Array, Int64Array
from megatron_hdp.media.waves import wave_choices
from megatron_hdp.planner import Evaluation, Plan
from megatron_hdp.planner.lockstep import PADDING, slots
from megatron_hdp.planner.parts import time_shares
from megatron_hdp.planner.pipeline import Pipeline


@dataclass(frozen=True, kw_only=True)
class PipelineGaps:
    """The schedule of a step as it is without items: where encoding makes it no longer.

    A rank of a late stage waits for the first micro-batch, and again behind its last backward until
    the first stage is done. There it can encode items of waves whose rows are not wanted yet, and
    go backward through those whose gradients have come.
    """

    free_until_s: Float64Array
    """When each rank begins its first forward, ``[ranks of the job]``."""
    free_from_s: Float64Array
    """When each rank ends its last backward, ``[ranks of the job]``."""
    wanted_s: Float64Array
    """When the first micro-batch with rows of each wave begins, ``[waves]``."""
    given_s: Float64Array
    """When the last one ends its backward on the first stage, ``[waves]``."""
    makespan_s: float
    """Until the last rank ends."""
    wave_starts: Int64Array
    """The first slot of each wave, ascending from 0, ``[waves]``."""


def gaps_of(
    plan: Plan,
    times: Evaluation,
    wave_starts: Int64Array,
    *,
    tensor_ranks: int = 1,
    lockstep_ranks: int = 1,
) -> PipelineGaps:
    """Return the gaps of a plan's schedule.

    Args:
        plan: of the step's sequences.
        times: of that plan, with the pipeline that each rank is.
        wave_starts: as of `PipelineGaps`.
        tensor_ranks: of each stage; ranks of the job lie by tensor, HDP, stage.
        lockstep_ranks: HDP ranks that share experts.
    """
    slots_of = slots_of_micro_batches(plan, times.pipeline, lockstep_ranks)
    return _gaps(plan, times, slots_of, wave_starts, tensor_ranks)


def _gaps(
    plan: Plan,
    times: Evaluation,
    slots_of: Int64Array,
    wave_starts: Int64Array,
    tensor_ranks: int,
) -> PipelineGaps:
    pipeline, num = times.pipeline, plan.num_micro_batches
    free_until_s = np.full((pipeline.stages, plan.num_ranks), times.makespan_s)
    free_from_s = np.zeros_like(free_until_s)
    starts_s = times.forward_start_s[: pipeline.stages]
    ends_s = _backward_ends_s(plan, times)
    of_stages_s = ends_s.reshape(pipeline.chunks, pipeline.stages, num).max(axis=0)
    for rank in range(plan.num_ranks):
        mine = plan.micro_batches_of(rank)
        free_until_s[:, rank] = starts_s[:, mine].min(axis=1, initial=times.makespan_s)
        free_from_s[:, rank] = of_stages_s[:, mine].max(axis=1, initial=0.0)
    waves = np.searchsorted(wave_starts, slots_of, side="right") - 1
    wanted_s = np.full(len(wave_starts), times.makespan_s)
    given_s = np.zeros(len(wave_starts))
    np.minimum.at(wanted_s, waves, starts_s[0])
    np.maximum.at(given_s, waves, ends_s[0])
    return PipelineGaps(
        free_until_s=free_until_s.ravel().repeat(tensor_ranks),
        free_from_s=free_from_s.ravel().repeat(tensor_ranks),
        wanted_s=np.minimum.accumulate(wanted_s[::-1])[::-1],
        given_s=np.maximum.accumulate(given_s),
        makespan_s=times.makespan_s,
        wave_starts=wave_starts,
    )


def gap_choices(
    plan: Plan,
    times: Evaluation,
    item_slots: Int32Array,
    *,
    tensor_ranks: int = 1,
    lockstep_ranks: int = 1,
) -> list[tuple[Int32Array, PipelineGaps]]:
    """Return what `plan_in_gaps` chooses from: waves of a step's items, and their gaps.

    The first choice is one wave.

    Args:
        plan: as of `gaps_of`.
        times: as of `gaps_of`.
        item_slots: the first slot that has rows of each item, ``[items]``.
        tensor_ranks: as of `gaps_of`.
        lockstep_ranks: as of `gaps_of`.
    """
    slots_of = slots_of_micro_batches(plan, times.pipeline, lockstep_ranks)
    found: dict[bytes, tuple[Int32Array, PipelineGaps]] = {}
    for starts in wave_choices(int(slots_of.max(initial=0)) + 1):
        places = np.searchsorted(starts, item_slots, side="right") - 1
        kept, inverse = np.unique(places, return_inverse=True)  # the others have no rows
        mine, waves = starts[kept], inverse.astype(np.int32)
        mine[:1] = 0
        if waves.tobytes() not in found:
            gaps = _gaps(plan, times, slots_of, mine, tensor_ranks)
            found[waves.tobytes()] = waves, gaps
    return list(found.values())


def slots_of_micro_batches(plan: Plan, pipeline: Pipeline, lockstep_ranks: int = 1) -> Int64Array:
    """Return the slot of each micro-batch in the lists of its ranks, ``[micro-batches]``."""
    lists = slots(plan, aligned=True, group_size=pipeline.group_size, lockstep_ranks=lockstep_ranks)
    found = np.zeros(plan.num_micro_batches, dtype=np.int64)
    for one in lists:
        places = np.flatnonzero(one != PADDING)
        found[one[places]] = places
    return found


def _backward_ends_s(plan: Plan, times: Evaluation) -> Float64Array:
    """When each row ends its backward of each micro-batch, ``[rows, micro-batches]``."""
    backward_s = times.duration_s * np.where(plan.runs_twice, 3 / 4, 2 / 3)
    starts_s, last_s = times.backward_start_s, backward_s
    if times.part_starts_s is not None:  # the first part goes back last
        first = np.cumsum(plan.parts_of_each) - plan.parts_of_each
        starts_s = times.part_starts_s[1][:, first]
        last_s = backward_s * time_shares(plan)[first]
    ends_s: Float64Array = starts_s + np.multiply.outer(times.pipeline.row_weights, last_s)
    return ends_s
