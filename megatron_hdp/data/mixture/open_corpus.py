"""From what a split draws from to its opened sources: of tokens, or of text on the way to them."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron_hdp.data.formats import kind_of
from megatron_hdp.data.media import INLINE_SUFFIX, Items, MediaFiles, settings_of
from megatron_hdp.data.media import SUFFIX as ITEMS_SUFFIX
from megatron_hdp.data.mixture.corpus import Corpus
from megatron_hdp.data.mixture.media_source import Lengthening, MediaRows, MediaSource
from megatron_hdp.data.mixture.schedule import MixtureSpec
from megatron_hdp.data.mixture.source import Source
from megatron_hdp.data.mixture.table_source import TableSource
from megatron_hdp.data.mixture.text_source import TextSource
from megatron_hdp.data.on_the_fly import Decoder, RecordIndex, SourceFiles, open_estimate
from megatron_hdp.data.prepare import Prepared, decoding_of, prepare, recipe_of
from megatron_hdp.data.sides import KINDS, SUFFIX, Sides
from megatron_hdp.data.spans import Spans
from megatron_hdp.data.spec import SourceSpec
from megatron_hdp.data.tables import SequenceTable, count_documents, open_source, split_documents
from megatron_hdp.data.token_file import TokenReader
from megatron_hdp.data.tokenizers import available_cpus

_LEAVE_OUT = "leave rows out whose answers are too long, or raise --seq-length"

CACHE_FOLDER = "hdp-cache"
"""Beside the data, where no ``--data-cache-path`` is given: what sources were prepared into."""


@dataclass(frozen=True, kw_only=True)
class Opening:
    """How sources are opened."""

    max_length: int
    """``--seq-length``."""
    long_sequence: str
    """``--hdp-long-sequence``, for sources that say nothing else."""
    tokenizer: str | None = None
    """The run's, for sources that name none; None where it cannot be used on text."""
    cache_folder: Path | None = None
    """``--data-cache-path``."""
    workers: int | None = None
    """Processes that tokenise; None: as many as this process has CPUs."""
    say: Callable[[str], None] = print


def open_corpus(spec: MixtureSpec, opening: Opening) -> Corpus:
    """Open the sources of a split; what is tokenised ahead is, first, by one process a node.

    Sources without a document in this split are left out where others have one.

    Raises:
        ValueError: a source cannot be opened, or none has a document.
    """
    opened: list[Source] = []
    empty = []
    for source in spec.sources:
        if source.tokenise == "on-the-fly":
            opened.append(_of_split(open_text(source, spec, opening), spec))
            continue
        prefix, bad = prepared(source, spec, opening)
        documents = _documents_of(prefix, spec)
        if not len(documents):
            empty.append((source, prefix, documents))
            continue
        opened.append(_opened(source, prefix, bad, documents, spec, opening))
    if not opened:
        source, prefix, documents = empty[0]
        _opened(source, prefix, 0, documents, spec, opening)  # says that there is no sequence
    return Corpus(spec, opened, opening.max_length)


def any_documents(spec: MixtureSpec, opening: Opening) -> bool:
    """Return whether a split has a document at all; what is not tokenised is, to know.

    Raises:
        ValueError: a source cannot be prepared or opened.
    """
    if any(source.tokenise == "on-the-fly" for source in spec.sources):
        return True  # none of them is empty, or opening it fails
    return any(
        len(_documents_of(prefix, spec))
        for prefix, _ in (prepared(source, spec, opening) for source in spec.sources)
    )


