"""A run of Megatron-LM's training loop under HDP: forward, backward and data are HDP's.

Optimizer, schedule, logs, timers, checkpoints, evaluation and the rerun machine stay Megatron's.
The loop asks for a forward-and-backward function and for data iterators; it gets those of
`LmRun`. Its iterators carry no data: HDP reads a step's slices by itself, at the position that
Megatron keeps in its arguments and checkpoints (``consumed_train_samples``).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import (
    get_current_global_batch_size,
    get_num_microbatches,
)
from megatron.core.rerun_state_machine import RerunDataIterator, get_rerun_state_machine
from megatron.core.transformer.moe.moe_utils import save_to_aux_losses_tracker

from megatron_hdp.data.mixture import SPLITS, Corpus, Position
from megatron_hdp.megatron.execution import HdpExecutor
from megatron_hdp.megatron.lm import checkpoint, options
from megatron_hdp.megatron.lm.log import LmLog
from megatron_hdp.megatron.lm.pretrain_job import PretrainJob
from megatron_hdp.megatron.lm.validation_sets import ValidationSets
from megatron_hdp.megatron.model import HdpRouter
from megatron_hdp.megatron.options import TrainingArguments, model_shape
from megatron_hdp.megatron.parallel import compute_device, say
from megatron_hdp.megatron.step import (
    EvaluationLoss,
    HdpSteps,
    Reference,
    ReferenceSums,
    StepReport,
    StepsLeft,
    batch_size_of,
    build_executor,
    cost_model_of,
    has_documents,
    join_data_plane,
    open_split,
    split_specs,
)
from megatron_hdp.planner import CostModel
from megatron_hdp.runtime.epochs import Epoch
from megatron_hdp.runtime.host_to_device import numbers_to_device
from megatron_hdp.runtime.timeline import Span

_SPIKY = 10  # the factor of Megatron's pretrain_gpt


class StepOutputs(Protocol):
    """What is written of each step besides Megatron's logs; every rank makes the same calls."""

    def begin_step(self, step: int) -> None:
        """A step begins, counted from 1; a step may begin again."""

    def end_step(self, step: int) -> None:
        """It has ended and been timed, the optimizer's step included."""

    def write(
        self, report: StepReport, *, to_validate: Sequence[str] | None = None, **figures: Any
    ) -> Any:
        """Writes the metrics of a step that has ended.

        With sources `to_validate` an evaluation follows, whose losses complete them.
        """

    def add_validation_loss(self, found: EvaluationLoss) -> None:
        """Completes the metrics of the latest step, if they wait for that."""

    def close(self) -> None:
        """No step follows."""


class RunOutputs(Protocol):
    """What is written in a run, over all of its epochs."""

    def enter(
        self, epoch: Epoch, member: int, traced: HdpSteps, step: int, recovery: list[Span]
    ) -> None:
        """This rank has come into an epoch, behind a step; every rank must call this."""

    def begin(self, steps: HdpSteps, vocab_size: int, first_step: int) -> StepOutputs:
        """Of an epoch's training steps, the tokenizer's size and the step that runs next."""


