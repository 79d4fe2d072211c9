"""What is written of each training step: metrics, a trace, a picture of its plan.

The same for this package's own loop and for Megatron-LM's, which writes its logs besides.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_hdp.megatron import parallel
from megatron_hdp.megatron.options import TrainingArguments, model_shape
from megatron_hdp.megatron.step import EvaluationLoss, HdpSteps, StepReport
from megatron_hdp.runtime.epochs import Epoch
from megatron_hdp.runtime.gpu_memory import runtime_bytes
from megatron_hdp.runtime.timeline import Span
from megatron_hdp.training.epochs_trace import EpochsTracer
from megatron_hdp.training.metrics import MetricsLogger, StepMetrics
from megatron_hdp.training.step_trace import StepTracer
from megatron_hdp.training.training_job import Steps


class StepOutputs:
    """Writes as the flags say; every rank makes the same calls.

    What a file of metrics holds of the first step and later ones is dropped. `tracer` is that of a
    job whose ranks come and go.
    """

    def __init__(
        self,
        arguments: TrainingArguments,
        steps: Steps,
        vocab_size: int,
        first_step: int,
        tracer: StepTracer | None = None,
    ) -> None:
        self._arguments = arguments
        self._steps = steps
        self._first_step = first_step
        self._shape = model_shape(arguments, vocab_size)  # padding counts no FLOP
        self._writes = parallel.is_first_rank()
        self._logger = MetricsLogger(
            arguments.metrics_path if self._writes else None,
            arguments.tensorboard_dir if self._writes else None,
            first_step=first_step,
        )
        self._to_validate: StepMetrics | None = None
        self._tracer = tracer
        folder, traced = arguments.hdp_trace, arguments.hdp_trace_steps
        if tracer is None and folder is not None and traced is not None:
            assert isinstance(steps, HdpSteps), "tracing without HDP is refused with the flags"
            self._tracer = StepTracer(folder, traced, steps)

    def begin_step(self, step: int) -> None:
        """A step begins, counted from 1; a step may begin again."""
        if self._tracer is not None:
            self._tracer.begin(step)

    def end_step(self, step: int) -> None:
        """It has ended and been timed, the optimizer's step included."""
        arguments = self._arguments
        if self._tracer is not None:
            self._tracer.end(step)
        if step == arguments.hdp_plot_step and arguments.hdp_plot_plan and self._writes:
            title = f"step {step}: {arguments.hdp_strategy}"
            self._steps.draw_plan(Path(arguments.hdp_plot_plan), title)
        if step == self._first_step and (found := runtime_bytes(parallel.compute_device())):
            size = f"{found / 1e9:.2f}GB"
            parallel.say(
                f"CUDA, libraries and NCCL hold {size} of a GPU at most beside PyTorch's memory: "
                f"megatron-hdp check --runtime-memory {size} counts with that"
            )

    def write(
        self,
        report: StepReport,
        *,
        validation: EvaluationLoss | None = None,
        to_validate: Sequence[str] | None = None,
        **figures: Any,
    ) -> StepMetrics:
        """Writes the metrics of a step that has ended, and returns them.

        Where sources are `to_validate`, `add_validation_loss` will complete them. `figures` are
        what else `StepMetrics.of_report` takes.
        """
        metrics = StepMetrics.of_report(
            report,
            model_flops=report.encoder_flop
            + self._shape.flops_of_sums(
                report.tokens, report.squared_tokens, report.seen_in_window
            ),
            num_ranks=dist.get_world_size(),
            **figures,
        )
        if validation is not None:
            metrics = metrics.validated(validation)
        self._logger.write(metrics, to_validate=to_validate)
        self._to_validate = None if to_validate is None else metrics
        return metrics

    def add_validation_loss(self, found: EvaluationLoss) -> None:
        """Completes the latest step's metrics, once, if that was said when they were written."""
        if self._to_validate is not None:
            self._logger.complete(self._to_validate.validated(found))
            self._to_validate = None

    def close(self) -> None:
        """No step follows."""
        self._logger.close()


class RunOutputs:
    """Makes the outputs of each epoch of a run, over which its trace continues."""

    def __init__(self, arguments: TrainingArguments) -> None:
        self._arguments = arguments
        self._tracer: EpochsTracer | None = None

    def enter(
        self, epoch: Epoch, member: int, traced: HdpSteps, step: int, recovery: list[Span]
    ) -> None:
        """Lets the trace, if there is one, hold how this rank has come into an epoch.

        Every rank of a job whose ranks come and go must call this.

        Args:
            epoch: the one that begins.
            member: this process.
            traced: the epoch's steps.
            step: the one that all are behind.
            recovery: this rank's way, the latest end last.
        """
        folder, steps = self._arguments.hdp_trace, self._arguments.hdp_trace_steps
        if folder is None or steps is None:
            return
        if self._tracer is None:
            self._tracer = EpochsTracer(folder, steps, traced, member)
        self._tracer.enter(epoch, traced, step, recovery)

    def begin(self, steps: Steps, vocab_size: int, first_step: int) -> StepOutputs:
        """The outputs of an epoch, see `StepOutputs`."""
        return StepOutputs(self._arguments, steps, vocab_size, first_step, self._tracer)
