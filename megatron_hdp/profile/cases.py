"""What is timed: micro-batches, parts of them alone, transfers; small and up to what fits."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

COMPUTE = "compute"
ATTENTION = "attention"
EXPERTS = "experts"
RING = "ring"
TRANSFER = "transfer"

_LENGTHS = (1.0, 0.5, 0.25, 0.125, 1 / 16, 1 / 32)
_HELD_OUT_LENGTHS = (0.7, 0.35, 0.18)
_PARTS, _HELD_OUT_PARTS = (4, 16), (8,)
_RING_LENGTHS = (1.0, 0.5, 0.25, 1 / 16)
_HELD_OUT_RING_LENGTHS = (0.7, 0.35)
_TRANSFERS = (1.0, 0.5, 0.25, 1 / 8, 1 / 32, 1 / 128)
_MOST_TRANSFER = 4  # times what a rank holds, so that size tells


@dataclass(frozen=True)
class Case:
    """One thing to time; every rank of the job runs it at the same moment."""

    kind: str
    """COMPUTE: a micro-batch on each rank; RING: one on the first ``degree`` ranks; ATTENTION and
    EXPERTS: that part of it alone, all layers; TRANSFER: one hop of a ring of ``degree`` ranks."""
    lengths: tuple[int, ...] = ()
    """Tokens of the sequences of the micro-batch."""
    degree: int = 1
    num_bytes: int = 0
    """What a member sends in a hop of a transfer."""
    leaves_node: bool = False
    """Whether the ring has ranks of several nodes."""
    is_held_out: bool = False
    """Whether it judges the fit instead of being part of it."""

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences."""
        return sum(self.lengths)

    def __str__(self) -> str:
        if self.kind == TRANSFER:
            return f"{self.kind} of {self.num_bytes:,} B, {self.degree} ranks"
        many = f"{len(self.lengths)} x " if len(self.lengths) > 1 else ""
        where = f", {self.degree} ranks" if self.degree > 1 else ""
        return f"{self.kind} {many}{self.lengths[0]:,} tokens{where}"


@dataclass(frozen=True)
class Room:
    """What a job has room for."""

    tokens_per_rank: int
    """Capacity: the most tokens of a rank in a micro-batch."""
    longest: int
    """Tokens of the longest sequence."""
    ranks: int
    """HDP ranks."""
    ranks_per_node: int
    multiple: int = 1
    """Tokens of a chunk are a multiple of this."""
    kv_bytes_per_layer: int = 1
    """Bytes of K and V of one token in one layer."""
    has_experts: bool = False
    """Whether layers are mixtures of experts."""


def cases_of(room: Room) -> tuple[Case, ...]:
    """All cases, each once: those that are fitted, and those that judge the fit."""
    found = [*_whole(room), *_rings(room), *_transfers(room)]
    unique: dict[tuple[object, ...], Case] = {}
    for case in found:  # what is fitted is not held out, too
        key = (case.kind, case.lengths, case.degree, case.num_bytes)
        if key not in unique or unique[key].is_held_out:
            unique[key] = case
    return tuple(unique.values())


def _whole(room: Room) -> Iterator[Case]:
    most = min(room.tokens_per_rank, room.longest)
    for shares, parts, is_held_out in (
        (_LENGTHS, _PARTS, False),
        (_HELD_OUT_LENGTHS, _HELD_OUT_PARTS, True),
    ):
        batches: list[tuple[int, ...]] = [
            (length,) for length in _lengths(shares, most, room.multiple)
        ]
        for number in parts:
            length = _rounded(min(room.tokens_per_rank // number, most), room.multiple)
            if length * number <= room.tokens_per_rank:
                batches.append((length,) * number)
        for lengths in batches:
            yield Case(COMPUTE, lengths, is_held_out=is_held_out)
            if not is_held_out:
                yield Case(ATTENTION, lengths)
            if not is_held_out and room.has_experts and len(lengths) == 1:
                yield Case(EXPERTS, lengths)


def _rings(room: Room) -> Iterator[Case]:
    for degree, is_held_out in _degrees(room.ranks):
        most = min(room.tokens_per_rank * degree, room.longest)
        multiple = 2 * degree * room.multiple
        leaves_node = degree > room.ranks_per_node
        of_all = ((_RING_LENGTHS, False), (_HELD_OUT_RING_LENGTHS, True))
        for shares, of_lengths in of_all[1:] if is_held_out else of_all:
            for length in _lengths(shares, most, multiple):
                yield Case(
                    *(RING, (length,), degree), leaves_node=leaves_node, is_held_out=of_lengths
                )


def _degrees(ranks: int) -> Iterator[tuple[int, bool]]:
    """Degrees of rings, and whether they are held out: powers of two and all are not."""
    degree = 2
    while degree <= ranks:
        yield degree, False
        between = degree + degree // 2
        if between < ranks:
            yield between, True
        degree *= 2
    if ranks > 1 and ranks & (ranks - 1):
        yield ranks, False


def _transfers(room: Room) -> Iterator[Case]:
    rings = [(min(room.ranks, room.ranks_per_node), False)]
    if room.ranks > room.ranks_per_node:
        rings.append((room.ranks, True))
    for degree, leaves_node in rings:
        if degree < 2:
            continue
        for tokens in _lengths(_TRANSFERS, _MOST_TRANSFER * room.tokens_per_rank, 1):
            yield Case(
                TRANSFER,
                degree=degree,
                num_bytes=tokens * room.kv_bytes_per_layer,
                leaves_node=leaves_node,
            )


def _lengths(shares: Iterable[float], most: int, multiple: int) -> list[int]:
    """Different lengths, the longest first; none below what one chunk must hold."""
    found = {_rounded(int(most * share), multiple) for share in shares}
    return sorted((length for length in found if length <= most), reverse=True)


def _rounded(length: int, multiple: int) -> int:
    least = -(-2 // multiple) * multiple  # a micro-batch has two tokens at least
    return max(length // multiple * multiple, least)