class LmRun:
    """What one process keeps from its first step to its last."""

    def __init__(
        self,
        args: argparse.Namespace,
        vocab_size: int,
        job: PretrainJob,
        make_outputs: Callable[[TrainingArguments], RunOutputs],
        joins: bool = False,
    ) -> None:
        """Opens the data.

        Args:
            args: Megatron's, validated.
            vocab_size: entries of Megatron's tokenizer; greater token ids are corrupt.
            job: of this process, begun.
            make_outputs: makes what is written besides Megatron's logs, of the run's arguments.
            joins: a job that trains, whose next epoch begins with `enter`.
        """
        self.args = args
        self.arguments = options.training_arguments(args)
        self.vocab_size = vocab_size
        self.specs = split_specs(self.arguments)
        self.order = checkpoint.order_of_run(args, self.arguments)
        checkpoint.remember(self.order, args)
        shape = model_shape(self.arguments, args.padded_vocab_size)
        self.log = LmLog(args, shape.linear_share)
        self._job = job
        self.outputs = make_outputs(self.arguments)
        self._outputs: StepOutputs | None = None
        self._router_losses: RouterLosses | None = None
        self._began_at = 0.0
        self._num_tested = 0
        self._following = 0
        self._no_sync: Any = None
        self.done: StepReport | None = None
        """Of a training step that is gone through, but was done before, see `LmSurvival`."""
        names, self.validation_sets = args.hdp_validation_sets, None
        if names is not None and "valid" in self.specs:  # --multiple-validation-sets
            self.validation_sets = ValidationSets(self._names("valid"), names)
        self._validated: list[StepReport] = []
        self._evaluation: EvaluationLoss | None = None
        self._executor: HdpExecutor | None = None
        self._reference: Reference | None = None
        self._cost_model: CostModel | None = None
        self._plane = None if joins else join_data_plane(self.arguments)
        self._is_interrupted = False
        self._steps: dict[str, HdpSteps] = {}
        self._corpora: dict[str, Corpus] = {}
        self._positions: dict[str, dict[int, Position]] = {}
        """By split and Megatron's count of consumed samples: where its latest step began, which may
        run again, and where the next one does."""

    def data_iterators(self) -> list[RerunDataIterator | None]:
        """Iterators of the three splits: they name a split and hold no data.

        With virtual stages Megatron asks for them once for each model chunk. Sets what its loop
        reads of its arguments: whether to train, validate and test.
        """
        args = self.args
        wanted = {
            "train": not args.skip_train and args.train_iters > 0,
            "valid": args.eval_iters > 0 and self._has_documents("valid"),
            "test": args.eval_iters > 0 and self._has_documents("test"),
        }
        args.do_train, args.do_valid, args.do_test = (int(wanted[one]) for one in SPLITS)
        return [RerunDataIterator(_Split(one)) if wanted[one] else None for one in SPLITS]

    def forward_backward(
        self,
        *,
        data_iterator: RerunDataIterator | list[RerunDataIterator],
        model: list[Any],
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
        **_: Any,
    ) -> list[dict[str, torch.Tensor]]:
        """One global batch, in the place of Megatron's schedule.

        With virtual stages `data_iterator` is a list, one of `data_iterators` for each chunk.

        Returns:
            The batch's loss as Megatron's loop wants it from one micro-batch: float64 ``[2]``, the
            sum and the tokens, each divided by the ranks over which Megatron adds them up.
        """
        if collect_non_loss_data:
            raise ValueError(
                "found a process_non_loss_data_func, expected none, because HDP collects the loss "
                "alone: leave it out"
            )
        first = data_iterator[0] if isinstance(data_iterator, list) else data_iterator
        split = first.iterable.name
        steps = self._of_split(split, model)
        is_training = split == "train" and not forward_only
        if is_training:
            self._begin_step(steps, model)
        count = self._count(split)
        position = self._position(split, count)
        self._refer(split, steps, position)
        done = self.done if is_training else None
        report = steps.run(position, forward_only) if done is None else done
        following = count + self._size(split, count)
        self._positions[split] = {count: position, following: report.position_after}
        self._validate(report)
        if split == "train":
            self._following = following
            self.log.add(report)
        elif split == "test":
            self._num_tested = following
        else:
            checkpoint.remember_position(self.args, split, report.position_after)
            self._add_validation(report)
        assert self._executor is not None
        ranks = self._executor.place.num_hdp_ranks
        values = [report.loss * report.loss_tokens, report.loss_tokens]
        sums = numbers_to_device(values, torch.float64, compute_device())
        return [{"lm loss": sums / ranks}]

    def prepare_log(self) -> None:
        """Call before Megatron logs a step: hands the routers' losses to its log."""
        report = self.log.latest
        if self.arguments.hdp_survive:  # Megatron counts by the ranks that there are
            self.args.consumed_train_samples = self._following
        if self._router_losses is not None and report is not None and self.args.num_experts:
            num_layers = self.args.num_layers + (self.arguments.mtp_num_layers or 0)
            self._router_losses.log(report.tokens, num_layers)

    def end_step(self, step: int, grad_norm: float | None, learning_rate: float) -> None:
        """Call when Megatron has logged a step, counted from 1, before another one begins."""
        report = self.log.latest
        if report is None or self._outputs is None:
            return
        consumed_tokens = checkpoint.count_tokens(self.args, report.tokens)
        checkpoint.remember_position(self.args, "train", report.position_after)
        self._end_with_the_data(step, report.position_after)
        self._job.timeline.settle()
        seconds, args = time.perf_counter() - self._began_at, self.args
        # Megatron's loop evaluates after it has logged the step
        is_validated = args.do_valid and args.eval_interval and step % args.eval_interval == 0
        self._outputs.end_step(step)
        self._outputs.write(
            report,
            to_validate=self._names("valid") if is_validated else None,
            step=step,
            seconds=seconds,
            grad_norm=float(grad_norm or 0.0),
            learning_rate=learning_rate,
            consumed_tokens=consumed_tokens,
        )

    def take_evaluation(self) -> EvaluationLoss | None:
        """The losses of a validation that has ended since the latest call, if one has."""
        found, self._evaluation = self._evaluation, None
        return found

    def steps(self, chunks: list[Any]) -> HdpSteps:
        """The training steps; the first call of an epoch builds them, on every rank."""
        return self._of_split("train", chunks)

    def reference_sums(self) -> ReferenceSums | None:
        """What the reference of a loss of preferences has said; None where it was not asked."""
        return None if self._reference is None else self._reference.sums

    def take_reference(self, held: ReferenceSums | None) -> None:
        """In another epoch of the job, see `Reference.enter`; once there are steps."""
        if self._reference is not None and self.arguments.hdp_objective is not None:
            self._reference.enter(held)

    def interrupt(self) -> None:
        """From any thread: who waits for a data plane raises, until this rank has left."""
        self._is_interrupted = True
        for steps in list(self._steps.values()):
            steps.loaders.interrupt()

    def leave(self) -> None:
        """Lets go of all that is bound to groups, and of positions; `enter` takes the next ones."""
        for steps in self._steps.values():
            steps.close()
        if self._plane is not None:
            self._plane.end()
            self._plane = None
        self._is_interrupted = False
        self._steps, self._positions = {}, {}
        self._validated.clear()
        self._executor = self._cost_model = self._router_losses = self.done = None
        if self._outputs is not None:
            self._outputs.close()
            self._outputs = None

    def enter(self, executor: HdpExecutor) -> None:
        """Takes the executor of an epoch, before Megatron's loop sets what it wants of a model."""
        self._use(executor)
        self._plane = join_data_plane(self.arguments, is_late=True)
        # Megatron's loop wants to set it itself
        self._no_sync, executor._config.no_sync_func = executor._config.no_sync_func, None

    def close(self) -> None:
        """Ends the preparation of steps that will not run, and closes what was written."""
        plane, self._plane = self._plane, None
        self.leave()
        if plane is not None:
            plane.close()

    def _refer(self, split: str, steps: HdpSteps, position: Position) -> None:
        """Before training, and before each evaluation, the reference says what it needs of them."""
        if steps.preferences is None:
            return
        is_first = not self._validated if split == "valid" else steps.latest is None
        if is_first:
            of_all = {"train": self.args.train_iters - self.args.curr_iteration}
            count = of_all.get(split, self.args.eval_iters)
            assert self._reference is not None, "it is there with the steps"
            self._reference.add([StepsLeft(steps, position, count)])

    def _begin_step(self, steps: HdpSteps, chunks: list[Any]) -> None:
        step = self.args.curr_iteration + 1
        if self._outputs is None:
            self._outputs = self.outputs.begin(steps, self.vocab_size, step)
            self._router_losses = RouterLosses(chunks)
        assert self._router_losses is not None and self._executor is not None
        if self._no_sync is not None:
            config = self._executor._config
            config.no_sync_func, self._no_sync = self._no_sync, None
            config.grad_sync_func = None
        self._validated.clear()
        self._job.begin_step(step)
        self._router_losses.begin_step()
        if self.done is None:
            self._outputs.begin_step(step)
        self._began_at = time.perf_counter()

    def _names(self, split: str) -> list[str]:
        """The sources of a split, in the order in which the data name them."""
        return [one.name for one in self.specs[split].sources]

    def _add_validation(self, report: StepReport) -> None:
        """Notes a batch of an evaluation; the last one completes the metrics of the step before."""
        self._validated.append(report)
        if len(self._validated) < self.args.eval_iters:
            return
        self._evaluation = found = EvaluationLoss.of(self._validated)
        self._validated.clear()
        if self._outputs is not None:
            self._outputs.add_validation_loss(found)

    def _end_with_the_data(self, step: int, position: Position) -> None:
        """Lets Megatron's loop save and end after this step if no data are left."""
        if self._steps["train"].is_over(position) and step < self.args.train_iters:
            say(f"every source of the data has ended: the job ends after iteration {step}")
            self.args.exit_interval = step

    def _count(self, split: str) -> int:
        """Megatron's count of consumed samples."""
        if split == "test":
            return self._num_tested
        return int(getattr(self.args, f"consumed_{split}_samples"))

    def _size(self, split: str, count: int) -> int:
        """Sequences of the step that follows `count` samples, by which Megatron counts on."""
        size = batch_size_of(self.arguments, split).at(count)
        assert size is not None, "Megatron counts sequences"
        if split == "train" and size != get_current_global_batch_size():
            raise ValueError(
                f"found {get_current_global_batch_size()} samples in Megatron's batch after "
                f"{count}, expected {size} by --rampup-batch-size or --step-batch-size-schedule"
            )
        return size

    def _position(self, split: str, count: int) -> Position:
        """Where the step begins that follows `count` samples."""
        known = self._positions.get(split, {}).get(count)
        if known is not None:
            return known
        if count == 0:
            return Position()
        saved = checkpoint.position_of(self.args, split)
        if saved is not None and (saved.sequences == count or split == "train"):
            return saved
        names = self._corpus(split).names
        if len(names) == 1:  # older releases counted only samples
            steps = count // self.args.global_batch_size
            return Position.of_one_source(names[0], count, steps=steps)
        if split == "train":
            raise ValueError(
                f"found {count:,} consumed samples and no record of where the run was in its data, "
                "expected one from --load: add --finetune to begin at step 0"
            )
        return Position()  # an evaluation may begin anew

    def _has_documents(self, split: str) -> bool:
        return split in self.specs and has_documents(self.arguments, self.specs[split])

    def _of_split(self, split: str, chunks: list[Any]) -> HdpSteps:
        """The split's steps; the first call builds what needs the model, on every rank."""
        if self._executor is None or self._cost_model is None:
            with torch.enable_grad():  # kernels are tried, though the first step may evaluate
                self._use(build_executor(self.arguments, chunks, self._job.timeline))
            assert self._executor is not None and self._cost_model is not None
            self._executor._config.grad_sync_func = None  # a step reduces once, after the last one
        if self._reference is None:
            arguments = options.with_paths(self.arguments, self.args)
            self._reference = Reference(arguments, chunks, checksums=False)
        if split not in self._steps:
            self._steps[split] = HdpSteps(
                self.arguments,
                self._executor,
                self._cost_model,
                self._corpus(split),
                self.vocab_size,
                split=split,
                plane=self._plane,
            )
            if self._is_interrupted:  # by who has not seen it
                self._steps[split].loaders.interrupt()
            self._steps[split].follow(self.order)
            for line in self._steps[split].describe(f"in split {split}"):
                say(line)
        return self._steps[split]

    def _use(self, executor: HdpExecutor) -> None:
        self._executor, self._cost_model = executor, cost_model_of(self.arguments, executor)

    def _corpus(self, split: str) -> Corpus:
        if split == "train":
            return checkpoint.training_corpus(self.arguments)
        if split not in self._corpora:
            self._corpora[split] = open_split(self.arguments, self.specs[split])
        return self._corpora[split]

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


