"""The optimizer's shards in a run whose ranks may die: copied beside each step, put together later.

With an optimizer that every HDP rank has whole, nothing here does anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_hdp.megatron import parallel
from megatron_hdp.megatron.optimizer import Chosen, Held, ShardCopies, choose_common, restore
from megatron_hdp.megatron.options import TrainingArguments, expert_domain_size
from megatron_hdp.runtime.epochs import Epoch, keys
from megatron_hdp.runtime.gathering import gathered


class SurvivingShards:
    """What of the optimizer only one HDP rank has, from epoch to epoch.

    Attributes:
        is_spread: whether there is such a thing.
    """

    def __init__(self, arguments: TrainingArguments) -> None:
        self.is_spread = arguments.use_distributed_optimizer
        self._arguments = arguments
        self._copies: ShardCopies | None = None
        self._held: Held | None = None
        self._chosen: Chosen | None = None

    def enter(self, epoch: Epoch, optimizer: Any, chunks: list[Any], version: int) -> None:
        """Puts this rank's shard of a version together, if some is chosen, and begins to copy.

        Every rank of the epoch must call this, once its optimizer is made.

        Raises:
            ValueError: on every rank: a holder of a part is gone.
        """
        if not self.is_spread:
            return
        group, place = parallel.hdp_group()
        hosts_by_rank = gathered(keys.own_host())
        hosts = [hosts_by_rank[rank] for rank in place]
        together = expert_domain_size(self._arguments)
        if self._chosen is not None or epoch.number:
            chosen = self._agreed_choice(place)
            restore(self._held, chosen, optimizer, chunks, group, hosts)
        self._copies = ShardCopies(
            optimizer,
            chunks,
            [epoch.members[rank] for rank in place],
            hosts=hosts,
            place_group=group,
            domains=[one // together for one in range(len(place))] if together > 1 else None,
            neighbour=self._arguments.hdp_optimizer_copies == "on",
            kept=self._held,
        )
        self._chosen = None
        self._copies.take(version)
        if not epoch.number and self._arguments.copies_shards:
            parallel.say(self._copies.words())

    def _agreed_choice(self, place: Sequence[int]) -> Chosen:
        """What is put together at this place; those who join hear of it from the others."""
        found = gathered(self._chosen)
        return next(one for rank in place if (one := found[rank]) is not None)

    @property
    def complete(self) -> int:
        """The newest version that a neighbour has of this rank's shard; -1: none."""
        return 0 if self._copies is None else self._copies.complete

    def begin(self, agreed: int) -> None:
        """Begins to send the latest version, beside a step; `agreed` is the least `complete`."""
        if self._copies is not None:
            self._copies.begin(agreed)

    def before_change(self) -> None:
        """Before the optimizer's step: what is being read was read."""
        if self._copies is not None:
            self._copies.before_change()

    def take(self, version: int) -> None:
        """Behind the optimizer's step."""
        if self._copies is not None:
            self._copies.take(version)

    def settle(self) -> None:
        """Waits until the latest version is whole everywhere; every rank must call this."""
        if self._copies is not None:
            self._copies.settle()

    def leave(self) -> list[list[Any]]:
        """Gives up what is under way; returns what this process holds, for `choose`."""
        if self._copies is not None:
            self._held, self._copies = self._copies.leave(), None
        return [] if self._held is None else self._held.versions()

    def choose(
        self, epoch: Epoch, stages: int, votes: Mapping[int, Mapping[str, Any]], me: int
    ) -> int | None:
        """The newest version of which every part is left; None: there is none.

        Args:
            epoch: that was left.
            stages: of the pipeline.
            votes: of its survivors, with what `leave` returned as ``versions``.
            me: this member.
        """
        tensor = self._arguments.tensor_model_parallel_size
        per_stage = len(epoch.members) // stages
        places: dict[tuple[int, int], dict[int, Any]] = {}
        for member, vote in votes.items():
            rank = epoch.members.index(member)
            place = rank // per_stage, rank % tensor
            places.setdefault(place, {})[member] = vote["versions"]
        names = sorted(places)
        chosen = choose_common([places[one] for one in names])
        if chosen is None:
            return None
        mine = next(place for place in names if me in places[place])
        self._chosen = chosen[names.index(mine)]
        return int(self._chosen.version)

    def close(self) -> None:
        """Ends the copying."""
        if self._copies is not None:
            self._copies.leave()
            self._copies = None
