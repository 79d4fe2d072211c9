"""What the members of a plan's micro-batches compute and send, before anybody waits."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_hdp.arrays import AnyArray, Float64Array, Int64Array
from megatron_hdp.planner.bounds import (
    Links,
    attention_s,
    block_s,
    compute_s,
    fixed_s,
    links_of,
    made_share,
    merge_s,
    numbers_of_links,
    sent_bytes,
    spared_s,
)
from megatron_hdp.planner.cost_model import CostModel
from megatron_hdp.planner.flat_plan import counts_of, owners_of, span_of
from megatron_hdp.planner.parts import queries_travel, sizes_of_parts
from megatron_hdp.planner.types import Plan


class MemberWork(NamedTuple):
    """What the members of a run of micro-batches compute and send: all stages, both passes.

    Traffic is that of a ring that passes its keys once, not by parts.
    """

    members: slice
    """Their entries of ``plan.ranks``."""
    num_members: Int64Array
    """Of each micro-batch."""
    attention_s: Float64Array
    """Of each member: its share of the sharded sequences' attention, in D steps."""
    linear_s: Float64Array
    """Of each member: the rest of the sharded sequences, and merging what the ring gives."""
    local_s: Float64Array
    """Of each member: its own local sequences with their block."""
    fixed_s: Float64Array
    """Of each member: ``g`` and the blocks of the ring's steps."""
    token_s: Float64Array
    """Of each member: what a token of the ring takes besides attention."""
    transfer_s: Float64Array
    """Of each micro-batch: what a member sends, latency left out; a third of it forward."""
    hop_s: Float64Array
    """Of each micro-batch: latency of a hop, in one pass."""
    home_s: Float64Array
    """Of each micro-batch: backward's last hop, so far as nothing hides it (`bounds.Links`)."""
    ring_bytes: Float64Array
    """Of each micro-batch: sent by all members, as if it ran whole."""
    made_bytes: Float64Array
    """Of each micro-batch: what heads that travel made add to it, all parts."""

    @property
    def degrees(self) -> Float64Array:
        """Members of each micro-batch."""
        return self.num_members.astype(np.float64)

    @property
    def first_members(self) -> Int64Array:
        """Entry of each micro-batch's first member, from 0 on."""
        found: Int64Array = np.cumsum(self.num_members) - self.num_members
        return found


def work_of(
    plan: Plan, cost_model: CostModel, stages: int, speeds: Float64Array, run: slice
) -> MemberWork:
    """What a run of a plan's micro-batches takes of members of these speeds, before they wait.

    Traffic takes as long on all of them.
    """
    members = span_of(plan.rank_offsets, run)
    num_members = counts_of(plan.rank_offsets, run)
    degrees = num_members.astype(np.float64)
    lengths = plan.lengths[plan.sequences[span_of(plan.sequence_offsets, run)]]
    owner = owners_of(plan.sequence_offsets, run)
    tokens = _sums(owner, lengths, len(degrees))
    attention = _attention_sums(owner, lengths, len(degrees), cost_model)
    sent = sent_bytes(degrees, tokens, cost_model)
    starts = plan.rank_offsets[run] - members.start
    links = links_of(numbers_of_links(plan.ranks[members], starts, cost_model), cost_model)

    def each(value: Float64Array) -> Float64Array:
        """Of a micro-batch, for each of its members."""
        return np.repeat(value, num_members)

    speed = speeds[plan.ranks[members]]
    linear = cost_model.linear_s_per_token * tokens / degrees
    linear += merge_s(degrees, tokens / degrees, cost_model)
    hops_s = cost_model.num_layers * stages * links.hop_s
    shared = attention / degrees
    projected, made_bytes = _projected(plan, run, degrees, shared, hops_s, links, cost_model)
    linear += projected
    fixed = fixed_s(degrees, cost_model, stages)
    if plan.num_parts is not None:
        # a part's queries meet its own keys, then those of earlier parts, at every step
        parts = plan.num_parts[run].astype(np.float64)
        earlier = parts - 1
        if plan.streams is not None:  # kept on the host each earlier part is met by itself
            on_host = plan.streams_from_host[run]
            of_each = parts * (parts - 1) / 2
            earlier = np.where(on_host, of_each, earlier)
            again = np.where(plan.streams[run] & ~on_host, of_each - earlier, 0.0)
            linear += cost_model.projection_b * tokens * again / parts  # keys made of latents
        fixed = parts * fixed + earlier * degrees * block_s(cost_model, stages)
        projection_b = np.where(plan.is_stream[run], 0.0, cost_model.projection_b)
        linear += (cost_model.merge_b - projection_b) * tokens * earlier / parts
    return MemberWork(
        members=members,
        num_members=num_members,
        attention_s=each(shared) / speed,
        linear_s=each(linear) / speed,
        local_s=_local_times(plan, run, cost_model, stages) / speed,
        fixed_s=each(fixed) / speed,
        token_s=each(cost_model.linear_s_per_token / degrees) / speed,
        transfer_s=sent / links.bytes_per_s,
        hop_s=hops_s,
        home_s=tokens / degrees * cost_model.kv_bytes_per_token * links.home_s_per_byte,
        ring_bytes=(sent + np.where(degrees > 1, cost_model.halo_bytes, 0.0)) * degrees,
        made_bytes=made_bytes * degrees,
    )


