"""Memory of the GPUs while a step runs: what stays, what waits for its backward, what works.

The figures are those of `planner.memory`: state whatever is run, activations of every micro-batch
between forward and backward by its tokens and offload ratio, and working memory of the one that
runs. With several model chunks on a stage (virtual stages) a pass through one holds the activations
of its layers.
"""

from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np

from megatron_hdp.arrays import BoolArray, Float64Array, Int64Array
from megatron_hdp.planner import Plan
from megatron_hdp.planner.memory import (
    Job,
    kept_of_further,
    kept_of_part,
    keys_of_part,
    second_stream_kept_of_part,
    stage_memory,
    stream_inputs,
    stream_kept_of_parts,
)
from megatron_hdp.planner.pipeline import Pipeline
from megatron_hdp.planner.pipeline_evaluation import RankLists, order_on_stage
from megatron_hdp.simulator.execution import lanes


@dataclass(frozen=True, kw_only=True)
class MemoryCosts:
    """Bytes on one GPU of each stage."""

    fixed_bytes: tuple[float, ...]
    """Weights, gradients, optimizer state, libraries; one entry a stage."""
    row_bytes_per_token: tuple[float, ...]
    """Activations between forward and backward; one entry a row: stages of every model chunk."""
    row_keys_per_token: tuple[float, ...] = (0.0,)
    """Beside them what stays on the device for later parts, and of layers of further tokens;
    likewise or the same of all rows."""
    row_stream_per_token: tuple[float, ...] = (0.0,)
    """Of streams in their place, between forward and backward: keys and values and the sums of
    their gradients, where the host does not have them; likewise."""
    row_inputs_per_token: tuple[float, ...] = (0.0,)
    """Of streams besides, with stages: what parts came with, always on the device; likewise."""
    work_tokens: tuple[float, ...] = (0.0,)
    """Tokens for which working memory is given; linear between them."""
    work_bytes: tuple[tuple[float, ...], ...] = ()
    """Of the micro-batch that runs, at each of these tokens; one entry a stage, none: no memory."""

    @classmethod
    def of_job(cls, job: Job, most_tokens: int) -> Self:
        """What `planner.memory` says of a job; no micro-batch has more tokens on an HDP rank."""
        stages = range(job.stages)
        # the fused loss has a chunk of logits at most: linear on both sides of where it is full
        full = 2**30 / (job.value_bytes * job.shape.vocab_size / job.tensor_ranks)
        sizes = sorted({1, int(full), int(full) + 1, max(2, most_tokens)} - {0})
        sizes = [size for size in sizes if size <= max(2, most_tokens)]
        fixed, work = [], []
        for stage in stages:
            of_sizes = [stage_memory(job, stage, size) for size in sizes]
            state = of_sizes[0]
            fixed.append(state.weights + state.gradients + state.optimizer + state.runtime)
            alive = [one.activations + one.keys for one in of_sizes]
            pairs = zip(of_sizes, alive, strict=True)
            work.append(tuple(one.total - fixed[-1] - waiting for one, waiting in pairs))
        beside = [second_stream_kept_of_part(job, part) for part in job.parts]
        held = [
            job.most_alive(stage, beside[stage :: job.stages]) * job.tokens_per_rank
            for stage in stages
        ]
        rows = zip(job.parts, beside, strict=True)
        keys = [keys_of_part(job, part) for part in job.parts]
        keys[-1] += kept_of_further(job) + keys_of_part(job, job.shape.further)
        return cls(
            fixed_bytes=tuple(fixed),
            row_bytes_per_token=tuple(kept_of_part(job, part) + one for part, one in rows),
            row_keys_per_token=tuple(keys),
            row_stream_per_token=tuple(stream_kept_of_parts(job)),
            row_inputs_per_token=(stream_inputs(job),),
            work_tokens=tuple(float(size) for size in sizes),
            work_bytes=tuple(
                tuple(one - kept for one in of_sizes)
                for of_sizes, kept in zip(work, held, strict=True)
            ),
        )

    def resident_bytes(
        self, tokens: Int64Array, kept: "Kept", pipeline: Pipeline, row_layers: Int64Array
    ) -> Float64Array:
        """Of micro-batches between forward and backward, on the device.

        Tokens are those of a member, of a stream those of a part; the result has the shape (rows,
        micro-batches).
        """
        leaving = lanes.leaving_of_rows(row_layers, pipeline)
        share_leaving = leaving / np.maximum(1, row_layers)
        whole: Float64Array = np.outer(self.row_bytes_per_token, tokens)
        resident: Float64Array = whole * (1 - np.outer(share_leaving, kept.ratios)) * kept.shares
        resident += np.outer(self.row_keys_per_token, tokens)
        if not kept.stream_parts.any():
            return resident
        of_all = tokens * kept.stream_parts
        of_stream = np.outer(self.row_stream_per_token, of_all * (1 - kept.ratios))
        of_stream = of_stream + np.outer(self.row_inputs_per_token, of_all)
        return np.where(kept.stream_parts > 0, of_stream, resident)

    def of_a_part(self, tokens: Int64Array, kept: "Kept") -> Float64Array:
        """Activations of the part of a stream that runs, (rows, micro-batches); 0 of others."""
        running: Float64Array = np.outer(self.row_bytes_per_token, tokens * (kept.stream_parts > 0))
        return running

    def working_bytes(self, stage: int, tokens: Int64Array) -> Float64Array:
        """Working memory of micro-batches while they run; none where nothing runs."""
        if not self.work_bytes:
            return np.zeros(len(tokens))
        x, y = np.array(self.work_tokens), np.array(self.work_bytes[stage])
        return np.where(tokens > 0, np.interp(tokens, x, y), 0.0)


