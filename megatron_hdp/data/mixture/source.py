"""What is asked of an opened source, whatever it holds: tokens already, or text still."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np

from megatron_hdp.arrays import BoolArray, Int64Array
from megatron_hdp.data.mixture.stream import Rows
from megatron_hdp.data.order import SourceOrder
from megatron_hdp.data.shuffles import LATEST_ORDER
from megatron_hdp.data.sides import Sides
from megatron_hdp.data.spec import SourceSpec


@dataclass(frozen=True, kw_only=True)
class Source(Rows, Protocol):
    """One source of a split. Its rows are a run of all rows, counted from the first of the run."""

    is_estimated: ClassVar[bool] = False
    """Whether sizes and lengths are estimates, and `longest` a bound."""

    spec: SourceSpec
    """What is declared of it."""
    long_sequence: str
    """What happens to a document that is longer than ``--seq-length``."""
    first_row: int
    num_rows: int

    @property
    def name(self) -> str:
        """What the source is called."""
        return self.spec.name

    @property
    def sides(self) -> Sides | None:
        """Which of its documents were preferred; None where it holds no preferences."""
        return None

    @property
    def has_media(self) -> bool:
        """Whether pictures stand among its tokens, in which no row may be cut."""
        return False

    @property
    def item_names(self) -> str:
        """What its items are called; of one without media nothing."""
        return ""

    @property
    def group(self) -> int:
        """Neighbouring rows that are drawn as one and stay in one step."""
        return 1 if self.sides is None else self.sides.group

    @property
    def num_groups(self) -> int:
        """What is drawn of it in an epoch."""
        return self.num_rows // self.group

    @property
    def bad(self) -> int:
        """Bad documents that were left out so far."""

    @property
    def longest(self) -> int:
        """Tokens of its longest row, or a bound of them."""

    @property
    def mean_length(self) -> float:
        """Tokens of a row on average, or about; at least 1."""

    @property
    def index_bytes(self) -> int:
        """Bytes of what says where its rows lie and what of them is trained."""

    @property
    def private_bytes(self) -> int:
        """Those of them that each process holds for itself where no folder of caches is given."""

    def is_trained(self, row: int, start: int, stop: int) -> BoolArray:
        """Return which of the labelled tokens ``[start, stop)`` of a row have a trained label."""

    def tokens(self, row: int, start: int, count: int) -> Int64Array:
        """Return tokens of a row from its token ``start`` on; the token behind it may be asked."""

    def documents(self, rows: Int64Array) -> Int64Array:
        """Return the numbers of the documents in which rows lie."""

    def document(self, row: int) -> int:
        """Return the number of the document in which a row lies."""
        return int(self.documents(np.array([row]))[0])

    def size(self, unit: str) -> float:
        """Return how large it is, in the unit of the weights."""

    def order(self, key: int) -> SourceOrder:
        """Return what decides the order in which it is drawn, but for what stands in it.

        The key tells its orders from those of other sources.
        """
        num_rows, corpus = self._all_rows()
        if self.num_rows != num_rows:
            corpus = digest(corpus, self.first_row, self.num_rows)
        return SourceOrder(
            num_sequences=self.num_groups,
            corpus=corpus,
            long_sequence=self.long_sequence,
            version=LATEST_ORDER,
            key=key,
        )

    def _all_rows(self) -> tuple[int, int]:
        """Return how many rows there are, and a fingerprint of them."""

    def contents(self) -> int:
        """Return a fingerprint of samples of what stands in it."""

    def words(self, rows: Sequence[int]) -> str:
        """Return what a message calls the documents of rows."""

    def describe(self, use: str, name: str) -> str:
        """Return how many rows are ``use``, such as ``to train on``, and what became of them."""


def digest(*parts: object) -> int:
    """Return 63 bits, the same in every process."""
    found = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(found, "little") >> 1
