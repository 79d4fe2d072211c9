"""How the work is cut, by the data alone: the same shards whoever runs them, and how often."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import orjson

from megatron_hdp.data.formats import Piece, pieces_of
from megatron_hdp.data.hashes import hash_of_bytes

_MOST_BYTES, _LEAST_BYTES = 2**26, 2**20
_SHARDS_WANTED = 64
_MOST_NAMED = 5


@dataclass(frozen=True)
class Shard:
    """What one worker reads at a time and writes as one pair."""

    index: int
    pieces: tuple[Piece, ...]
    fingerprint: str
    """Of what it is of which files, wherever they lie."""

    @property
    def num_bytes(self) -> int:
        """What it takes of the files."""
        return sum(piece.num_bytes for piece in self.pieces)


@dataclass
class Counts:
    """What became of the documents of a shard, or of several."""

    documents: int = 0
    tokens: int = 0
    empty: int = 0
    """Left out: without a token."""
    bad: int = 0
    named: list[str] = field(default_factory=list)
    """What was wrong with the first bad ones."""

    def add(self, other: "Counts") -> None:
        """Count those of a later shard, too."""
        self.documents += other.documents
        self.tokens += other.tokens
        self.empty += other.empty
        self.bad += other.bad
        self.named = (self.named + other.named)[:_MOST_NAMED]

    def add_bad(self, message: str, may_be_bad: bool) -> None:
        """Count a bad document.

        Raises:
            ValueError: the message, where no document may be bad.
        """
        if not may_be_bad:
            raise ValueError(message)
        self.bad += 1
        self.named = [*self.named, message][:_MOST_NAMED]


def shard_bytes_for(total_bytes: int) -> int:
    """Return how much of the files a shard takes: little of little, so that all workers have some.

    The number of workers has no part in it: a run goes on with what another one finished.
    """
    return min(_MOST_BYTES, max(_LEAST_BYTES, total_bytes // _SHARDS_WANTED))


def cut(files: Sequence[str], key: str | None, *, lines: bool, shard_bytes: int) -> list[Shard]:
    """Cut files into shards of about a size, in order; small neighbours share one."""
    shards: list[Shard] = []
    taken: list[tuple[int, Piece]] = []
    size = 0
    for number, path in enumerate(files):
        for piece in pieces_of(path, key, lines=lines, piece_bytes=shard_bytes):
            if taken and size + piece.num_bytes > shard_bytes:
                shards.append(_shard(len(shards), taken))
                taken, size = [], 0
            taken.append((number, piece))
            size += piece.num_bytes
    if taken:
        shards.append(_shard(len(shards), taken))
    return shards


def _shard(index: int, taken: Iterable[tuple[int, Piece]]) -> Shard:
    parts = [(number, piece.format, piece.begin, piece.end) for number, piece in taken]
    return Shard(index, tuple(piece for _, piece in taken), hash_of_bytes(orjson.dumps(parts)))
