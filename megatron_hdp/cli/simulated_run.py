"""What ``simulate`` runs, from its flags, and what it found, as a table and as JSON."""

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_hdp.arrays import Int64Array
from megatron_hdp.cli.check import memory_bytes
from megatron_hdp.cli.checking import (
    cost_model_of,
    degree_refusals,
    encoder_of,
    job_of,
    preset_batch,
    run_setting,
    with_encoder,
)
from megatron_hdp.cli.lengths import PRESET, preset_of, read_lengths
from megatron_hdp.cli.shared.numbers import read_speeds
from megatron_hdp.cli.simulated_items import Encoding, patches_of
from megatron_hdp.megatron.options import cost_model_of_job, parse_arguments, tokenizer_of
from megatron_hdp.options import PLANNER_FLAGS
from megatron_hdp.simulator.execution import (
    Disturbance,
    Forecast,
    Machine,
    Run,
    Setting,
    read_changes,
)
from megatron_hdp.simulator.report import COLUMNS, Subject, cells
from megatron_hdp.simulator.units import aligned, stages_of

if TYPE_CHECKING:
    from megatron_hdp.megatron.options import TrainingArguments


def options_of(arguments: argparse.Namespace) -> "TrainingArguments":
    """The options of training that the configuration gives.

    Raises:
        ValueError: one of them cannot be used, or not here, or not with so many GPUs.
    """
    argv = [text for path in arguments.config for text in ("--config", path)]
    argv += ["--hybrid-data-parallel", *arguments.flags]
    if arguments.cost_model:
        argv += ["--hdp-cost-model", arguments.cost_model]
    options = parse_arguments(argv, needs_data=False)
    refusals = degree_refusals(options, arguments.gpus)
    if refusals:
        raise ValueError("; ".join(refusals))
    return options


def setting_of(
    arguments: argparse.Namespace, options: "TrainingArguments", slow: Mapping[int, float]
) -> Setting:
    """What all strategies share.

    Raises:
        ValueError: a file that cannot be used, or a rank that is none.
    """
    job = job_of(options, arguments.gpus)
    cost_model = cost_model_of(options, job)
    job = dataclasses.replace(job, runtime_bytes=cost_model.runtime_bytes or None)
    if (encoder := encoder_of(options)) is not None:
        job, _ = with_encoder(job, options, encoder, None)
    if arguments.rank_speeds:
        what = f"{arguments.gpus:,} GPUs' HDP ranks:"
        speeds = read_speeds(arguments.rank_speeds, job.hdp_ranks, what)
        cost_model = dataclasses.replace(cost_model, rank_speeds=speeds)
    for rank in slow:
        if rank >= job.hdp_ranks:
            raise ValueError(f"--slow {rank}: expected an HDP rank, 0 to {job.hdp_ranks - 1:,}")
    changes: dict[str, Any] = {"overlaps_sync": options.overlap_grad_reduce}
    if arguments.machine:
        changes |= read_changes(arguments.machine)
    return run_setting(
        options,
        job,
        cost_model,
        # reductions and pipelines have whole links, whatever channels rings have
        machine=Machine.of_job(job, cost_model_of_job(options, job), **changes),
        disturbance=Disturbance(noise=arguments.noise, slow=slow, seed=arguments.seed),
        flags=PLANNER_FLAGS,
    )


@dataclasses.dataclass(frozen=True)
class Batches:
    """The global batches of the steps that are run."""

    lengths: list[Int64Array]
    """Of each step's sequences."""
    notes: list[str]
    """What was done to get them."""
    items: list[Int64Array] = dataclasses.field(default_factory=list)
    """Patches of each step's pictures, pairs of frames or sounds; empty where nothing has any."""
    item_names: str = ""
    """What these are called."""


def batches_of(arguments: argparse.Namespace, options: "TrainingArguments") -> Batches:
    """The global batches of steps, drawn by the seed.

    Raises:
        ValueError: data that cannot be used, or ends before the steps.
    """
    steps, seed = arguments.steps, arguments.seed
    if arguments.hdp_data:
        if arguments.data:
            raise ValueError(
                f"found --data {arguments.data} and --hdp-data {arguments.hdp_data}, expected one "
                "of them: leave the other out"
            )
        return _of_mixture(arguments.hdp_data, options, steps, seed)
    source = arguments.data or f"{PRESET}github"
    if (name := preset_of("--data", source)) is None:
        return Batches(*_of_file(source, options, steps, seed))
    return Batches([preset_batch(options, name, seed + step) for step in range(steps)], [])


