"""A run of Megatron-LM's training loop under HDP: forward, backward and data are HDP's.

Optimizer, schedule, logs, timers, checkpoints, evaluation and the rerun machine stay Megatron's.
The loop asks for a forward-and-backward function and for data iterators; it gets those of
`LmRun`. Its iterators carry no data: HDP reads a step's slices by itself, at the position that
Megatron keeps in its arguments and checkpoints (``consumed_train_samples``).
"""

from __future__ import annotations

import argparse
import atexit
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any

import torch
from megatron.core.rerun_state_machine import RerunDataIterator, get_rerun_state_machine

from megatron_hdp.data import TokenFile, split_documents
from megatron_hdp.megatron import lm_checkpoint, lm_options
from megatron_hdp.megatron.executor import HdpExecutor
from megatron_hdp.megatron.hdp_setup import build_executor, cost_model_of
from megatron_hdp.megatron.hdp_steps import HdpSteps
from megatron_hdp.megatron.parallel import compute_device, say
from megatron_hdp.megatron.step_report import StepFigures, StepReport
from megatron_hdp.planner import CostModel
from megatron_hdp.runtime.timeline import Timeline

Flops = Callable[[argparse.Namespace, int], float]
_SPLITS = ("train", "valid", "test")
_SPIKY = 10  # the factor of Megatron's pretrain_gpt


class LmRun:
    """What one process keeps from its first step to its last."""

    def __init__(self, args: argparse.Namespace, vocab_size: int) -> None:
        """Opens the data.

        Args:
            args: Megatron's, validated.
            vocab_size: entries of Megatron's tokenizer; greater token ids are corrupt.
        """
        self.args = args
        self.arguments = lm_options.training_arguments(args)
        self.vocab_size = vocab_size
        self.token_file = TokenFile(self.arguments.data_path[0])
        parts = split_documents(len(self.token_file.lengths), self.arguments.split)
        self.documents = dict(zip(_SPLITS, parts, strict=True))
        lm_checkpoint.remember(lm_checkpoint.data_order(self.arguments), args)
        self.since_log: list[StepReport] = []
        """Reports of the steps since the last line of Megatron's log."""
        self.in_log = False
        self._num_tested = 0
        self._executor: HdpExecutor | None = None
        self._cost_model: CostModel | None = None
        self._steps: dict[str, HdpSteps] = {}
        atexit.register(self.close)

    def data_iterators(self) -> list[RerunDataIterator | None]:
        """Iterators of the three splits: they name a split and hold no data.

        Sets what Megatron's loop reads of its arguments: whether to train, validate and test.
        """
        args = self.args
        wanted = {
            "train": not args.skip_train and args.train_iters > 0,
            "valid": args.eval_iters > 0 and len(self.documents["valid"]) > 0,
            "test": args.eval_iters > 0 and len(self.documents["test"]) > 0,
        }
        args.do_train, args.do_valid, args.do_test = (int(wanted[one]) for one in _SPLITS)
        return [RerunDataIterator(_Split(one)) if wanted[one] else None for one in _SPLITS]

    def forward_backward(
        self,
        *,
        data_iterator: RerunDataIterator,
        model: list[Any],
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
        **_: Any,
    ) -> list[dict[str, torch.Tensor]]:
        """One global batch, in the place of Megatron's schedule.

        Args:
            data_iterator: one of `data_iterators`.
            model: Megatron's chunks of this rank, one.
            forward_only: evaluation.
            collect_non_loss_data: must be False.

        Returns:
            The batch's loss as Megatron's loop wants it from one micro-batch: float64 ``[2]``, the
            sum and the tokens, each divided by the ranks over which Megatron adds them up.
        """
        if collect_non_loss_data:
            raise ValueError("HDP collects no data but the loss: leave process_non_loss_data_func")
        split = data_iterator.iterable.name
        start_param_gather(model[0])
        report = self._of_split(split, model[0]).run(self._position(split), forward_only)
        self._validate(report)
        if split == "train":
            if self.since_log and self.since_log[-1].consumed_after == report.consumed_after:
                self.since_log.pop()  # the rerun machine runs the same step again
            self.since_log.append(report)
        elif split == "test":
            self._num_tested = report.consumed_after
        assert self._executor is not None
        ranks = self._executor.place.num_hdp_ranks
        sums = torch.tensor(
            [report.loss * report.loss_tokens, report.loss_tokens],
            dtype=torch.float64,
            device=compute_device(),
        )
        return [{"lm loss": sums / ranks}]

    def flops(self, stock: Flops, batch_size: int) -> float:
        """Operations of the latest step, or in Megatron's log of the mean step since the last one.

        Args:
            stock: Megatron's function of arguments and batch size, for sequences of equal length.
            batch_size: what Megatron takes a step to be; before the first step it is all there is.
        """
        if not self.since_log:
            return stock(self.args, batch_size)
        steps = self.since_log if self.in_log else self.since_log[-1:]
        tokens = sum(one.tokens for one in steps) / len(steps)
        squared_tokens = sum(one.squared_tokens for one in steps) / len(steps)
        return operations(stock, self.args, tokens, squared_tokens)

    def log(self, iteration: int, scalars: Iterable[Callable[[str, float], None]]) -> None:
        """Writes the latest step's figures of HDP.

        Args:
            iteration: Megatron's number of the step, from 1.
            scalars: Megatron's writers, as functions of name and value.
        """
        if not self.since_log:
            return
        figures = {
            item.name.replace("_", "-"): value
            for item in fields(StepFigures)
            if item.name != "loss" and (value := getattr(self.since_log[-1], item.name)) is not None
        }
        for write in scalars:
            for name, value in figures.items():
                write(f"hdp/{name}", value)
        if iteration % self.args.log_interval == 0:
            say(_line(iteration, self.since_log[-1]))

    def close(self) -> None:
        """Ends the preparation of steps that will not run."""
        for steps in self._steps.values():
            steps.close()
        self._steps = {}

    def _position(self, split: str) -> int:
        if split == "test":
            return self._num_tested
        return int(getattr(self.args, f"consumed_{split}_samples"))

    def _of_split(self, split: str, model: Any) -> HdpSteps:
        """The split's steps; the first call builds what needs the model, on all ranks alike."""
        if self._executor is None or self._cost_model is None:
            self._executor = build_executor(self.arguments, model, Timeline())
            self._executor._config.grad_sync_func = None  # a step reduces once, after the last one
            model.ddp_config.align_param_gather = True  # gathered by `start_param_gather` alone
            self._cost_model = cost_model_of(self.arguments, self._executor)
        if split not in self._steps:
            self._steps[split] = HdpSteps(
                self.arguments,
                self._executor,
                self._cost_model,
                self.token_file,
                self.documents[split],
                self.vocab_size,
            )
            table = self._steps[split].table
            say(
                f"hybrid data parallelism over {self._executor.place.num_hdp_ranks} ranks, "
                f"{len(table):,} sequences in split {split} (documents: {table.num_empty:,} empty "
                f"and skipped, {table.num_truncated:,} truncated, {table.num_split:,} split)"
            )
        return self._steps[split]

    def _validate(self, report: StepReport) -> None:
        """Hands the loss to Megatron's rerun machine, as its pretrain_gpt does."""
        machine, loss = get_rerun_state_machine(), torch.tensor(report.loss)
        for words in report.non_finite:
            say(words)
        if self.args.check_for_nan_in_loss_and_grad:
            for reject, what in ((torch.isnan, "NaN"), (torch.isinf, "Inf")):
                machine.validate_result(
                    result=loss,
                    rejection_func=reject,
                    message=f"found {what} in the loss of the global batch",
                    tolerance=0.0,
                    fatal=True,
                )
        if self.args.check_for_spiky_loss:
            machine.validate_result(
                result=loss,
                rejection_func=lambda value: machine.is_unexpectedly_large(
                    value, threshold=_SPIKY, context="loss"
                ),
                message="Spiky loss",
                tolerance=0.0,
                fatal=False,
            )


