"""From what a split draws from to its opened sources, prepared first where they hold no tokens."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_hdp.data.formats import kind_of
from megatron_hdp.data.mixture.corpus import Corpus, OpenSource
from megatron_hdp.data.mixture.mixture_spec import MixtureSpec
from megatron_hdp.data.prepare import Prepared, prepare
from megatron_hdp.data.spans import Spans
from megatron_hdp.data.spec import SourceSpec
from megatron_hdp.data.tables import SequenceTable, count_documents, open_source, split_documents
from megatron_hdp.data.tokenizers import available_cpus

CACHE_FOLDER = "hdp-cache"
"""Beside the data, where no ``--data-cache-path`` is given: what sources were prepared into."""


@dataclass(frozen=True, kw_only=True)
class Opening:
    """How sources are opened."""

    max_length: int
    """``--seq-length``."""
    long_sequence: str
    """``--hdp-long-sequence``, for sources that say nothing else."""
    tokenizer: str | None
    """The run's, for sources that name none; None where it cannot be used on text."""
    cache_folder: Path | None
    """``--data-cache-path``."""
    workers: int | None = None
    """Processes that tokenise; None: as many as this process has CPUs."""
    say: Callable[[str], None] = print


def open_corpus(spec: MixtureSpec, opening: Opening) -> Corpus:
    """Open the sources of a split; what is not tokenised is, first, by one process a node.

    Sources without a document in this split are left out where others have one.

    Raises:
        ValueError: a source cannot be opened, or none has a document.
    """
    opened = []
    empty = []
    for source in spec.sources:
        prefix, bad = prepared(source, spec, opening)
        documents = split_documents(count_documents(prefix), spec.split)[spec.part]
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
    return any(
        len(split_documents(count_documents(prefix), spec.split)[spec.part])
        for prefix, _ in (prepared(source, spec, opening) for source in spec.sources)
    )


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
    tokenizer = source.tokenizer or opening.tokenizer
    if tokenizer is None:
        raise ValueError(
            f"{spec.origin}: source '{source.name}' holds text, and the run's tokenizer is none "
            "that can read it: give the source a tokenizer, such as hf:PATH"
        )
    return prepare(
        source,
        tokenizer=tokenizer,
        folder=opening.cache_folder or cache_folder_of(source, spec),
        workers=opening.workers if opening.workers is not None else available_cpus(),
        say=opening.say,
    )


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
) -> OpenSource:
    long_sequence = source.long_sequence or opening.long_sequence
    table, reader = open_source(
        prefix,
        max_length=opening.max_length,
        long_sequence=long_sequence,
        documents=documents,
        cache_folder=opening.cache_folder,
        say=opening.say,
    )
    if kind_of(source) != "tokens":
        reader.hold()
    spans_path = f"{prefix}.spans"  # also of a pair that was prepared elsewhere
    spans = Spans(spans_path) if os.path.exists(spans_path) else None
    first_row, num_rows = _rows_of_split(source, table, opening.max_length, spec)
    return OpenSource(
        spec=source,
        prefix=prefix,
        table=table,
        reader=reader,
        spans=spans,
        long_sequence=long_sequence,
        bad=bad,
        first_row=first_row,
        num_rows=num_rows,
    )


def _rows_of_split(
    source: SourceSpec, table: SequenceTable, max_length: int, spec: MixtureSpec
) -> tuple[int, int]:
    """Return the first of the split's rows, and how many it has.

    Held-out sequences stand at the end. Of a document of which some are held out, training takes
    none.
    """
    held_out = spec.held_out.get(source.name, 0)
    if not held_out:
        return 0, len(table)
    border = len(table) - held_out
    if border > 0:
        start = int(table.starts(np.array([border]))[0])
        last = border - start // max_length  # pieces of the same document before it
    if border <= 0 or last <= 0:
        raise ValueError(
            f"{spec.origin}: validation takes {held_out:,} sequences of source '{source.name}', "
            f"which has {len(table):,}: expected fewer, so that training has some"
        )
    return (border, held_out) if spec.takes_held_out else (0, last)
