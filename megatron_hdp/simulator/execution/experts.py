"""Experts that ranks share: what a position of a domain takes for them, whoever owns its tokens.

All ranks of a domain enter each exchange together. So at a position they take the time of the
slowest among them without experts, and on top 1/E of what experts take for all tokens there, on the
slowest of the E ranks. Noise is that of a rank's own work and leaves experts alone.
"""

import dataclasses
from dataclasses import dataclass
from typing import Self

import numpy as np

from megatron_hdp.arrays import Float64Array, Int64Array
from megatron_hdp.planner import CostModel, Plan
from megatron_hdp.simulator.execution.launches import Launches, by_list


def own_costs(cost_model: CostModel, lockstep_ranks: int) -> CostModel:
    """What ranks compute themselves: without experts, if several ranks share these."""
    return dataclasses.replace(cost_model, b_experts=0.0) if lockstep_ranks > 1 else cost_model


@dataclass(frozen=True, eq=False, kw_only=True)
class SharedExperts:
    """Of each position of each domain, a cell."""

    cell_of: Int64Array
    """Of each entry of the lists."""
    launch_of: Int64Array
    """Of each cell."""
    forward_s: Float64Array
    """Of each cell: experts' time, all stages."""
    backward_s: Float64Array
    """Likewise, with the forward of what runs twice."""
    rank_s: Float64Array
    """Of each rank: what it computes for all its positions, likewise."""

    @classmethod
    def of(
        cls,
        plan: Plan,
        launches: Launches,
        cost_model: CostModel,
        speeds: Float64Array,
        lockstep_ranks: int,
    ) -> Self:
        """Look at a plan as it is laid out, for ranks of these speeds."""
        lists, size = launches.lists, lockstep_ranks
        ranks = np.repeat(np.arange(plan.num_ranks), lists.counts)
        position = np.arange(len(ranks)) - (np.cumsum(lists.counts) - lists.counts)[ranks]
        keys = ranks // size * (int(position.max(initial=0)) + 1) + position
        cells, cell_of = np.unique(keys, return_inverse=True)
        launch_of = np.zeros(len(cells), dtype=np.int64)
        launch_of[cell_of] = launches.group_of[lists.micro_batches]
        tokens = np.bincount(cell_of, weights=_tokens_by_list(plan, launches), minlength=len(cells))
        domain = cells // (int(position.max(initial=0)) + 1)
        slowest = speeds.reshape(-1, size).min(axis=1)[domain]
        per_token = cost_model.b_experts if size > 1 else 0.0
        seconds = per_token * tokens / size / slowest
        forward_s, twice = seconds / 3, np.zeros(len(cells), dtype=np.bool_)
        twice[cell_of] = launches.runs_twice[lists.micro_batches]
        backward_s = seconds - forward_s + np.where(twice, forward_s, 0.0)
        of_domains = np.zeros(plan.num_ranks // size)
        np.add.at(of_domains, domain, forward_s + backward_s)
        return cls(
            cell_of=cell_of,
            launch_of=launch_of,
            forward_s=forward_s,
            backward_s=backward_s,
            rank_s=of_domains.repeat(size),
        )

    def added(
        self,
        own_s: Float64Array,
        seconds: Float64Array,
        launches: Launches,
        shares: Float64Array,
    ) -> Float64Array:
        """What micro-batches and padding take in a pass with all that stands at their positions.

        Args:
            own_s: without experts; shape (rows, micro-batches and padding).
            seconds: of experts, of each cell.
            launches: the layout.
            shares: of that time that each row takes; shape (rows).
        """
        slowest = np.zeros((len(seconds), len(shares)))
        np.maximum.at(slowest, self.cell_of, own_s[:, launches.lists.micro_batches].T)
        found = np.zeros((int(launches.group_of.max(initial=-1)) + 1, len(shares)))
        np.maximum.at(found, self.launch_of, slowest + np.outer(seconds, shares))
        of_all: Float64Array = found[launches.group_of].T
        return of_all


def _tokens_by_list(plan: Plan, launches: Launches) -> Float64Array:
    """Tokens of the entries of all lists, without padding."""
    count = plan.num_micro_batches
    degrees = np.diff(plan.rank_offsets)
    owners = np.repeat(np.arange(count), np.diff(plan.sequence_offsets))
    sharded = np.bincount(owners, weights=plan.lengths[plan.sequences], minlength=count) / degrees
    local_owners = np.repeat(np.arange(count), np.diff(plan.local_offsets))
    keys = local_owners * plan.num_ranks + plan.local_ranks
    of_members = np.repeat(np.arange(count), degrees) * plan.num_ranks + plan.ranks
    members, member_of = np.unique(of_members, return_inverse=True)
    local = np.bincount(
        np.searchsorted(members, keys),
        weights=plan.lengths[plan.local_sequences],
        minlength=len(members),
    )
    return by_list(plan, launches, sharded.repeat(degrees) + local[member_of])
