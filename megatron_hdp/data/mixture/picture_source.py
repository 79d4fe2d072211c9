"""A source of tokens with pictures: each placeholder of a document is as many tokens as rows.

What is stored has one token for a picture, whose size says how many rows an encoder makes of it; so
other limits of pixels are other sequences of the same tokens. Places in a row count rows.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np

from megatron_hdp.arrays import BoolArray, Int64Array
from megatron_hdp.data.index_file import Documents
from megatron_hdp.data.media import DECODER, SUFFIX, Items, PictureFiles, StoredPicture
from megatron_hdp.data.mixture.source import digest
from megatron_hdp.data.mixture.table_source import TableSource


@dataclass(frozen=True)
class PictureRows:
    """The pictures of a pair's documents, and how many rows each has."""

    items: Items
    files: PictureFiles
    rows: Int64Array
    """Of each item, ``[items]``."""

    @classmethod
    def of(cls, items: Items, files: PictureFiles) -> PictureRows:
        """Count the rows of all items by their sizes.

        Raises:
            ValueError: a picture's sides are too far apart.
        """
        sides = items.records["height"].astype(np.int64) << 32 | items.records["width"]
        sizes, which = np.unique(sides, return_inverse=True)
        counts = [files.settings.rows(one >> 32, one & 0xFFFFFFFF) for one in sizes.tolist()]
        return cls(items, files, np.array([*counts, 0], dtype=np.int64)[which])

    def of_document(self, document: int) -> tuple[Int64Array, Int64Array]:
        """Return the token and the rows of each of a document's items, in order."""
        here = slice(int(self.items.first[document]), int(self.items.first[document + 1]))
        return self.items.records["token"][here].astype(np.int64), self.rows[here]

    def begins(self, document: int) -> Int64Array:
        """Return the place of the first row of each of a document's items."""
        tokens, rows = self.of_document(document)
        begins: Int64Array = tokens + np.cumsum(rows - 1) - (rows - 1)
        return begins

    def num_stored(self, document: int, place: int) -> int:
        """Return the stored tokens of a document that begin before a place."""
        tokens, rows = self.of_document(document)
        begins = self.begins(document)
        before = int(np.searchsorted(begins, place))
        if before == 0:
            return place
        behind = place - int(begins[before - 1]) - int(rows[before - 1])
        return int(tokens[before - 1]) + 1 + max(0, behind)

    def longer(self, piece: Documents, most: int | None) -> Documents:
        """Return documents with the lengths that they have with rows in place of placeholders.

        Args:
            piece: as they are stored.
            most: a longer one is cut there, or before the picture in which that is; None: never.
        """
        first = self.items.first[piece.first : piece.first + len(piece.lengths) + 1]
        sums = np.concatenate([[0], np.cumsum(self.rows - 1)])
        lengths = piece.lengths + sums[first[1:]] - sums[first[:-1]]
        for i in np.flatnonzero(lengths > most).tolist() if most is not None else ():
            assert most is not None
            begins, (_, rows) = self.begins(piece.first + i), self.of_document(piece.first + i)
            inside = (begins < most) & (most < begins + rows)
            lengths[i] = int(begins[inside][0]) if inside.any() else most
        return Documents(piece.first, lengths, piece.begins)

    def identity(self) -> tuple[object, ...]:
        """Return all but the stored tokens that its rows and their pixels depend on."""
        return DECODER, self.files.settings.resizing


class Lengthening:
    """Gives documents the lengths that they are drawn with, and counts those that are cut."""

    def __init__(self, pictures: PictureRows, most: int | None, documents: range) -> None:
        """Set what they are cut to, if they are; only some of the pair's documents count."""
        self._pictures, self._most, self._documents = pictures, most, documents
        self._cut: dict[int, int] = {}  # of a piece, which comes twice

    @property
    def num_cut(self) -> int:
        """Documents that were cut."""
        return sum(self._cut.values())

    def __call__(self, piece: Documents) -> Documents:
        """Return a piece of the documents with other lengths."""
        found = self._pictures.longer(piece, None)
        if self._most is None:
            return found
        numbers = piece.first + np.flatnonzero(found.lengths > self._most)
        is_counted = (numbers >= self._documents.start) & (numbers < self._documents.stop)
        self._cut[piece.first] = int(is_counted.sum())
        return self._pictures.longer(piece, self._most)


