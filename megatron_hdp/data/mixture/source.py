"""What is asked of an opened source, whatever it holds: tokens already, or text still."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Protocol

from megatron_hdp.arrays import BoolArray, Int64Array
from megatron_hdp.data.order import SourceOrder
from megatron_hdp.data.spec import SourceSpec


class Source(Protocol):
    """One source of a split. Its rows are counted from the first that the split takes."""

    @property
    def name(self) -> str:
        """What the source is called."""

    @property
    def spec(self) -> SourceSpec:
        """What is declared of it."""

    @property
    def long_sequence(self) -> str:
        """What happens to a document that is longer than ``--seq-length``."""

    @property
    def num_rows(self) -> int:
        """Rows of an epoch."""

    @property
    def bad(self) -> int:
        """Bad documents that were left out so far."""

    @property
    def longest(self) -> int:
        """Tokens of its longest row, or a bound of them."""

    @property
    def mean_length(self) -> float:
        """Tokens of a row on average, or about."""

    @property
    def is_estimated(self) -> bool:
        """Whether sizes and lengths are estimates, and `longest` a bound."""

    @property
    def index_bytes(self) -> int:
        """Bytes of what says where its rows lie and what of them is trained."""

    @property
    def private_bytes(self) -> int:
        """Those of them that each process holds for itself where no folder of caches is given."""

    def lengths(self, rows: Int64Array) -> Int64Array:
        """Return tokens of rows; one without a token is passed over."""

    def num_labels(self, rows: Int64Array, lengths: Int64Array) -> Int64Array:
        """Return tokens of rows of these lengths, from the first, that have a next one."""

    def num_trained(self, rows: Int64Array, starts: Int64Array, stops: Int64Array) -> Int64Array:
        """Return of the labelled tokens ``[start, stop)`` of rows those whose label is trained."""

    def is_trained(self, row: int, start: int, stop: int) -> BoolArray:
        """Return which of the labelled tokens ``[start, stop)`` of a row have a trained label."""

    def tokens(self, row: int, start: int, count: int) -> Int64Array:
        """Return tokens of a row from its token ``start`` on; the token behind it may be asked."""

    def document(self, row: int) -> int:
        """Return the number of the document in which a row lies."""

    def size(self, unit: str) -> float:
        """Return how large it is, in the unit of the weights."""

    def order(self, key: int) -> SourceOrder:
        """Return what decides the order in which it is drawn, but for what stands in it.

        Args:
            key: what tells its orders from those of other sources.
        """

    def contents(self) -> int:
        """Return a fingerprint of samples of what stands in it."""

    def words(self, rows: Sequence[int]) -> str:
        """Return what a message calls the documents of rows."""

    def describe(self, use: str, name: str) -> str:
        """Return how many rows are ``use``, and what became of its documents.

        Args:
            use: such as ``to train on``.
            name: of the source, as the sentence goes on; may be empty.
        """


def digest(*parts: object) -> int:
    """Return 63 bits, the same in every process."""
    found = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(found, "little") >> 1