def _documents_of(prefix: str, spec: MixtureSpec) -> range:
    """Return the split's documents of a ``.bin/.idx``; none of its pairs is cut."""
    sides = Sides.beside(prefix)
    group = 1 if sides is None else sides.group
    found = split_documents(count_documents(prefix) // group, spec.split)[spec.part]
    return range(group * found.start, group * found.stop)


def prepared(source: SourceSpec, spec: MixtureSpec, opening: Opening) -> tuple[str, int]:
    """Return the ``.bin/.idx`` prefix of a source and how many documents were left out as bad."""
    if kind_of(source) == "tokens":
        return prefix_of(source), 0
    made = prepare_source(source, spec, opening)
    return made.prefix, made.bad


def prepare_source(source: SourceSpec, spec: MixtureSpec, opening: Opening) -> Prepared:
    """Tokenise a source that is no pair into the cache where a run finds it, or find it there.

    Raises:
        ValueError: there is no tokenizer, or the source cannot be prepared.
    """
    return prepare(
        source,
        tokenizer=_tokenizer_of(source, spec, opening),
        folder=opening.cache_folder or cache_folder_of(source, spec),
        workers=opening.workers if opening.workers is not None else available_cpus(),
        say=opening.say,
    )


def open_text(source: SourceSpec, spec: MixtureSpec, opening: Opening) -> TextSource:
    """Open all records of a source that is tokenised on the fly; where they lie is looked up first.

    Raises:
        ValueError: there is no tokenizer, the files cannot be used so, or hold no record.
        OSError: where the records lie cannot be kept.
    """
    if source.media is not None:
        raise ValueError(
            f"{spec.origin}: found tokenise: on-the-fly for source '{source.name}' with media, "
            "expected ahead: the sizes of its pictures or sounds must be known"
        )
    if kind_of(source) in KINDS:
        raise ValueError(
            f"{spec.origin}: found tokenise: on-the-fly for source '{source.name}' of the format "
            f"{source.format}, expected ahead: how long both sides are must be known"
        )
    tokenizer = _tokenizer_of(source, spec, opening)
    long_sequence = source.long_sequence or "truncate"
    files = SourceFiles.of(source)
    folder = opening.cache_folder or cache_folder_of(source, spec)
    index = RecordIndex.open(source.name, files, folder, opening.say)
    if not len(index):
        raise ValueError(
            f"source '{source.name}' ({source.path}): none of {len(files):,} files has a record, "
            "expected text: change path, glob or key"
        )
    decoder = Decoder(
        source,
        index,
        decoding_of(source, files.kind, tokenizer),
        max_length=opening.max_length,
        long_sequence=long_sequence,
    )
    recipe = repr(sorted(recipe_of(source, files.kind, tokenizer).items()))
    estimate = open_estimate(
        source.name,
        index,
        decoder,
        recipe=recipe,
        max_length=opening.max_length,
        folder=folder,
        say=opening.say,
    )
    return TextSource(
        spec=source,
        index=index,
        decoder=decoder,
        recipe=recipe,
        estimate=estimate,
        long_sequence=long_sequence,
        max_length=opening.max_length,
        first_row=0,
        num_rows=len(index),
    )


def _tokenizer_of(source: SourceSpec, spec: MixtureSpec, opening: Opening) -> str:
    tokenizer = source.tokenizer or opening.tokenizer
    if tokenizer is None:
        raise ValueError(
            f"{spec.origin}: source '{source.name}' holds text, and the run's tokenizer is none "
            "that can read it: give the source a tokenizer, such as hf:PATH"
        )
    return tokenizer


def cache_folder_of(source: SourceSpec, spec: MixtureSpec) -> Path:
    """Return where a source is prepared into if no folder is given: beside the file that names it.

    Where flags name it, that is beside the source itself.
    """
    origin = source.path if spec.origin.startswith("--") else spec.origin
    return Path(os.path.abspath(origin)).parent / CACHE_FOLDER


def prefix_of(source: SourceSpec) -> str:
    """Return the path of a pair without ``.bin`` and ``.idx``."""
    return source.path.removesuffix(".idx").removesuffix(".bin")


def _opened(
    source: SourceSpec,
    prefix: str,
    bad: int,
    documents: range,
    spec: MixtureSpec,
    opening: Opening,
) -> TableSource:
    sides = Sides.beside(prefix)
    long_sequence = source.long_sequence or (opening.long_sequence if sides is None else "error")
    if sides is not None and long_sequence != "error":
        raise ValueError(
            f"{spec.origin}: found long-sequence {long_sequence} for source '{source.name}', which "
            f"holds preferences, expected error: an answer that is cut is another one; {_LEAVE_OUT}"
        )
    media = _media_of(source, prefix, spec)
    if media is not None and long_sequence == "split":
        raise ValueError(
            f"{spec.origin}: found long-sequence split for source '{source.name}', which has "
            "pictures or sounds, expected truncate or error: a piece could begin within one"
        )
    if media is not None and sides is not None:
        raise ValueError(
            f"{spec.origin}: found media and preferences in source '{source.name}', expected "
            "one of them: answers are text"
        )
    how: dict[str, Any] = {"cache_folder": opening.cache_folder, "say": opening.say}
    if sides is not None:
        how["remedy"] = _LEAVE_OUT
    if media is not None:
        most = opening.max_length if long_sequence == "truncate" else None
        how["longer"] = longer = Lengthening(media, most, documents)
    table, reader = open_source(
        prefix,
        max_length=opening.max_length,
        long_sequence=long_sequence,
        documents=documents,
        **how,
    )
    if kind_of(source) != "tokens":
        reader.note_opened()
    spans_path = f"{prefix}.spans"  # also of a pair that was prepared elsewhere
    spans = Spans(spans_path) if os.path.exists(spans_path) else None
    if spans is not None and reader.sums is not None:
        reader.sums.require_file(".spans")
    if spans is not None and len(spans) != (num_documents := count_documents(prefix)):
        raise ValueError(
            f"{spans_path} has spans of {len(spans):,} documents, the .idx beside it has "
            f"{num_documents:,}: they belong to different token files; make both again from their "
            "source"
        )
    if sides is not None:
        _require_all_sides(prefix, sides, table, reader, spans)
    group = 1 if sides is None else sides.group
    first_row, num_rows = _rows_of_split(source, table, opening.max_length, spec, group)
    parts: dict[str, Any] = {
        "spec": source,
        "prefix": prefix,
        "table": table,
        "reader": reader,
        "spans": spans,
        "long_sequence": long_sequence,
        "num_bad": bad,
        "known_sides": sides,
        "first_row": first_row,
        "num_rows": num_rows,
    }
    if media is None:
        return TableSource(**parts)
    _require_all_items(prefix, media, reader, spans)
    table.facts = replace(table.facts, num_truncated=longer.num_cut)
    return MediaSource(**parts, media=media)


def _media_of(source: SourceSpec, prefix: str, spec: MixtureSpec) -> MediaRows | None:
    """Return the items of a pair, which its source must say how to read."""
    items = Items.beside(prefix)
    if items is None and source.media is None:
        return None
    if source.media is None or items is None:
        found = "items and no media" if items is not None else "media and no items"
        raise ValueError(
            f"{spec.origin}: found {found} for source '{source.name}' ({prefix}), expected both, "
            "with the encoder that is trained: add media: {encoder: ..}, or take it out"
        )
    inline = prefix + INLINE_SUFFIX
    files = MediaFiles(source.media_folder, settings_of(source.media), inline)
    return MediaRows.of(items, files)


def _require_all_items(
    prefix: str, media: MediaRows, reader: TokenReader, spans: Spans | None
) -> None:
    """Refuse items of which something is missing."""
    if reader.sums is not None:
        reader.sums.require_file(ITEMS_SUFFIX)
    num_documents = count_documents(prefix)
    if spans is None or len(media.items) != num_documents:
        found = "no .spans" if spans is None else f"{num_documents:,} documents"
        raise ValueError(
            f"{prefix}{ITEMS_SUFFIX} has the items of {len(media.items):,} documents beside "
            f"{found}, expected as many, and .spans: make the pair again from its source"
        )


def _require_all_sides(
    prefix: str, sides: Sides, table: SequenceTable, reader: TokenReader, spans: Spans | None
) -> None:
    """Refuse preferences of which something is missing."""
    if reader.sums is not None:
        reader.sums.require_file(SUFFIX)
    num_documents = count_documents(prefix)
    if spans is None or table.facts.num_empty or len(sides) != num_documents:
        found = "no .spans" if spans is None else f"{table.facts.num_empty:,} empty documents"
        raise ValueError(
            f"{prefix}{SUFFIX} has {len(sides):,} sides beside {num_documents:,} documents and "
            f"{found}, expected one for each, none of them empty, and .spans of the answers: make "
            "the pair again from its source"
        )


def _of_split(source: TextSource, spec: MixtureSpec) -> TextSource:
    """Return what a split takes of a source that is tokenised on the fly: a row is a document."""
    held_out = spec.held_out.get(source.name, 0)
    border = source.num_rows - held_out
    if border <= 0:
        raise _too_many_held_out(source.name, held_out, source.num_rows, spec)
    if spec.takes_held_out:
        return source.part(border, held_out)
    return source.part(0, border)


def _too_many_held_out(name: str, held_out: int, num_rows: int, spec: MixtureSpec) -> ValueError:
    return ValueError(
        f"{spec.origin}: validation takes {held_out:,} sequences of source '{name}', which has "
        f"{num_rows:,}: expected fewer, so that training has some"
    )


def _rows_of_split(
    source: SourceSpec, table: SequenceTable, max_length: int, spec: MixtureSpec, group: int
) -> tuple[int, int]:
    """Return the first of the split's rows, and how many it has.

    Held-out sequences, or pairs, stand at the end. Of a document of which some are held out,
    training takes none.
    """
    held_out = group * spec.held_out.get(source.name, 0)
    if not held_out:
        return 0, len(table)
    border = len(table) - held_out
    if border > 0:
        start = int(table.starts(np.array([border]))[0])
        last = border - start // max_length  # pieces of the same document before it
    if border <= 0 or last <= 0:
        raise _too_many_held_out(source.name, held_out, len(table), spec)
    return (border, held_out) if spec.takes_held_out else (0, last)