def start_param_gather(model: Any) -> None:
    """Starts to gather what the distributed optimizer has updated, with ``--overlap-param-gather``.

    Megatron starts each bucket's gathering when the forward pass has got to the one before. Ranks
    whose first micro-batches are in different rings would wait for each other: one in a ring for
    the other's slice, that one for a bucket that the first has not got to. So all start here, where
    no rank waits for a ring yet; the forward pass waits for each bucket where it needs it.

    Args:
        model: Megatron's DDP; its hooks are off where its parameters are whole already.
    """
    if not model.use_forward_hook or not model.remove_forward_pre_hook_handles:
        return
    for group in model.bucket_groups + model.expert_parallel_bucket_groups:
        if not group.param_gather_dispatched:
            group.start_param_sync()


def operations(
    stock: Flops, args: argparse.Namespace, tokens: float, squared_tokens: float
) -> float:
    """Megatron's formula for sequences of different lengths: it is ``a L + b L^2`` in the length.

    Args:
        stock: the formula, a function of arguments and number of sequences of ``seq_length``.
        args: Megatron's arguments.
        tokens: sum of the sequences' lengths.
        squared_tokens: sum of their squares.
    """

    def of_one(length: int) -> float:
        return stock(argparse.Namespace(**{**vars(args), "seq_length": length}), 1)

    short, long = 1024, 2048
    squared = (of_one(long) / long - of_one(short) / short) / (long - short)
    linear = of_one(short) / short - squared * short
    return linear * tokens + squared * squared_tokens


class _Split:
    """Stands where Megatron expects an iterator over data."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __next__(self) -> Any:
        raise TypeError("under hybrid data parallelism Megatron's loop draws no data by itself")


def _line(iteration: int, report: StepReport) -> str:
    return (
        f" hybrid data parallelism, iteration {iteration}: {report.sequences:,} sequences | "
        f"{report.tokens:,} tokens | planned efficiency: {report.planned_efficiency:.3f} | "
        f"measured efficiency: {report.measured_efficiency:.3f} | micro-batches: "
        f"{report.micro_batches_min}-{report.micro_batches_max} | ring traffic (MB): "
        f"{(report.ring_bytes or 0) / 1e6:.1f} | planning (ms): {report.planning_ms:.2f} | exposed "
        f"planning (ms): {report.planning_exposed_ms:.2f} |"
    )
