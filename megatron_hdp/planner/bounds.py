"""What no plan without pipeline stages can beat, with experts that ranks share or without."""

import dataclasses
import math
from functools import lru_cache
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron_hdp.arrays import Float64Array, Int64Array
from megatron_hdp.planner.cost_model import CostModel
from megatron_hdp.planner.flat_plan import PIECE


def attention_s(lengths: Int64Array, cost_model: CostModel) -> Float64Array:
    """Seconds of attention of each whole sequence on one rank of speed 1."""
    s = lengths.astype(np.float64)
    if not cost_model.attention_points:
        seconds = cost_model.a * s
        seconds *= s  # in place, as are the others: there may be millions
        if cost_model.window_share:
            seconds = cost_model.a * cost_model.seen(s)
        s *= cost_model.attention_b
        seconds += s
        return seconds
    table = cost_model.attention_table
    x = np.concatenate([[0.0], table.lengths.astype(np.float64)])
    y = np.concatenate([[0.0], table.seconds])
    on_lines: Float64Array = np.interp(s, x, y)
    s -= x[-1]
    on_lines += (y[-1] - y[-2]) / (x[-1] - x[-2]) * np.maximum(s, 0.0, out=s)
    return on_lines


def compute_s(lengths: Int64Array, cost_model: CostModel) -> Float64Array:
    """Seconds of each whole sequence on one rank of speed 1, without blocks and g."""
    seconds = attention_s(lengths, cost_model)
    s = lengths.astype(np.float64)
    s *= cost_model.linear_s_per_token
    seconds += s
    return seconds


def total_compute_s(lengths: Int64Array, cost_model: CostModel) -> float:
    """The sum of ``compute_s``, as numpy sums it (halves of halves), but without its array."""
    if len(lengths) <= PIECE:
        return float(compute_s(lengths, cost_model).sum())
    half = len(lengths) // 2
    half -= half % 8
    return total_compute_s(lengths[:half], cost_model) + total_compute_s(lengths[half:], cost_model)


def speeds_of(cost_model: CostModel, num_ranks: int) -> Float64Array:
    """Speed of each rank.

    Raises:
        ValueError: the cost model has speeds, but not one for each rank.
    """
    if not cost_model.rank_speeds:
        return np.ones(num_ranks)
    if len(cost_model.rank_speeds) != num_ranks:
        raise ValueError(
            f"rank_speeds has {len(cost_model.rank_speeds)} entries; expected one for each of "
            f"{num_ranks} ranks"
        )
    return np.array(cost_model.rank_speeds, dtype=np.float64)


def fixed_s(degrees: Float64Array, cost_model: CostModel, pipeline_stages: int = 1) -> Float64Array:
    """Seconds of a micro-batch of so many ranks whatever it holds: g, one block a step, a halo."""
    seconds = cost_model.g + degrees * block_s(cost_model, pipeline_stages)
    return seconds + np.where(degrees > 1, cost_model.halo_s, 0.0)


def block_s(cost_model: CostModel, pipeline_stages: int = 1) -> float:
    """Seconds of a block of attention whatever it holds, all layers, forward and backward."""
    return 2 * cost_model.num_layers * pipeline_stages * cost_model.block_s


def merge_s(degrees: Float64Array, tokens: Float64Array, cost_model: CostModel) -> Float64Array:
    """Seconds of a member with so many tokens for merging the results of its ring's steps."""
    seconds: Float64Array = cost_model.merge_b * (degrees - 1) * tokens
    return seconds


def sent_bytes(degrees: Float64Array, tokens: ArrayLike, cost_model: CostModel) -> Float64Array:
    """Bytes that a member of a ring of so many tokens sends: a third of them forward."""
    sent: Float64Array = (
        3 * (degrees - 1) / degrees * np.asarray(tokens) * cost_model.kv_bytes_per_token
    )
    return sent


