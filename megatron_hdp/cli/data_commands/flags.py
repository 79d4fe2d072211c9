"""From flags to sources: how they are opened, and what is said meanwhile."""

import argparse
import sys
from pathlib import Path

from megatron_hdp.cli.data_commands.drawn_steps import Drawing
from megatron_hdp.data.mixture import BatchSize, MixtureSpec, Opening, open_corpus
from megatron_hdp.data.steps import untrained_weights


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


def drawing_of(spec: MixtureSpec, opening: Opening, batch: BatchSize, seed: int) -> Drawing:
    """The data of a file, and what draws a run's steps from it.

    Raises:
        ValueError: the data cannot be opened, or steps depend on what only a run knows.
    """
    spec.tell_code(opening.say)
    corpus = open_corpus(spec, opening)
    weights_at = untrained_weights(spec.primitives, corpus.schedule, corpus.names)
    return Drawing(corpus, corpus.mixture(corpus.orders(), batch, seed), weights_at)
