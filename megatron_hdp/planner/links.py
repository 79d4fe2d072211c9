"""On how many links side by side a ring passes from node to node.

A plain ring sends from the last member of a node to the first of the next one: one link is busy,
those of the other members are not. A double ring (LoongTrain, arXiv 2406.18485, section 4.3, calls
it Double-Ring-Attention) is made of groups of m neighbours, each in one node. What is its members'
goes around in a group step by step, while a piece of what the group began with leaves for the next
group on each of m links.
"""

import math
from functools import lru_cache
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron_hdp.arrays import Float64Array, Int64Array
from megatron_hdp.planner.cost_model import CostModel


class Links(NamedTuple):
    """What rings send on; arrays of one shape."""

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
