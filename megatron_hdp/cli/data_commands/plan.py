"""``megatron-hdp data plan``: draws a run's steps without training them."""

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

import orjson

from megatron_hdp.cli.data_commands import drawn_text
from megatron_hdp.cli.data_commands.drawn_steps import Forecast, Forecaster
from megatron_hdp.cli.data_commands.flags import check_outputs, opening_of, say
from megatron_hdp.data.index_file import IndexFile
from megatron_hdp.data.mixture import (
    BatchSize,
    Corpus,
    Mixture,
    MixtureSpec,
    Opening,
    open_corpus,
    prepared,
    read_data_file,
)
from megatron_hdp.data.spec import PrimitivesSpec
from megatron_hdp.exit_codes import ExitCode
from megatron_hdp.files import new_file

_SILENT_S = 1.0  # before a bar is shown
_ON_A_TERMINAL_S, _IN_A_LOG_S = 0.2, 10.0  # between two looks of it


def run(arguments: argparse.Namespace) -> int:
    """Draw, print and write."""
    check_outputs(arguments.output, (".json",), [arguments.data])
    spec = read_data_file(arguments.data).training
    if spec.primitives != PrimitivesSpec():
        say(f"the primitives of {arguments.data} are not called here: shares are the schedule's")
    seq_length = arguments.seq_length or _seq_length(spec, arguments)
    policy = arguments.hdp_long_sequence
    opening = opening_of(arguments, max_length=seq_length, long_sequence=policy)
    corpus = open_corpus(spec, opening)
    batch = BatchSize(arguments.global_batch_size, arguments.hdp_global_batch_tokens)
    mixture = corpus.mixture(corpus.orders(), batch, arguments.seed)
    found = drawn_text.Findings(
        corpus=corpus,
        forecast=drawn(corpus, mixture, arguments.steps),
        seq_length=seq_length,
        seed=arguments.seed,
        has_cache=arguments.data_cache_path is not None,
    )
    print(drawn_text.text(found))
    for path in arguments.output:
        raw = orjson.dumps(drawn_text.record(found), option=orjson.OPT_INDENT_2)
        with new_file(path, durable=False) as temporary:
            Path(temporary).write_bytes(raw)
        print(f"written to {path}")
    return ExitCode.DONE


def drawn(corpus: Corpus, mixture: Mixture, num_steps: int) -> Forecast:
    """Draw steps, with a bar where that takes long.

    Raises:
        ValueError: not one step can be drawn.
    """
    from tqdm import tqdm

    forecaster = Forecaster(corpus, mixture, num_steps)
    interval = _ON_A_TERMINAL_S if sys.stderr.isatty() else _IN_A_LOG_S
    how = {"desc": "steps drawn", "delay": _SILENT_S, "mininterval": interval}
    with tqdm(total=num_steps, **how) as bar:
        for _ in forecaster.steps():
            bar.update()
    forecast = forecaster.forecast()
    assert forecast.phases, "a source that has not begun has not ended"
    return forecast


def _seq_length(spec: MixtureSpec, arguments: argparse.Namespace) -> int:
    """Return a context length that cuts nothing which the schedule does not cut."""
    said = [one.max_length for one in spec.schedule.phases if one.max_length is not None]
    if spec.schedule.phases[0].max_length is not None:
        length, what = max(said), "the schedule's greatest max-length"
    else:
        for source in spec.sources:
            if source.tokenise == "on-the-fly":
                raise ValueError(
                    f"found no --seq-length, and source '{source.name}' is tokenised on the fly, "
                    "so that its longest text is not known: give --seq-length, or a max-length in "
                    "the schedule's first phase"
                )
        opening = opening_of(arguments, max_length=1)
        longest = max(_longest(prefix) for prefix in _prefixes(spec, opening))
        length, what = max([longest, *said]), "the longest document"
    say(f"--seq-length is not given: {length:,}, {what}")
    return length


def _prefixes(spec: MixtureSpec, opening: Opening) -> Iterable[str]:
    return (prepared(source, spec, opening)[0] for source in spec.sources)


def _longest(prefix: str) -> int:
    documents = IndexFile(f"{prefix}.idx").documents()
    return max((int(piece.lengths.max(initial=1)) for piece in documents), default=1)
