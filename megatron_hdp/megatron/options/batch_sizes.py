"""How many sequences each step of a run has, as Megatron's flags say."""

from __future__ import annotations

from typing import Any

from megatron_hdp.data.mixture import BatchSize, ramp
from megatron_hdp.megatron.options.arguments import TrainingArguments
from megatron_hdp.options import OptionError

_SUFFIXES = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def batch_size_of(args: TrainingArguments, split: str = "train") -> BatchSize:
    """The size of a step of a split of the data.

    It is a function of the sequences that were drawn before the step, never of the ranks.

    Raises:
        OptionError: the flags say none, or two.
    """
    size, tokens = args.global_batch_size, args.hdp_global_batch_tokens
    if split != "train":
        if args.eval_global_batch_size:
            return BatchSize(args.eval_global_batch_size)
        trained = batch_size_of(args)
        return BatchSize(trained.sequences, trained.tokens)
    growing = [
        flag
        for flag, value in (
            ("--rampup-batch-size", args.rampup_batch_size),
            ("--step-batch-size-schedule", args.step_batch_size_schedule),
        )
        if value
    ]
    if not growing:
        return BatchSize(size, tokens)
    if len(growing) > 1 or tokens is not None:
        found = [*growing, *(["--hdp-global-batch-tokens"] if tokens is not None else [])]
        raise OptionError(
            f"found {' and '.join(found)}, expected one of them: leave the others out"
        )
    try:
        if args.step_batch_size_schedule:
            growth = _steps(args.step_batch_size_schedule, args.seq_length)
            return BatchSize(growth[-1][1], growth=growth)
        return _ramp(args.rampup_batch_size, size)
    except ValueError as error:
        raise OptionError(str(error)) from None


def _ramp(numbers: tuple[int, ...], size: int | None) -> BatchSize:
    if len(numbers) != 3 or size is None:
        raise OptionError(
            f"--rampup-batch-size: found {numbers}, expected three numbers (the first size, by how "
            "much it grows at a time, sequences until the last size) and --global-batch-size"
        )
    start, increment, over = numbers
    return ramp(start, increment, over, size)


def _steps(text: str, seq_length: int) -> tuple[tuple[int, int], ...]:
    """Sizes from sequences on, written ``FROM:SIZE ...``; FROM counts `seq_length` tokens each."""
    found = []
    for entry in text.replace(",", " ").split():
        start, _, size = entry.partition(":")
        try:
            found.append((_number(start) // seq_length, _number(size)))
        except (ValueError, OverflowError):
            raise OptionError(
                f"--step-batch-size-schedule: found {entry!r}, expected FROM:SIZE, like 250M:512"
            ) from None
    if not found:
        raise OptionError("--step-batch-size-schedule: found nothing, expected FROM:SIZE, like 0:8")
    return tuple(sorted(found))


def _number(text: str) -> int:
    text = text.strip().upper()
    factor = _SUFFIXES.get(text[-1:], 1)
    return int(float(text.rstrip("KMBT")) * factor)


def sequences_of(args: Any) -> int | None:
    """The last size in sequences that flags of `TrainingArguments` or Megatron's say, if any."""
    if args.global_batch_size is None and getattr(args, "step_batch_size_schedule", None):
        return _steps(args.step_batch_size_schedule, args.seq_length)[-1][1]
    return args.global_batch_size  # type: ignore[no-any-return]


def check_batch_size(args: TrainingArguments) -> None:
    """Checks these flags together.

    Raises:
        OptionError: what was found, what was expected and the remedy.
    """
    if args.hybrid_data_parallel:
        batch_size_of(args)
        if args.step_batch_size_schedule and args.global_batch_size is not None:
            raise OptionError(
                "found both --step-batch-size-schedule and --global-batch-size, expected one of "
                "them: leave the other out"
            )
        return
    for flag, value in (
        ("--rampup-batch-size", args.rampup_batch_size),
        ("--step-batch-size-schedule", args.step_batch_size_schedule),
        ("--eval-global-batch-size", args.eval_global_batch_size),
    ):
        if value:
            raise OptionError(
                f"{flag} goes with --hybrid-data-parallel in this command: add it, or train with "
                "Megatron-LM's script"
            )
