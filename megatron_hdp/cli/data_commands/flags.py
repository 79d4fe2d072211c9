"""From flags to sources: how they are opened, and what is said meanwhile."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_hdp.data.mixture import Opening


def opening_of(
    arguments: argparse.Namespace, *, max_length: int, long_sequence: str = "truncate"
) -> Opening:
    """Return how the flags want sources opened.

    Args:
        arguments: with those of text.
        max_length: tokens of the longest sequence.
        long_sequence: what happens to longer documents of sources that say nothing.
    """
    folder = arguments.data_cache_path
    return Opening(
        max_length=max_length,
        long_sequence=long_sequence,
        tokenizer=arguments.tokenizer,
        cache_folder=None if folder is None else Path(folder),
        workers=arguments.workers,
        say=say,
    )


def say(line: str) -> None:
    """Tell what happens, on standard error: what is asked for stands alone on the other."""
    print(f"megatron-hdp data: {line}", file=sys.stderr, flush=True)


def check_outputs(
    paths: Sequence[str],
    suffixes: Sequence[str],
    read: Sequence[str],
    *,
    written: Sequence[str] = (),
    flag: str = "--output",
) -> None:
    """Refuse files that cannot be written, before the work is done.

    Args:
        paths: what is to be written.
        suffixes: that names may end in.
        read: files that are inputs.
        written: files that another flag names.
        flag: that names these.

    Raises:
        ValueError: another suffix, a folder that is missing, a file named twice or one that is
            read.
    """
    seen = {os.path.realpath(path): "is read" for path in read}
    seen |= {os.path.realpath(path): "is written" for path in written}
    for path in paths:
        if os.path.splitext(path)[1] not in suffixes:
            raise ValueError(f"{flag} {path}: expected a name that ends in {', '.join(suffixes)}")
        if (known := seen.get(os.path.realpath(path))) is not None:
            raise ValueError(f"{flag} {path}: the file {known}, too: give another name")
        folder = os.path.dirname(path) or "."
        if not os.path.isdir(folder):
            raise ValueError(f"{flag} {path}: found no folder {folder}: make it, or give another")
        seen[os.path.realpath(path)] = "is written"