class Kept(NamedTuple):
    """What micro-batches keep between forward and backward, one entry each."""

    ratios: Float64Array
    """Of activations, or of a stream's keys and values, what the host has."""
    shares: Float64Array
    """Of activations what recomputation leaves."""
    stream_parts: Int64Array
    """Parts of a stream, 0 of what is none."""

    @classmethod
    def of(cls, plan: Plan, num_padding: int = 0) -> Self:
        """Of a plan's micro-batches, then of padding."""
        padding = np.zeros(num_padding)
        shares = np.where(plan.is_recomputed, plan.recomputed_share, 1.0)
        parts = np.where(plan.is_stream, plan.parts_of_each, 0)
        return cls(
            np.concatenate([plan.offload_ratios, padding]),
            np.concatenate([shares, padding + 1]),
            np.concatenate([parts, np.zeros(num_padding, dtype=np.int64)]),
        )

    def some(self, numbers: Int64Array) -> Self:
        """Those with these numbers."""
        return type(self)(self.ratios[numbers], self.shares[numbers], self.stream_parts[numbers])


@dataclass(frozen=True, eq=False, kw_only=True)
class MemoryTrace:
    """Memory of the fullest GPU over a step: from each time on it has so many bytes."""

    rank: int
    stage: int
    time_s: Float64Array
    num_bytes: Float64Array
    fixed_bytes: float
    """The part that is there all the time."""

    @property
    def peak_bytes(self) -> float:
        """The most."""
        return float(self.num_bytes.max())


def trace_of(
    costs: MemoryCosts,
    lists: RankLists,
    tokens: Int64Array,
    kept: Kept,
    starts_s: tuple[Float64Array, Float64Array],
    ends_s: tuple[Float64Array, Float64Array],
    pipeline: Pipeline,
    row_layers: Int64Array,
) -> MemoryTrace:
    """Memory of the fullest rank and stage, the first of several that are equal.

    Tokens are those of each entry of the lists, `kept` is of each micro-batch and padding; starts
    and ends are of forwards and of backwards, ``[rows, micro-batches]``.
    """
    of_lists = kept.some(lists.micro_batches)
    resident = costs.resident_bytes(tokens, of_lists, pipeline, row_layers)
    running = costs.of_a_part(tokens, of_lists)
    fullest = _fullest_of(costs, lists, tokens, len(kept.ratios), resident, running, pipeline)
    own, row = fullest.passes, fullest.passes.chunk * pipeline.stages + fullest.stage
    begin, end = (
        np.where(
            own.backward, of_passes[1][row, own.micro_batch], of_passes[0][row, own.micro_batch]
        )
        for of_passes in (starts_s, ends_s)
    )
    fixed = costs.fixed_bytes[fullest.stage]
    times = np.stack([begin, end], axis=1).ravel()
    levels = np.stack([fullest.during, fullest.after], axis=1).ravel()
    return MemoryTrace(
        rank=fullest.rank,
        stage=fullest.stage,
        time_s=np.concatenate([[0.0], times]),
        num_bytes=np.concatenate([[fixed], levels]),
        fixed_bytes=fixed,
    )


class _Passes(NamedTuple):
    """What ranks run on a stage, each in its order, one rank behind the other."""

    micro_batch: Int64Array
    entry: Int64Array
    """Of the lists."""
    chunk: Int64Array
    backward: BoolArray


class _Fullest(NamedTuple):
    """The rank and stage with the most memory at a time."""

    stage: int
    rank: int
    passes: _Passes
    """That it runs, in its order."""
    during: Float64Array
    """Bytes while each runs."""
    after: Float64Array
    """Bytes behind it."""


def _fullest_of(
    costs: MemoryCosts,
    lists: RankLists,
    tokens: Int64Array,
    num: int,
    resident: Float64Array,
    running: Float64Array,
    pipeline: Pipeline,
) -> _Fullest:
    counts = pipeline.chunks * lists.counts  # passes of each rank on a stage, in one direction
    ranks = np.repeat(np.arange(len(counts)), 2 * counts)
    first = 2 * (np.cumsum(counts) - counts)
    best, most = None, -1.0
    for stage in range(pipeline.stages):
        passes = _passes(lists, num, pipeline, stage)
        of_pass = passes.chunk * pipeline.stages + stage, passes.entry
        bytes_of_pass = resident[of_pass]
        held = np.cumsum(np.where(passes.backward, -bytes_of_pass, bytes_of_pass))
        before = np.concatenate([[0.0], held])[first]
        after = held - np.repeat(before, 2 * counts) + costs.fixed_bytes[stage]
        during = after + np.where(passes.backward, bytes_of_pass, 0.0)
        during += running[of_pass] + costs.working_bytes(stage, tokens[passes.entry])
        at = int(np.argmax(during)) if len(during) else -1
        if at >= 0 and during[at] > most:
            rank, most = int(ranks[at]), float(during[at])
            mine = slice(int(first[rank]), int(first[rank] + 2 * counts[rank]))
            own = _Passes._make([one[mine] for one in passes])
            best = _Fullest(stage, rank, own, during[mine], after[mine])
    if best is None:
        raise ValueError("found no micro-batch; expected at least one to run")
    return best


def _passes(lists: RankLists, num: int, pipeline: Pipeline, stage: int) -> _Passes:
    order = order_on_stage(lists, num, pipeline, stage)
    size = len(lists.micro_batches)
    places = RankLists(np.arange(size), lists.counts)
    entry = order_on_stage(places, size, pipeline, stage) % max(1, size)
    chunk, of_chunk = np.divmod(order, 2 * num * pipeline.stages)
    backward, micro_batch = np.divmod(of_chunk, num)
    return _Passes(micro_batch, entry, chunk, backward > 0)