def _of_mixture(path: str, options: "TrainingArguments", steps: int, seed: int) -> Batches:
    """The first steps of a run on a mixture, as the run draws them."""
    from megatron_hdp.cli.data_commands.flags import drawing_of
    from megatron_hdp.data.mixture import BatchSize, Opening, read_data_file

    def say(line: str) -> None:
        print(f"megatron-hdp simulate: {line}", file=sys.stderr, flush=True)

    folder = options.data_cache_path
    opening = Opening(
        max_length=options.seq_length,
        long_sequence=options.long_documents,
        tokenizer=tokenizer_of(options),
        cache_folder=None if folder is None else Path(folder),
        say=say,
    )
    tokens = options.hdp_global_batch_tokens
    batch = BatchSize(None if tokens else options.global_batch_size or 1, tokens)
    spec = read_data_file(path, may_name_code=options.hdp_primitives).training
    drawing = drawing_of(spec, opening, batch, seed)
    drawn = list(drawing.steps(steps))
    if len(drawn) < steps:
        raise ValueError(
            f"--steps {steps:,}: every source of {path} has ended after {len(drawn):,} steps; "
            "expected as many as are run: give fewer"
        )
    items, notes, names = [], [], drawing.corpus.item_names
    if drawing.corpus.has_media and options.hdp_encoder is None:
        notes.append(f"{path} has {names}, and no --hdp-encoder says what they take")
    elif drawing.corpus.has_media:
        items = [patches_of(drawing.corpus, one) for one in drawn]
    return Batches([one.lengths for one in drawn], notes, items, names)


def _of_file(
    path: str, options: "TrainingArguments", steps: int, seed: int
) -> tuple[list[Int64Array], list[str]]:
    """Batches of whole sequences in an order drawn by the seed, again from the front at the end."""
    lengths, notes = _fitting(path, read_lengths(path), options)
    most_tokens, most = options.hdp_global_batch_tokens, options.global_batch_size or 1

    def batches() -> Iterator[Int64Array]:
        taken: list[int] = []
        tokens = 0
        for epoch in itertools.count():
            order = np.random.default_rng([seed, epoch]).permutation(len(lengths))
            for length in lengths[order].tolist():
                is_full = len(taken) == most
                if most_tokens is not None:
                    is_full = bool(taken) and tokens + length > most_tokens
                if is_full:
                    yield np.array(taken, dtype=np.int64)
                    taken, tokens = [], 0
                taken.append(length)
                tokens += length

    return list(itertools.islice(batches(), steps)), notes


def _fitting(
    path: str, lengths: Int64Array, options: "TrainingArguments"
) -> tuple[Int64Array, list[str]]:
    """What ``--hdp-long-sequence`` makes of sequences beyond the context, and a line that says it.

    Raises:
        ValueError: there are such sequences, and they are refused.
    """
    context, policy = options.seq_length, options.long_documents
    longest, num_longer = int(lengths.max()), int((lengths > context).sum())
    if not num_longer:
        return lengths, []
    what = f"{num_longer:,} of {len(lengths):,} sequences are longer than --seq-length {context:,}"
    if policy == "truncate":
        return np.minimum(lengths, context), [f"{what}: each is cut to it"]
    if policy == "error":
        raise ValueError(
            f"{path} has a sequence of {longest:,} tokens, expected at most --seq-length "
            f"{context:,}: set --hdp-long-sequence truncate or split"
        )
    pieces = -(-lengths // context)
    cut = np.full(int(pieces.sum()), context, dtype=np.int64)
    cut[np.cumsum(pieces) - 1] = lengths - (pieces - 1) * context
    num_pieces = len(cut) - len(lengths) + num_longer
    return cut, [f"{what}: they are split into {num_pieces:,} sequences"]


def headline(setting: Setting, batches: Sequence[Int64Array]) -> str:
    """One line on what is run."""
    tokens = np.mean([batch.sum() for batch in batches])
    return (
        f"{len(batches):,} steps of {tokens:,.0f} tokens (longest "
        f"{max(int(batch.max()) for batch in batches):,}) on {setting.num_gpus:,} GPUs: "
        f"{setting.ranks:,} HDP ranks of {setting.tokens_per_rank:,} tokens"
        f"{stages_of(setting.pipeline, ' and {} stages')}"
    )


def table(run: Run) -> str:
    """One row a strategy; below it, why one has none."""
    rows = [COLUMNS, *(cells(run, name) for name in run.outcomes)]
    reasons = {name: one.reason for name, one in run.outcomes.items() if one.reason is not None}
    notes = [f"  {name}: {reason}" for name, reason in reasons.items()]
    return "\n".join(aligned(rows) + notes)


def record(
    run: Run,
    arguments: argparse.Namespace,
    forecast: Forecast | None = None,
    encodings: Sequence[Encoding] = (),
) -> dict[str, Any]:
    """All figures; the same for the same flags."""
    further = {} if forecast is None else {"failures": forecast.figures()}
    if encodings:
        further["media"] = {one.balance: dataclasses.asdict(one) for one in encodings}
    return {
        "config": " ".join(arguments.config),
        "gpus": run.setting.num_gpus,
        "seed": run.seed,
        "strategies": {name: run.figures(name) for name in run.outcomes},
        **further,
    }


def subject_of(arguments: argparse.Namespace, options: "TrainingArguments") -> Subject:
    """What a report is about.

    Raises:
        ValueError: a size of memory that is none.
    """
    return Subject(
        config=" ".join([*arguments.config, *arguments.flags]),
        data=arguments.hdp_data or arguments.data or f"{PRESET}github",
        cost_model=str(options.hdp_cost_model) if options.hdp_cost_model else None,
        gpu_memory_bytes=memory_bytes("--gpu-memory", arguments.gpu_memory),
    )
