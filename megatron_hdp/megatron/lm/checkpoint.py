"""HDP's part of Megatron-LM's checkpoints: order of the data, tokens, writers that end.

Megatron saves its arguments in every checkpoint and compares some of them when it loads one. The
order of the data and the tokens consumed so far lie among them.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator
from contextlib import contextmanager

from megatron_hdp.data import DataOrder
from megatron_hdp.data.mixture import Corpus, Position, position_of_run
from megatron_hdp.megatron import step
from megatron_hdp.megatron.checkpoint import write_results
from megatron_hdp.megatron.options import TrainingArguments
from megatron_hdp.megatron.parallel import say
from megatron_hdp.options import OptionError
from megatron_hdp.processes import bound_to_this_process

_ORDER = "hdp_data_order"
_TOKENS = "hdp_consumed_tokens"
_POSITIONS = "hdp_data_positions"


@contextmanager
def saving() -> Iterator[None]:
    """Within the block, what Megatron starts to write a checkpoint ends with this process.

    Its writers report through a file. So there is no server process for their reports, a second
    copy of the script that Megatron spawns, ends by SIGTERM and lets print its stack.
    """
    with write_results.through_a_file(), bound_to_this_process():
        yield


@functools.cache
def training_corpus(arguments: TrainingArguments) -> Corpus:
    """The data of the training steps, opened once."""
    return step.open_split(arguments, step.split_specs(arguments)["train"])


def data_order(arguments: TrainingArguments) -> DataOrder:
    """What decides which sequences form the training steps; reads no token."""
    return step.data_order(arguments, training_corpus(arguments), {})


def remember(order: DataOrder, args: argparse.Namespace) -> None:
    """Puts the order of the data where Megatron's checkpoints take it along."""
    setattr(args, _ORDER, order.to_record())


def order_of_run(args: argparse.Namespace, arguments: TrainingArguments) -> DataOrder:
    """The order that this run draws in: the loaded checkpoint's, or that of runs that begin now."""
    remembered = getattr(args, _ORDER, None)
    return data_order(arguments) if remembered is None else DataOrder.from_record(remembered)


def remember_position(args: argparse.Namespace, split: str, position: Position) -> None:
    """Puts where a split's next step begins where Megatron's checkpoints take it along."""
    positions = {**getattr(args, _POSITIONS, {}), split: position.to_record()}
    setattr(args, _POSITIONS, positions)


def position_of(args: argparse.Namespace, split: str) -> Position | None:
    """Where a split's next step begins; None where nothing was drawn yet."""
    record = getattr(args, _POSITIONS, {}).get(split)
    return None if record is None else Position.from_record(record)


def count_tokens(args: argparse.Namespace, num_tokens: int) -> int:
    """Adds a step's tokens to those consumed since the start of training; returns the sum."""
    total = getattr(args, _TOKENS, 0) + num_tokens
    setattr(args, _TOKENS, total)
    return int(total)


def restore_tokens(args: argparse.Namespace, saved: argparse.Namespace) -> None:
    """Resumes the count of tokens of the run that saved the checkpoint."""
    setattr(args, _TOKENS, getattr(saved, _TOKENS, 0))


def continue_order(
    args: argparse.Namespace, arguments: TrainingArguments | None, saved: argparse.Namespace
) -> None:
    """Resumes the order of the data that a checkpoint's run began with, or refuses to.

    Args:
        args: Megatron's.
        arguments: HDP's of this run, None without the flag.
        saved: Megatron's arguments from the checkpoint.
    """
    source, before = f"--load {args.load}", getattr(saved, _ORDER, None)
    drawn = getattr(saved, "consumed_train_samples", 0)  # none by weights that no run has saved
    if before is None and (arguments is None or not drawn):
        return
    if arguments is None or before is None:
        found, expected = ("with", "without") if before is None else ("without", "with")
        raise OptionError(
            f"{source}: found a run {found} --hybrid-data-parallel, expected one {expected} it, "
            "like the run that saved the checkpoint: the order of the data differs, so sequences "
            "would repeat and be skipped. Add --finetune to start at step 0 from its weights alone"
        )
    try:
        resumed = data_order(arguments).continuing(DataOrder.from_record(before), source)
    except ValueError as error:
        raise OptionError(str(error)) from None
    for line in resumed.announcements():
        say(line)
    remember(resumed.order, args)
    samples = saved.consumed_train_samples
    records = getattr(saved, _POSITIONS, {})
    for split in {"train", *records}:
        position = position_of_run(
            records.get(split),
            resumed,
            samples // saved.global_batch_size,
            samples,
            getattr(saved, _TOKENS, 0),
        )
        remember_position(args, split, position)
