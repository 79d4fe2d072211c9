"""``megatron-hdp data plan``: draws a run's steps without training them."""

import argparse
from collections.abc import Iterable

from megatron_hdp.cli.data_commands import drawn_text
from megatron_hdp.cli.data_commands.drawn_steps import Drawing, StepItems, forecast
from megatron_hdp.cli.data_commands.flags import drawing_of, opening_of, say
from megatron_hdp.cli.shared.outputs import check_outputs, steps_bar, write_json
from megatron_hdp.data.index_file import IndexFile
from megatron_hdp.data.mixture import (
    BatchSize,
    MixtureSpec,
    Opening,
    prepared,
    read_data_file,
)
from megatron_hdp.exit_codes import ExitCode
from megatron_hdp.files import new_file


def run(arguments: argparse.Namespace) -> int:
    """Draw, print and write."""
    outputs = [("--output", path) for path in arguments.output]
    outputs += [("--items", arguments.items)] if arguments.items else []
    check_outputs(outputs, [("the data file", arguments.data)], {"--output": (".json",)})
    spec = read_data_file(arguments.data, may_name_code=arguments.hdp_primitives).training
    seq_length = arguments.seq_length or _seq_length(spec, arguments)
    policy, num_steps = arguments.hdp_long_sequence, arguments.steps
    policy = "error" if policy == "stream" else policy
    opening = opening_of(arguments, max_length=seq_length, long_sequence=policy)
    batch = BatchSize(arguments.global_batch_size, arguments.hdp_global_batch_tokens)
    drawing = drawing_of(spec, opening, batch, arguments.seed)
    with steps_bar("steps drawn", num_steps) as bar:
        drawn = forecast(drawing, num_steps, bar.update)
    found = drawn_text.Findings(
        corpus=drawing.corpus,
        forecast=drawn,
        seq_length=seq_length,
        seed=arguments.seed,
        has_cache=arguments.data_cache_path is not None,
    )
    print(drawn_text.text(found))
    for path in arguments.output:
        write_json(path, drawn_text.record(found))
    if arguments.items is not None:
        _write_sizes(arguments.items, drawing, num_steps)
    return ExitCode.DONE


def _write_sizes(path: str, drawing: Drawing, num_steps: int) -> None:
    """Write what ``plan --items`` and ``check --items`` read."""
    if not drawing.corpus.has_media:
        raise ValueError(
            f"--items {path}: found no source with media, expected one: leave --items out"
        )
    with new_file(path, durable=False) as temporary, open(temporary, "w") as file:
        for step in drawing.steps(num_steps):
            found = StepItems.of(drawing.corpus, step)
            for size in found.sizes.tolist():
                file.write(" ".join(map(str, size if size[-1] > 1 else size[:-1])) + "\n")
    print(f"sizes of {drawing.corpus.item_names} written to {path}")


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
            if source.media is not None:
                raise ValueError(
                    f"found no --seq-length, and source '{source.name}' has media, whose rows are "
                    "more than what is stored: give --seq-length, or a max-length in the "
                    "schedule's first phase"
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
