"""About how many tokens the records of a source have: some are decoded and counted, once a node.

What they come to lies in the folder of caches, so that a process that decodes nothing itself, as a
rank beside a data plane, need not decode these either.
"""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import xxhash

from megatron_hdp.arrays import Int64Array
from megatron_hdp.data.on_the_fly.decoder import Decoder
from megatron_hdp.data.on_the_fly.record_index import RecordIndex
from megatron_hdp.files import Say, locked, write_atomically

VERSION = 1
_NUM_RUNS, _RUN = 8, 32  # of neighbouring records: a table is read by parts
_WAIT_S = 120.0  # for another process that decodes them; longer than this takes anywhere


@dataclass(frozen=True)
class TextEstimate:
    """What a sample of records says of all of them."""

    num_sampled: int
    num_tokens: int
    """Of the sample; a record that is empty or bad has none."""
    num_trained: int
    """Of those the ones that are predicted with loss."""

    @property
    def mean_length(self) -> float:
        """Tokens of a record."""
        return self.num_tokens / self.num_sampled

    @property
    def mean_trained(self) -> float:
        """Tokens of a record that are predicted with loss."""
        return self.num_trained / self.num_sampled


def open_estimate(
    name: str,
    index: RecordIndex,
    decoder: Decoder,
    *,
    recipe: str,
    max_length: int,
    folder: Path,
    say: Say,
) -> TextEstimate:
    """Return the estimate of a source, which is the same in every process.

    One process of those that want it decodes the sample and keeps what it comes to; where that
    cannot be kept, which is said, each decodes it.

    Raises:
        ValueError: a file is damaged, for one.
    """
    rows = _sample(len(index))
    path = folder / f"estimate-{_key(index, recipe, max_length)}.json"
    found = _read(path, len(rows))
    if found is not None:
        return found
    trouble: OSError | None = None
    with ExitStack() as alone:
        try:
            os.makedirs(folder, exist_ok=True)
            lock = path.with_suffix(".lock")
            what = f"estimate of source {name}"
            alone.enter_context(locked(lock, what, say, patience_s=_WAIT_S))
        except OSError as error:  # a folder that is filled elsewhere and read-only here, for one
            trouble = error
        found = _read(path, len(rows)) or _counted(decoder, rows)
        if trouble is None:
            try:
                text = json.dumps({"estimate": asdict(found), "check": _check(found)})
                write_atomically(path, text.encode(), durable=True)
            except OSError as error:
                trouble = error
    if trouble is not None:
        say(
            f"source {name}: found no place for the estimate of its size ({trouble}), expected "
            f"one: every process decodes {len(rows)} records for it; make room, or name another "
            "folder with --data-cache-path"
        )
    return found


def _sample(num_records: int) -> Int64Array:
    """Return the numbers of some records, evenly spread; the same ones in every process."""
    last = max(0, num_records - _RUN)
    begins = [last * i // (_NUM_RUNS - 1) for i in range(_NUM_RUNS)]
    wanted = np.unique(np.concatenate([np.arange(begin, begin + _RUN) for begin in begins]))
    return wanted[wanted < num_records]


def _counted(decoder: Decoder, rows: Int64Array) -> TextEstimate:
    found = decoder.sample(rows)
    return TextEstimate(
        num_sampled=len(found),
        num_tokens=sum(len(one.tokens) for one in found),
        num_trained=sum(one.num_trained for one in found),
    )


def _key(index: RecordIndex, recipe: str, max_length: int) -> str:
    """Return what decides the estimate: the files, with samples of their text, and the recipe."""
    files = index.files
    parts = VERSION, recipe, max_length, files.outline(), files.times.tolist(), files.samples()
    return xxhash.xxh3_128_hexdigest(repr(parts).encode())


def _read(path: Path, num_sampled: int) -> TextEstimate | None:
    """Return what was written; None if it is not there, not to be read, or not whole."""
    try:
        said = json.loads(path.read_bytes())
        found = TextEstimate(**said["estimate"])
        is_whole = said["check"] == _check(found)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if is_whole and found.num_sampled == num_sampled else None


def _check(estimate: TextEstimate) -> str:
    return xxhash.xxh3_64_hexdigest(repr(estimate).encode())