def made_share(
    degrees: Float64Array,
    tokens: ArrayLike,
    attention: Float64Array,
    hop: ArrayLike,
    links: "Links",
    cost_model: CostModel,
) -> Float64Array:
    """The share of the heads whose keys and values travel made, beside latents; 0 to 1.

    As many as forward hides; backward, with twice the bytes and twice the attention, hides them,
    too.

    Args:
        degrees: Members D of the ring.
        tokens: That go around, of all members.
        attention: Seconds of a member's attention in D steps, at speed 1.
        hop: Latency of a hop over all layers, in one pass.
        links: That the ring sends on.
        cost_model: Of an HDP rank.
    """
    per_token, hops = cost_model.made_bytes_per_token, degrees - 1
    passed = hops / degrees * np.asarray(tokens)
    if not per_token:
        return np.zeros_like(passed)
    pays = cost_model.projection_b * hops > per_token * links.home_s_per_byte
    hidden = hops / degrees * attention / 3 - hops * np.asarray(hop)
    hidden -= passed * cost_model.kv_bytes_per_token / links.bytes_per_s
    whole = np.maximum(passed * per_token, np.finfo(np.float64).tiny)
    share: Float64Array = np.clip(hidden * links.bytes_per_s / whole, 0.0, 1.0)
    return np.where(pays, share, 0.0)


def spared_s(
    share: ArrayLike,
    degrees: Float64Array,
    tokens: ArrayLike,
    links: "Links",
    cost_model: CostModel,
) -> Float64Array:
    """Seconds that a member is spared by heads whose keys and values travel made (`made_share`).

    Their projections, less what a double ring exposes of their gradients' last hop.
    """
    of_hops = cost_model.projection_b * (degrees - 1)
    of_hops = of_hops - cost_model.made_bytes_per_token * links.home_s_per_byte
    spared: Float64Array = np.asarray(share) * of_hops * np.asarray(tokens) / degrees
    return spared


class Links(NamedTuple):
    """What rings send on; arrays of one shape.

    A plain ring sends from the last member of a node to the first of the next one: one link is
    busy, those of the other members are not. A double ring (Double-Ring-Attention of LoongTrain,
    arXiv 2406.18485) is made of groups of m neighbours, each in one node. What is its members' goes
    around in a group step by step, while a piece of what the group began with leaves for the next
    group on each of m links.
    """

    bytes_per_s: Float64Array
    """That each member sends."""
    hop_s: Float64Array
    """Latency of a hop in one layer."""
    home_s_per_byte: Float64Array
    """Seconds that nothing hides, for each byte of a hop: gradients go home to another node in one
    piece, not in m."""