@dataclass(frozen=True, kw_only=True)
class PictureSource(TableSource):
    """A source of tokens and pictures, whose rows are documents, cut before a picture at most."""

    pictures: PictureRows

    @property
    def has_pictures(self) -> bool:
        """It is cut when it is opened, not when it is drawn."""
        return True

    @property
    def index_bytes(self) -> int:
        """Bytes of the table and of the items."""
        return super().index_bytes + os.path.getsize(self.prefix + SUFFIX)

    def num_trained(self, rows: Int64Array, starts: Int64Array, stops: Int64Array) -> Int64Array:
        """Return of the labelled tokens ``[start, stop)`` of rows those whose label is trained."""
        documents = self.table.documents(rows + self.first_row)
        bounds = [
            [self.pictures.num_stored(int(document), int(place)) for place in (start + 1, stop + 1)]
            for document, start, stop in zip(documents, starts, stops, strict=True)
        ]
        begins, ends = np.array(bounds, dtype=np.int64).reshape(-1, 2).T
        assert self.spans is not None, "the opener has seen them"
        return self.spans.counts(documents, begins, ends)

    def is_trained(self, row: int, start: int, stop: int) -> BoolArray:
        """Return which of the labelled tokens ``[start, stop)`` of a row have a trained label."""
        document = self.document(row)
        stored = self.pictures.num_stored(document, stop + 1)
        assert self.spans is not None, "the opener has seen them"
        mask = self.spans.mask(document, 0, stored)
        return np.repeat(mask, self._times(document, stored))[start + 1 : stop + 1]

    def tokens(self, row: int, start: int, count: int) -> Int64Array:
        """Return tokens of a row from its token ``start`` on; of a picture its placeholder's."""
        document = self.document(row)
        stored = self.pictures.num_stored(document, start + count)
        begin = int(self.table.begins(np.array([row + self.first_row]))[0])
        found = np.repeat(self.reader.read(begin, stored), self._times(document, stored))
        return found[start : start + count]

    def items(self, row: int, length: int) -> list[tuple[int, StoredPicture]]:
        """Return the pictures of a row's first tokens, each with the first of its tokens."""
        document = self.document(row)
        begins, of_items = self.pictures.begins(document), self.pictures.items
        found = []
        for begin, one in zip(begins.tolist(), of_items.of(document), strict=True):
            if begin < length:
                name = of_items.name(int(one["file"]))
                numbers = (int(one[key]) for key in ("offset", "size", "height", "width"))
                found.append((begin, StoredPicture(self.pictures.files, name, *numbers)))
        return found

    def kept(self) -> BoolArray:
        """Return which of the pair's items its rows have, ``[items]``."""
        pictures, rows = self.pictures, np.arange(self.num_rows)
        first = pictures.items.first
        documents = np.repeat(np.arange(len(pictures.items)), np.diff(first))
        sums = np.concatenate([[0], np.cumsum(pictures.rows - 1)])
        begins = pictures.items.records["token"] + sums[:-1] - sums[first[documents]]
        lengths = np.zeros(len(pictures.items), dtype=np.int64)
        lengths[self.table.documents(rows + self.first_row)] = self.lengths(rows)
        is_kept: BoolArray = begins < lengths[documents]
        return is_kept

    def contents(self) -> int:
        """Return a fingerprint of samples of its tokens, of what is trained, and of its items."""
        items = self.pictures.items
        return digest(super().contents(), len(items.records), items.records.tobytes())

    def _times(self, document: int, stored: int) -> Int64Array:
        """How many tokens each of the first stored ones of a document is."""
        tokens, rows = self.pictures.of_document(document)
        times = np.ones(stored, dtype=np.int64)
        times[tokens[tokens < stored]] = rows[tokens < stored]
        return times

    def _all_rows(self) -> tuple[int, int]:
        num_rows, corpus = super()._all_rows()
        return num_rows, digest(corpus, *self.pictures.identity())
