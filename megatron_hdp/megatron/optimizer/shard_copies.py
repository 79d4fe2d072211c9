"""Two versions of each rank's optimizer shard, here and at a neighbour, and a state made of them.

A version is the state after so many steps. It is read and sent beside the step that follows. The
older of the two is overwritten only once all ranks' newer ones have arrived, which they tell each
other in a reduction that each step makes anyway: so a version that is whole everywhere is always
there, and all ranks skip the same ones where the network is slow.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer

from megatron_hdp.megatron.optimizer.pieces import OptimizerShard
from megatron_hdp.planner.memory import copies_bytes
from megatron_hdp.runtime.copies import (
    Address,
    Chosen,
    Layout,
    Listener,
    Piece,
    Sender,
    Shelf,
    Source,
    exposed,
    fetch,
    keeping,
    neighbours,
    own_address,
    serving,
)

_LOCAL = "127.0.0.1"


class Held:
    """What a process holds in host memory, whoever is left: own and neighbours' shards."""

    def __init__(self, shelves: Sequence[Shelf]) -> None:
        self.shelves = list(shelves)

    def versions(self) -> list[list[Any]]:
        """``[version, members, owners]`` of each set of shards, for `choose_version`."""
        owners: dict[tuple[int, tuple[int, ...]], list[int]] = defaultdict(list)
        for shelf in self.shelves:
            for version in shelf.versions():
                owners[version, shelf.members].append(shelf.owner)
        return [
            [version, list(members), sorted(here)]
            for (version, members), here in sorted(owners.items())
        ]

    def leave_only(self, chosen: Chosen) -> list[Shelf]:
        """Frees all but one version; returns the shelves that hold it."""
        self.shelves = [one for one in self.shelves if one.members == chosen.members]
        for shelf in self.shelves:
            shelf.leave_only(chosen.version)
        self.shelves = [one for one in self.shelves if one.whole(chosen.version) is not None]
        return self.shelves