class RouterLosses:
    """What the routers of this rank's model chunks added to the loss of a step, for the log."""

    def __init__(self, chunks: Sequence[torch.nn.Module]) -> None:
        self._routers = [
            one for chunk in chunks for one in chunk.modules() if isinstance(one, HdpRouter)
        ]

    def begin_step(self) -> None:
        """Forgets what was noted before."""
        for router in self._routers:
            router.losses.clear()

    def log(self, num_tokens: int, num_layers: int) -> None:
        """Puts means over tokens where Megatron's log looks for them; every rank must call this.

        Padding is no token, MTP layers are layers.
        """
        # Megatron divides by its own number of micro-batches of a step
        scale = get_num_microbatches() / max(num_tokens, 1)
        for router in self._routers:
            for name, value in sorted(router.losses.items()):
                total = self._over_ranks(router, value) * scale
                save_to_aux_losses_tracker(name, total, router.layer_number, num_layers)
        self.begin_step()

    def _over_ranks(self, router: Any, value: torch.Tensor) -> torch.Tensor:
        total = value.to(compute_device(), torch.float32)
        dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
        if router.config.sequence_parallel:  # else tensor-parallel ranks see the same tokens
            dist.all_reduce(total, group=parallel_state.get_tensor_model_parallel_group())
        return total


class _Split:
    """A placeholder for Megatron's iterator over data."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __next__(self) -> Any:
        raise TypeError("under hybrid data parallelism Megatron's loop must not draw data itself")