@lru_cache(maxsize=4096)
def group_size(ring: tuple[int, ...], ranks_per_node: int) -> int:
    """Members m of a double ring's groups; 1 where there is none, all where the ring is in a node.

    Args:
        ring: HDP ranks in ring order.
        ranks_per_node: HDP ranks of a node.
    """
    nodes = groupby(ring, key=lambda rank: rank // ranks_per_node)
    return math.gcd(*(sum(1 for _ in members) for _, members in nodes))


def numbers_of_links(
    ranks: NDArray[np.integer[Any]], starts: Int64Array, cost_model: CostModel
) -> Int64Array:
    """Links between nodes that each ring uses; 0 if it stays in one.

    Args:
        ranks: of all rings, one behind the other.
        starts: where each ring begins; shape (rings,).
        cost_model: whether rings are double, and what a node is.
    """
    nodes = ranks // cost_model.ranks_per_node
    in_one_node = np.minimum.reduceat(nodes, starts) == np.maximum.reduceat(nodes, starts)
    if not cost_model.double_rings:
        return np.where(in_one_node, 0, 1)
    begins_run = np.ones(len(nodes), dtype=bool)
    begins_run[1:] = nodes[1:] != nodes[:-1]
    begins_run[starts] = True
    runs = np.flatnonzero(begins_run)
    sizes = np.diff(runs, append=len(nodes))
    common: Int64Array = np.gcd.reduceat(sizes, np.searchsorted(runs, starts))
    return np.where(in_one_node, 0, common)


def links_of(numbers: ArrayLike, cost_model: CostModel) -> Links:
    """What rings of so many links between nodes (`numbers_of_links`) send on."""
    m = np.asarray(numbers)
    intra, inter = cost_model.intra_node_bytes_per_s, cost_model.inter_node_bytes_per_s
    side_by_side = np.where(m > 1, np.minimum(intra, m * inter), inter)
    bytes_per_s = np.where(m > 0, side_by_side, intra)
    home = np.where(m > 1, np.maximum(0.0, 1 / inter - 1 / bytes_per_s), 0.0)
    hop_s = np.where(m > 0, cost_model.inter_node_hop_s, cost_model.intra_node_hop_s)
    return Links(bytes_per_s, hop_s, home)


def best_links(degrees: ArrayLike, cost_model: CostModel) -> Links:
    """What no rings of these degrees can beat: a node's links are all used, nothing goes home."""
    leaves = np.asarray(degrees) > cost_model.ranks_per_node
    m = cost_model.ranks_per_node if cost_model.double_rings else 1
    found = links_of(np.where(leaves, m, 0), cost_model)
    intra, inter = cost_model.intra_node_bytes_per_s, cost_model.inter_node_bytes_per_s
    hop_s = min(cost_model.intra_node_hop_s, cost_model.inter_node_hop_s)
    return Links(
        np.where(leaves, np.maximum(inter, found.bytes_per_s), max(intra, inter)),
        np.where(leaves, cost_model.inter_node_hop_s, hop_s),
        np.zeros_like(found.home_s_per_byte),
    )


def exposed_s(
    degrees: Float64Array,
    transfer: Float64Array,
    hop: Float64Array,
    attention: Float64Array,
    num_forwards: int | Int64Array = 1,
) -> Float64Array:
    """Seconds of ring traffic that attention does not hide, both passes; arrays of one shape.

    Args:
        degrees: Members D of the ring.
        transfer: Seconds that a member sends, latency left out; a third of it forward.
        hop: Latency of a hop over all layers, in one pass.
        attention: Seconds of a member's attention in D steps, a third of it forward.
        num_forwards: That run.
    """
    hops = degrees - 1
    third, hiding = transfer / 3, hops / degrees * attention / 3
    forward = np.maximum(0.0, hops * hop + third - hiding)
    backward = np.maximum(0.0, hops * hop + 2 * third - 2 * hiding)
    seconds: Float64Array = np.asarray(num_forwards * forward + backward, dtype=np.float64)
    return seconds


def own_times_s(
    lengths: ArrayLike,
    num_ranks: int,
    cost_model: CostModel,
    pipeline_stages: int = 1,
    parts: ArrayLike = 1,
) -> Float64Array:
    """Seconds of a sequence alone on the D fastest ranks: with exposed traffic, blocks and g.

    Entry D - 1 of the last axis is degree D. A member's time falls with its speed, so that the D-th
    fastest decides; a ring of up to ``ranks_per_node`` ranks is taken to have the better bandwidth
    and latency. In parts it takes at least this long: g, the blocks and the hops of its ring come
    once a part, what travels is at least what travels of the whole. So with more parts a sequence
    never takes less, and a part of it never takes more.

    Args:
        lengths: tokens of a sequence, or of several.
        num_ranks: the greatest degree.
        cost_model: with the ranks' speeds.
        pipeline_stages: of all of them the times are.
        parts: that the sequence runs in; of one shape with the lengths, or broadcast to it.
    """
    tokens = np.asarray(lengths, dtype=np.int64)[..., None]
    num_parts = np.asarray(parts, dtype=np.float64)[..., None]
    speeds = np.sort(speeds_of(cost_model, num_ranks))[::-1]
    degrees = np.arange(1, num_ranks + 1, dtype=np.float64)
    links = best_links(degrees, cost_model)
    hop = cost_model.num_layers * pipeline_stages * links.hop_s
    transfer = sent_bytes(degrees, tokens, cost_model) / links.bytes_per_s
    attention = attention_s(tokens, cost_model) / degrees
    compute = attention + cost_model.linear_s_per_token * tokens / degrees
    compute += merge_s(degrees, tokens / degrees, cost_model)
    share = made_share(degrees, tokens, attention, hop, links, cost_model)
    compute -= spared_s(share, degrees, tokens, links, cost_model)
    exposed = exposed_s(degrees, transfer, num_parts * hop, attention / speeds)
    again = cost_model.g + degrees * block_s(cost_model, pipeline_stages)
    fixed = fixed_s(degrees, cost_model, pipeline_stages) + (num_parts - 1) * again
    own: Float64Array = (compute + fixed) / speeds + exposed
    return own


def lower_bound_s(
    lengths: Int64Array, num_ranks: int, cost_model: CostModel, pipeline_stages: int = 1
) -> float:
    """max(total compute / sum of speeds, the longest time a sequence needs at its best degree).

    At every degree the time of a sequence, exposed traffic included, grows with its length:
    only the longest one counts. All stages together: with several it is no bound by itself.
    """
    speeds = speeds_of(cost_model, num_ranks)
    if len(lengths) == 0:
        return 0.0
    own = own_times_s(int(lengths.max()), num_ranks, cost_model, pipeline_stages)
    return max(total_compute_s(lengths, cost_model) / float(speeds.sum()), float(own.min()))


def lockstep_bound_s(
    lengths: Int64Array,
    num_ranks: int,
    cost_model: CostModel,
    expert_parallel_size: int,
) -> float:
    """No plan of ranks that share experts takes less than the greater of these two.

    1. Work. At position i a domain of E ranks with speeds v takes at least the dense time of each
       of its members, and x = ``b_experts`` x all its tokens / (E x the least v) on top. So the
       members' dense work at i is at most (sum of v) x (T(i) - x), and experts' work
       ``b_experts`` x tokens = E x (least v) x x at most (sum of v) x x. Together at most
       (sum of v) x T(i): summed over positions and domains, total compute is at most the sum of
       all speeds x the makespan.

    2. The longest sequence. On D ranks its members take their dense time as without experts
       (`own_times_s`), and one of the N / E domains has at least k = ceil(D E / N) of them, with
       1 / D of the sequence's tokens each, so that its experts take b_experts x s x k / (D E) on
       top, at the greatest speed. The least over D.

    Args:
        lengths: Tokens of each sequence.
        num_ranks: HDP ranks N.
        cost_model: With the ranks' speeds.
        expert_parallel_size: HDP ranks E of a domain.
    """
    if len(lengths) == 0:
        return 0.0
    speeds = speeds_of(cost_model, num_ranks)
    work_s = total_compute_s(lengths, cost_model) / float(speeds.sum())
    own_s = own_times_in_lockstep_s(int(lengths.max()), num_ranks, cost_model, expert_parallel_size)
    return max(work_s, float(own_s.min()))


def own_times_in_lockstep_s(
    lengths: ArrayLike,
    num_ranks: int,
    cost_model: CostModel,
    expert_parallel_size: int,
    pipeline_stages: int = 1,
    parts: ArrayLike = 1,
) -> Float64Array:
    """`own_times_s` where ranks share experts, as in point 2 of `lockstep_bound_s`."""
    size = expert_parallel_size
    if size == 1:
        return own_times_s(lengths, num_ranks, cost_model, pipeline_stages, parts)
    dense = dataclasses.replace(cost_model, b_experts=0.0)
    degrees = np.arange(1, num_ranks + 1)
    beside = -(-degrees * size // num_ranks)
    tokens = np.asarray(lengths, dtype=np.int64)[..., None]
    shared_s = cost_model.b_experts * tokens * beside / (degrees * size)
    fastest = speeds_of(cost_model, num_ranks).max()
    own_s = own_times_s(lengths, num_ranks, dense, pipeline_stages, parts)
    own_s += shared_s / fastest
    return own_s
