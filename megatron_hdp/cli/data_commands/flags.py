"""From flags to sources: how they are opened, and what is said meanwhile."""

import argparse
import sys
from pathlib import Path

from megatron_hdp.data.mixture import (
    BatchSize,
    Corpus,
    Mixture,
    MixtureSpec,
    Opening,
    open_corpus,
)
from megatron_hdp.data.spec import PrimitivesSpec


def opening_of(
    arguments: argparse.Namespace, *, max_length: int, long_sequence: str = "truncate"
) -> Opening:
    """Return how the flags want sources opened.

    ``long_sequence`` happens to longer documents of sources that say nothing themselves.
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


def mixture_of(
    path: str, spec: MixtureSpec, opening: Opening, batch: BatchSize, seed: int
) -> tuple[Corpus, Mixture]:
    """The data of a file, and what draws a run's steps from it by the schedule alone."""
    if spec.primitives != PrimitivesSpec():
        opening.say(f"the primitives of {path} are not called here: shares are the schedule's")
    corpus = open_corpus(spec, opening)
    return corpus, corpus.mixture(corpus.orders(), batch, seed)
