"""A source of tokens with pictures or sounds: a placeholder in a document is its rows' tokens.

What is stored has one token for an item, whose size says how many rows an encoder makes of it; so
other limits of pixels are other sequences of the same tokens. Places in a row count rows.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_hdp.arrays import BoolArray, Int64Array
from megatron_hdp.data.index_file import Documents
from megatron_hdp.data.media import SUFFIX, Items, ItemSize, MediaFiles, StoredItem, stored_item
from megatron_hdp.data.mixture.source import digest
from megatron_hdp.data.mixture.table_source import TableSource

_DOCUMENT = 2**32  # places of a document: more than it has tokens


@dataclass(frozen=True)
class MediaRows:
    """The items of a pair's documents, and how many rows each has."""

    items: Items
    files: MediaFiles
    rows: Int64Array
    """Of each item, ``[items]``."""
    places: Int64Array
    """Of each item's first row in its document, behind the document's number: so they rise."""

    @classmethod
    def of(cls, items: Items, files: MediaFiles) -> MediaRows:
        """Count the rows of all items by their sizes.

        Raises:
            ValueError: a picture's sides are too far apart.
        """
        sizes = (items.records[name].astype(np.int64) for name in ("height", "width", "frames"))
        return cls.of_rows(items, files, files.settings.rows(*sizes))

    @classmethod
    def of_rows(cls, items: Items, files: MediaFiles, rows: Int64Array) -> MediaRows:
        """Take the rows of each item."""
        more = np.concatenate([[0], np.cumsum(rows - 1)])
        documents = np.repeat(np.arange(len(items)), np.diff(items.first))
        begins = items.records["token"] + more[:-1] - more[items.first[documents]]
        return cls(items, files, rows, documents * _DOCUMENT + begins)

    def of_document(self, document: int) -> slice:
        """Return which items a document has."""
        return slice(int(self.items.first[document]), int(self.items.first[document + 1]))

    def begins(self, items: slice | Int64Array) -> Int64Array:
        """Return the place of the first row of items in their documents."""
        return self.places[items] % _DOCUMENT

    def num_stored(self, documents: Int64Array, places: Int64Array) -> Int64Array:
        """Return the stored tokens of documents that begin before places."""
        if not len(self.places):
            return places
        has, last = self._before(documents, places)
        behind = places - self.begins(last) - self.rows[last]
        upto = self.items.records["token"][last].astype(np.int64) + 1 + np.maximum(behind, 0)
        return np.where(has, upto, places)

    def longer(self, piece: Documents, most: int | None) -> Documents:
        """Return documents with the lengths that they have with rows in place of placeholders.

        Args:
            piece: as they are stored.
            most: a longer one is cut there, or before the item in which that is; None: never.
        """
        documents = piece.first + np.arange(len(piece.lengths))
        more = np.concatenate([[0], np.cumsum(self.rows - 1)])
        first = self.items.first
        lengths = piece.lengths + more[first[documents + 1]] - more[first[documents]]
        if most is not None and not len(self.places):
            lengths = np.minimum(lengths, most)
        elif most is not None:
            has, last = self._before(documents, np.full(len(documents), most))
            begins = self.begins(last)
            is_within = has & (begins + self.rows[last] > most)
            lengths = np.where(lengths > most, np.where(is_within, begins, most), lengths)
        return Documents(piece.first, lengths, piece.begins)

    def _before(self, documents: Int64Array, places: Int64Array) -> tuple[BoolArray, Int64Array]:
        """Whether a document has an item that begins before a place, and the last such item."""
        found = np.searchsorted(self.places, documents * _DOCUMENT + places)
        return found > self.items.first[documents], np.maximum(found - 1, 0)

    def identity(self) -> tuple[object, ...]:
        """Return all but the stored tokens that its rows and their pixels depend on."""
        return self.files.settings.identity()


class Lengthening:
    """Gives documents the lengths that they are drawn with, and counts those that are cut."""

    def __init__(self, media: MediaRows, most: int | None, documents: range) -> None:
        """Set what they are cut to, if they are; only some of the pair's documents count."""
        self._media, self._most, self._documents = media, most, documents
        self._cut: dict[int, int] = {}  # of a piece, which comes twice

    @property
    def num_cut(self) -> int:
        """Documents that were cut."""
        return sum(self._cut.values())

    def __call__(self, piece: Documents) -> Documents:
        """Return a piece of the documents with other lengths."""
        found = self._media.longer(piece, None)
        if self._most is None:
            return found
        numbers = piece.first + np.flatnonzero(found.lengths > self._most)
        is_counted = (numbers >= self._documents.start) & (numbers < self._documents.stop)
        self._cut[piece.first] = int(is_counted.sum())
        return self._media.longer(piece, self._most)


