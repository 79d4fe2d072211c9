"""The number of sequences of each step, from Megatron's flags; `OptionError` if they give none."""

from __future__ import annotations

from math import ceil
from typing import Any

from megatron_hdp.megatron.options.arguments import TrainingArguments
from megatron_hdp.options import OptionError

Growth = tuple[tuple[int, int], ...]
"""Pairs (sequences drawn before, sequences of a step from then on), from 0; one size if empty."""

_SUFFIXES = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def growth_of(args: TrainingArguments) -> Growth:
    """How the global batch grows: by sequences drawn, never by ranks."""
    growing = [
        flag
        for flag, value in (
            ("--rampup-batch-size", args.rampup_batch_size),
            ("--step-batch-size-schedule", args.step_batch_size_schedule),
            ("--hdp-global-batch-tokens", args.hdp_global_batch_tokens),
        )
        if value
    ]
    if len(growing) > 1:
        raise OptionError(
            f"found {' and '.join(growing)}, expected one of them: leave the others out"
        )
    if args.step_batch_size_schedule:
        return _steps(args.step_batch_size_schedule, args.seq_length)
    if not args.rampup_batch_size:
        return ()
    if len(args.rampup_batch_size) != 3 or args.global_batch_size is None:
        raise OptionError(
            f"--rampup-batch-size: found {args.rampup_batch_size}, expected three numbers (first "
            "size, increment, sequences until the last size) and "
            "--global-batch-size"
        )
    start, increment, over = args.rampup_batch_size
    return ramp(start, increment, over, args.global_batch_size)


def ramp(start: int, increment: int, over: int, size: int) -> Growth:
    """Even growth, by Megatron's rule for ``--rampup-batch-size``.

    Args:
        start: sequences of the first step.
        increment: how many more at a time.
        over: sequences after which the last size is reached.
        size: the last size; increments lead to it from the first one.
    """
    rest = size - start
    if min(start, increment) < 1 or over < 0 or rest < 0 or rest % increment:
        raise OptionError(
            f"--rampup-batch-size {start} {increment} {over}: found increments of {increment} "
            f"that do not lead from {start} to --global-batch-size {size}, expected a whole number "
            "of increments: change one of the numbers"
        )
    num_steps = rest // increment
    if not num_steps or not over:
        return ()
    apart = over / num_steps
    growth = {0: start}
    for step in range(1, num_steps + 1):
        # the first count whose quotient reaches the step, as Megatron divides
        near = max(0, ceil(step * apart) - 1)
        first = next(count for count in range(near, near + 3) if int(count / apart) >= step)
        growth[first] = start + step * increment
    return tuple(growth.items())


def _steps(text: str, seq_length: int) -> Growth:
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
    found.sort()
    starts = [start for start, _ in found]
    if not found or starts[0] != 0 or starts != sorted(set(starts)) or min(found)[1] < 1:
        raise OptionError(
            f"--step-batch-size-schedule: found these pairs of sequences and size: {found}, "
            f"expected sizes of at least 1, the first pair at 0 and the others in ascending order "
            f"({seq_length} tokens count as a sequence): 0:8 250M:16"
        )
    return tuple(found)


def _number(text: str) -> int:
    text = text.strip().upper()
    factor = _SUFFIXES.get(text[-1:], 1)
    return int(float(text.rstrip("KMBT")) * factor)


def sequences_of(args: Any) -> int | None:
    """The last size in sequences that the flags, ours or Megatron's, give, if any."""
    if args.global_batch_size is None and getattr(args, "step_batch_size_schedule", None):
        return _steps(args.step_batch_size_schedule, args.seq_length)[-1][1]
    return args.global_batch_size  # type: ignore[no-any-return]


def check_batch_size(args: TrainingArguments) -> None:
    """Checks these flags together."""
    if args.hybrid_data_parallel:
        growth_of(args)
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