def _projected(
    plan: Plan,
    run: slice,
    degrees: Float64Array,
    attention: Float64Array,
    hops_s: Float64Array,
    links: Links,
    cost_model: CostModel,
) -> tuple[Float64Array, Float64Array]:
    """What making keys of latents takes a member more than `merge_s` says, and bytes it sends more.

    Each part has the keys of earlier ones made again, by every member; where queries travel those
    that stay are made once, and so are its own. Heads that travel made are made by their owner.
    """
    seconds, sent = np.zeros((2, len(degrees)))
    if not cost_model.projection_b:
        return seconds, sent
    for i in np.flatnonzero((degrees > 1) & ~plan.is_stream[run]).tolist():
        others, of_ring = (degrees[i] - 1) / degrees[i], Links(*(one[i] for one in links))
        sizes = sizes_of_parts(plan, run.start + i)
        squares = sum(size.squares for size in sizes)
        for tokens, earlier, seen in sizes:
            if len(sizes) > 1 and queries_travel(tokens, earlier, cost_model.query_ratio):
                again = (tokens + earlier) / degrees[i] - tokens * others
                seconds[i] += cost_model.projection_b * again
                continue
            around, hiding = tokens + earlier, attention[i] * seen / max(squares, 1.0)
            share = made_share(degrees[i], around, hiding, hops_s[i], of_ring, cost_model)
            spared = spared_s(share, degrees[i], around, of_ring, cost_model)
            seconds[i] += cost_model.projection_b * earlier - float(spared)
            sent[i] += 3 * others * around * float(share)
    return seconds, sent * cost_model.made_bytes_per_token


def _attention_sums(
    owner: NDArray[np.integer[Any]],
    lengths: Int64Array,
    num_micro_batches: int,
    cost_model: CostModel,
) -> Float64Array:
    """Attention of each micro-batch's sequences on one rank of speed 1."""
    if cost_model.attention_points:
        return _sums(owner, attention_s(lengths, cost_model), num_micro_batches)
    seen = cost_model.seen(lengths.astype(np.float64))
    squares = cost_model.a * _sums(owner, seen, num_micro_batches)
    return squares + cost_model.attention_b * _sums(owner, lengths, num_micro_batches)


def _local_times(plan: Plan, run: slice, cost_model: CostModel, stages: int) -> Float64Array:
    """Time of the local sequences of each member at speed 1, with their block."""
    here, there = span_of(plan.rank_offsets, run), span_of(plan.local_offsets, run)
    if there.start == there.stop:
        return np.zeros(here.stop - here.start)
    keys = owners_of(plan.rank_offsets, run) * plan.num_ranks + plan.ranks[here]
    by_key = np.argsort(keys)
    local_keys = owners_of(plan.local_offsets, run) * plan.num_ranks + plan.local_ranks[there]
    members = by_key[np.searchsorted(keys, local_keys, sorter=by_key)]
    seconds = compute_s(plan.lengths[plan.local_sequences[there]], cost_model)
    local_s = _sums(members, seconds, len(keys))
    held = np.unique(members)
    blocks = np.repeat(plan.parts_of_each[run], counts_of(plan.rank_offsets, run))
    local_s[held] += blocks[held] * block_s(cost_model, stages)
    return local_s


def _sums(keys: NDArray[np.integer[Any]], values: AnyArray, num_keys: int) -> Float64Array:
    """Sum of the values of each key."""
    return np.bincount(keys, weights=values, minlength=num_keys).astype(np.float64, copy=False)


def copies_of_stream(
    plan: Plan, cost_model: CostModel, m: int, work: MemberWork, members: slice
) -> tuple[Float64Array, Float64Array]:
    """Seconds of a stream's copies from the host and back that its compute does not hide.

    Keys and values of earlier parts come in both forwards and in backward, where the sums of their
    gradients come and leave again beside them.

    Args:
        plan: that has it, with keys on the host.
        cost_model: of one HDP rank.
        m: the micro-batch.
        work: of a run of micro-batches with it.
        members: of it, among those of the run.

    Returns:
        Of each member, all parts together: of one forward, and of what follows it in backward.
    """
    sizes = sizes_of_parts(plan, m)
    squares = sum(size.squares for size in sizes)
    first_there = sum(size.tokens for size in sizes[: len(sizes) - plan.host_parts_of(m)])
    degree = members.stop - members.start
    forward_s, backward_s = np.zeros(degree), np.zeros(degree)
    for size in sizes:
        earlier = max(0.0, size.earlier - first_there) / degree
        if earlier == 0:
            continue
        computed_s = work.attention_s[members] * size.squares / squares
        hiding_s = (computed_s + work.token_s[members] * size.tokens) / 3
        copied_s = earlier * cost_model.kv_bytes_per_token + cost_model.halo_bytes / 6
        copied_s /= cost_model.host_bytes_per_s
        forward_s += np.maximum(0.0, copied_s - hiding_s)
        backward_s += np.maximum(0.0, (1 + cost_model.sum_ratio) * copied_s - 2 * hiding_s)
    return forward_s, backward_s