class ShardCopies:
    """The copies of one epoch: from the making of its groups to their end.

    Every rank of `place_group` must make one.

    Args:
        optimizer: whose shards are copied.
        chunks: this rank's parts of the model.
        members: who the ranks of `place_group` are, in its order.
        hosts: where they are.
        place_group: the data-parallel group, over which the state is spread.
        neighbour: whether copies are sent; without, each rank keeps its own versions.
        domains: ranks that leave together besides those of a host, such as those that share experts
            (default: each alone).
        kept: what the epoch before has left; it goes when the first version is everywhere.
        timeout_s: the longest that a wait may take.

    Raises:
        ValueError: this optimizer's shards cannot be copied; on every rank.
    """

    def __init__(
        self,
        optimizer: MegatronOptimizer,
        chunks: Sequence[DistributedDataParallel],
        members: Sequence[int],
        *,
        hosts: Sequence[str],
        place_group: dist.ProcessGroup,
        neighbour: bool = True,
        domains: Sequence[int] | None = None,
        kept: Held | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        shard = OptimizerShard(optimizer, chunks)
        rank = place_group.rank()
        sends = neighbour and len(members) > 1
        self._group = place_group
        self._timeout_s = timeout_s
        self._shard: OptimizerShard | None = shard
        self._kept = kept
        self._neighbours: list[Shelf] = []
        self._pending: int | None = None
        self._latest = -1
        is_on_gpu = any(one.is_cuda for chunk in chunks for one in chunk.parameters())
        self._own = Shelf(members[rank], members, shard.layout, pin=is_on_gpu)
        self._listener: Listener | None = None
        keeper: Address | None = None
        self.exposed: tuple[int, ...] = ()
        """Members whose copy is lost with their own host."""
        if sends:
            keepers = neighbours(hosts, domains)
            self.exposed = tuple(members[one] for one in exposed(hosts, keepers))
            kinds = {"keep": keeping(self._neighbours, members)}
            self._listener = Listener(_address(hosts), kinds, timeout_s)
            try:
                addresses = _gathered(tuple(self._listener.address), place_group)
            except BaseException:  # a rank that dies meanwhile ends the epoch
                self._listener.close()
                raise
            keeper = Address(*addresses[keepers[rank]])
        self._sender = Sender(self._own, shard.read, keeper, timeout_s)

    @property
    def complete(self) -> int:
        """The newest version that is whole here and at the neighbour; -1: none is."""
        return self._sender.complete

    @property
    def trouble(self) -> str | None:
        """Why a version does not reach the neighbour; None: nothing is known."""
        return self._sender.trouble

    @property
    def num_bytes(self) -> int:
        """Host memory that this rank's own versions, and as many of a neighbour's, take."""
        return int(copies_bytes(self._own.layout.num_bytes))

    def words(self) -> str:
        """What is copied where, and what its loss would mean, for the log."""
        alone = len(self.exposed)
        hosts = "another host" if not alone else "another rank"
        lost = "two neighbours at once"
        if alone:
            lost += f", or the host of {alone:,} of {len(self._own.members):,} ranks,"
        return (
            f"copies of the optimizer's shards: {self.num_bytes / 1e9:.3g} GB of host memory a "
            f"rank, two versions here and two of a neighbour's on {hosts}; the loss of {lost} "
            "ends the job"
        )

    def take(self, version: int) -> None:
        """Notes that the optimizer's state is that of `version`; to be called behind its step."""
        self._pending = version

    def begin(self, agreed: int) -> bool:
        """Begins to read and send what `take` noted; returns at once.

        Not before the version before has arrived everywhere: then it waits for the next one.

        Args:
            agreed: the least `complete` of all ranks; the same on all of them.
        """
        if self._pending is None or agreed < self._latest:
            return False
        assert self._shard is not None, "the epoch has ended"
        if agreed >= 0:
            self._kept = None
        version, self._pending = self._pending, None
        self._latest = version
        self._shard.mark()
        self._sender.begin(version, agreed, self._shard.facts)
        return True

    def before_change(self) -> None:
        """Waits until the state was read, if it is being read; not for the network.

        To be called before each step of the optimizer.

        Raises:
            TimeoutError: reading takes too long.
        """
        self._sender.wait_read()

    def settle(self) -> None:
        """Waits until all ranks' latest versions are at their neighbours; every rank calls this.

        Raises:
            TimeoutError: that takes too long.
        """
        self._sender.wait_complete(self._latest)
        agreed = min(_gathered(self.complete, self._group))
        if self.begin(agreed):
            self._sender.wait_complete(self._latest)
        _gathered(self.complete, self._group)  # who leaves now would refuse what others still send

    def versions(self) -> list[list[Any]]:
        """What this process holds whole; see `Held.versions`."""
        return self._held().versions()

    def leave(self) -> Held:
        """Gives up what is under way, and all that is bound to groups; needs no other rank."""
        self._sender.close()
        if self._listener is not None:
            self._listener.close()
        self._shard = None
        return self._held()

    def _held(self) -> Held:
        older = self._kept.shelves if self._kept is not None else []
        return Held([self._own, *self._neighbours, *older])


class _Offer(NamedTuple):
    """What a rank tells the others before they make a state anew."""

    address: tuple[str, int, str]
    shards: dict[int, tuple[dict[str, Any], dict[str, Any]]]
    """Layout and facts of each shard that it holds of the chosen version, by owner."""


def restore(
    held: Held | None,
    chosen: Chosen,
    optimizer: MegatronOptimizer,
    chunks: Sequence[DistributedDataParallel],
    place_group: dist.ProcessGroup,
    hosts: Sequence[str],
    timeout_s: float = 60.0,
) -> None:
    """Sets optimizer and weights to a version; every rank of `place_group` must call this.

    Each rank fetches the pieces that its new shard consists of from whoever holds them: their
    owners, or a neighbour of those that are gone. What is held of other versions goes.

    Args:
        held: what this process holds; None: nothing.
        chosen: of `choose_version`, the same on all ranks.
        optimizer: of the new groups, as are the others.
        chunks: this rank's parts of the model.
        place_group: the data-parallel group.
        hosts: where its ranks are.
        timeout_s: the longest silence of another rank.

    Raises:
        ValueError: a rank did not get its pieces, because the model or its optimizer is another
            one or because a holder is gone; on every rank.
    """
    shelves = held.leave_only(chosen) if held is not None else []
    shard = OptimizerShard(optimizer, chunks)
    with _listening(hosts, shelves, timeout_s) as address:
        here = {one.owner: _told(one, chosen.version) for one in shelves}
        offers = [_Offer(*one) for one in _gathered((tuple(address), here), place_group)]
        problem = None
        try:
            states, facts = _assembled(shard.layout, offers, chosen, shelves, timeout_s)
        except (OSError, ValueError) as error:
            problem = f"rank {place_group.rank()}: {error}"
        problems = [one for one in _gathered(problem, place_group) if one is not None]
    if problems:
        raise ValueError(f"version {chosen.version} cannot be put together: {problems[0]}")
    shard.write(states, facts)


def _told(shelf: Shelf, version: int) -> tuple[dict[str, Any], dict[str, Any]]:
    snapshot = shelf.whole(version)
    assert snapshot is not None, "other versions have gone"
    return shelf.layout.to_json(), snapshot.facts


@contextmanager
def _listening(
    hosts: Sequence[str], shelves: Sequence[Shelf], timeout_s: float
) -> Iterator[Address]:
    listener = Listener(_address(hosts), {"fetch": serving(shelves)}, timeout_s)
    try:
        yield listener.address
    finally:
        listener.close()


def _assembled(
    layout: Layout,
    offers: Sequence[_Offer],
    chosen: Chosen,
    shelves: Sequence[Shelf],
    timeout_s: float,
) -> tuple[dict[Piece, torch.Tensor], dict[str, Any]]:
    """``[rows, count]`` of each piece of a new shard, and the version's facts."""
    holders: dict[int, _Offer] = {}
    for offer in offers:
        for owner in offer.shards:
            holders.setdefault(owner, offer)
    missing = set(chosen.members) - set(holders)
    if missing:
        raise ValueError(f"nobody holds the shards of members {sorted(missing)}")
    states = {
        piece: torch.empty((len(layout.rows), piece.size), dtype=layout.dtype)
        for piece in layout.pieces
    }
    missing_entries = {piece: piece.size for piece in layout.pieces}
    wanted = defaultdict(list)
    for piece in layout.pieces:
        wanted[piece.name].append(piece)
    own = {shelf.owner: shelf.whole(chosen.version) for shelf in shelves}
    facts: dict[str, Any] = {}
    for owner, offer in sorted(holders.items()):
        found, facts = offer.shards[owner]
        old = Layout.from_json(found)
        if (old.rows, old.dtype) != (layout.rows, layout.dtype):
            raise ValueError(
                f"found copies of {old.dtype} {old.rows}, expected {layout.dtype} {layout.rows}"
            )
        parts = dict(_overlaps(old, wanted))
        if (snapshot := own.get(owner)) is not None:
            values = {one: snapshot.values[:, one.at : one.at + one.size] for one in parts}
        elif parts:
            source = Source(Address(*offer.address), chosen.version, chosen.members, owner)
            values = fetch(source, old, parts, timeout_s)
        for part, piece in parts.items():
            at = part.start - piece.start
            states[piece][:, at : at + part.size] = values[part]
            missing_entries[piece] -= part.size
    short = [piece.name for piece, count in missing_entries.items() if count]
    if short:
        raise ValueError(
            f"the copies lack parts of {', '.join(short[:4])}: they are of another model"
        )
    return states, facts


def _overlaps(old: Layout, wanted: dict[str, list[Piece]]) -> Iterator[tuple[Piece, Piece]]:
    """Parts of an old shard's pieces that are wanted, each with the piece that wants it."""
    for piece in old.pieces:
        for new in wanted.get(piece.name, ()):
            start, stop = max(piece.start, new.start), min(piece.stop, new.stop)
            if start < stop:
                yield Piece(piece.name, start, stop, piece.at + start - piece.start), new


def _address(hosts: Sequence[str]) -> str:
    return own_address() if len(set(hosts)) > 1 else _LOCAL


def _gathered(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """The values of all ranks of a group; every one of them must call this."""
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, value, group=group)
    return everyone