@dataclass(frozen=True, kw_only=True)
class MediaSource(TableSource):
    """A source of tokens and items, whose rows are documents, cut before an item at most."""

    media: MediaRows

    @property
    def has_media(self) -> bool:
        """It is cut when it is opened, not when it is drawn."""
        return True

    @property
    def item_names(self) -> str:
        """What its items are called."""
        return self.media.files.settings.items

    @property
    def index_bytes(self) -> int:
        """Bytes of the table and of the items."""
        return super().index_bytes + os.path.getsize(self.prefix + SUFFIX)

    def num_trained(self, rows: Int64Array, starts: Int64Array, stops: Int64Array) -> Int64Array:
        """Return of the labelled tokens ``[start, stop)`` of rows those whose label is trained."""
        documents = self.table.documents(rows + self.first_row)
        begins, ends = (self.media.num_stored(documents, at + 1) for at in (starts, stops))
        assert self.spans is not None, "the opener has seen them"
        return self.spans.counts(documents, begins, ends)

    def is_trained(self, row: int, start: int, stop: int) -> BoolArray:
        """Return which of the labelled tokens ``[start, stop)`` of a row have a trained label."""
        document = self.document(row)
        stored = self._num_stored(document, stop + 1)
        assert self.spans is not None, "the opener has seen them"
        mask = self.spans.mask(document, 0, stored)
        return np.repeat(mask, self._times(document, stored))[start + 1 : stop + 1]

    def tokens(self, row: int, start: int, count: int) -> Int64Array:
        """Return tokens of a row from its token ``start`` on; of an item its placeholder's."""
        document = self.document(row)
        stored = self._num_stored(document, start + count)
        begin = int(self.table.begins(np.array([row + self.first_row]))[0])
        found = np.repeat(self.reader.read(begin, stored), self._times(document, stored))
        return found[start : start + count]

    def items(self, row: int, length: int) -> list[tuple[int, StoredItem]]:
        """Return the items of a row's first tokens, each with the first of its tokens."""
        document = self.document(row)
        begins = self.media.begins(self.media.of_document(document))
        items: Items = self.media.items
        found = []
        for begin, one in zip(begins.tolist(), items.of(document), strict=True):
            if begin < length:
                found.append((begin, self._stored(one)))
        return found

    def items_of(self, rows: Int64Array, lengths: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return how many items rows' first tokens have, and the numbers of all of them."""
        documents = self.table.documents(rows + self.first_row)
        firsts = self.media.items.first[documents]
        counts = np.searchsorted(self.media.places, documents * _DOCUMENT + lengths) - firsts
        before = np.cumsum(counts) - counts
        return counts, np.repeat(firsts - before, counts) + np.arange(int(counts.sum()))

    def item(self, row: int, place: int) -> StoredItem:
        """Return an item of a row, by its place among them."""
        return self._stored(self.media.items.of(self.document(row))[place])

    def _stored(self, item: Any) -> StoredItem:
        name = self.media.items.name(int(item["file"]))
        place = name, int(item["offset"]), int(item["size"])
        height, width, frames, part = (
            int(item[key]) for key in ("height", "width", "frames", "part")
        )
        size = ItemSize(height, width, frames, part, float(item["seconds"]))
        return stored_item(self.media.files, place, size)

    def kept(self) -> BoolArray:
        """Return which of the pair's items its rows have, ``[items]``."""
        media, rows = self.media, np.arange(self.num_rows)
        documents = media.places // _DOCUMENT
        begins = media.places % _DOCUMENT
        lengths = np.zeros(len(media.items), dtype=np.int64)
        lengths[self.table.documents(rows + self.first_row)] = self.lengths(rows)
        is_kept: BoolArray = begins < lengths[documents]
        return is_kept

    def contents(self) -> int:
        """Return a fingerprint of samples of its tokens, of what is trained, and of its items."""
        return digest(super().contents(), self.media.items.samples)

    def _times(self, document: int, stored: int) -> Int64Array:
        """How many tokens each of the first stored ones of a document is."""
        tokens = self.media.items.of(document)["token"].astype(np.int64)
        rows = self.media.rows[self.media.of_document(document)]
        times = np.ones(stored, dtype=np.int64)
        times[tokens[tokens < stored]] = rows[tokens < stored]
        return times

    def _num_stored(self, document: int, place: int) -> int:
        return int(self.media.num_stored(np.array([document]), np.array([place]))[0])

    def _all_rows(self) -> tuple[int, int]:
        num_rows, corpus = super()._all_rows()
        return num_rows, digest(corpus, *self.media.identity())
