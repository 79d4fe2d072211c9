"""The training loop: the same for hybrid data parallelism and for stock Megatron-Core.

It names no Megatron symbol; what differs between the two is in the steps it is given.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, fields

from megatron_hdp.data.mixture import Position
from megatron_hdp.megatron import parallel
from megatron_hdp.megatron.checkpoint.state import Progress
from megatron_hdp.megatron.execution import make_parameters_whole
from megatron_hdp.megatron.options import TrainingArguments
from megatron_hdp.megatron.step import (
    EvaluationLoss,
    HdpSteps,
    NonFiniteError,
    Reference,
    StepReport,
    StepsLeft,
    non_finite_parameters,
)
from megatron_hdp.options import flag_of
from megatron_hdp.runtime.health import Heartbeat, StopSignals, fingerprint, require_agreement
from megatron_hdp.runtime.timeline import AGREEMENT, CHECKPOINT, OPTIMIZER, START, Timeline
from megatron_hdp.training.metrics import StepMetrics, log_line
from megatron_hdp.training.step_outputs import StepOutputs
from megatron_hdp.training.training_job import TrainingJob, build_training_job


def pretrain(arguments: TrainingArguments) -> list[StepMetrics]:
    """Trains as `arguments` say, in a job that was joined; returns every step's metrics.

    SIGTERM, SIGUSR1 or Ctrl-C to any rank ends it after the step, with a checkpoint; before the
    first step, without one.

    Raises:
        NonFiniteError: the loss or a gradient is NaN or infinite; on every rank, with weights as
            before the step.
        RankFailure: communication failed; names the rank to blame.
    """
    timeline, signals = Timeline(), StopSignals()
    heartbeat = Heartbeat.of_job(
        timeline,
        stall_timeout_s=arguments.stall_timeout_seconds,
        slow_timeout_s=60.0 * arguments.distributed_timeout_minutes,
        asked_to_end=signals.received,
    )
    # a signal must not cut short who is to blame
    with signals, heartbeat, ExitStack() as ending:
        with timeline.span(START):
            require_same_arguments(arguments)
            parallel.initialise(arguments)
            parallel.set_seeds(arguments.seed)
            job = build_training_job(arguments, timeline)
            ending.enter_context(closing(job.checkpoints))
            progress = job.load()
        Reference(arguments, job.chunks, checksums=arguments.checkpoint_checksums).add(
            steps_left(job, progress),
            lambda: signals.agreed(parallel.compute_device()) is not None,
        )
        records = _train(job, progress, heartbeat, signals)
        with timeline.span(CHECKPOINT):
            job.checkpoints.finish()
    parallel.finish()
    return records


def steps_left(job: TrainingJob, progress: Progress) -> list[StepsLeft]:
    """Of training, and of one evaluation, which begins anew each time."""
    arguments = job.arguments
    left = arguments.train_iters - progress.iteration
    given = [
        (job.training, progress.position, left),
        (job.validation, Position(), arguments.eval_iters),
    ]
    return [
        StepsLeft(steps, position, count)
        for steps, position, count in given
        if isinstance(steps, HdpSteps)
    ]


def _train(
    job: TrainingJob, progress: Progress, heartbeat: Heartbeat, signals: StopSignals
) -> list[StepMetrics]:
    """Runs the steps that are left, or until a signal; returns their metrics."""
    arguments = job.arguments
    records = []
    first_step = progress.iteration + 1
    with (
        closing(job),
        closing(StepOutputs(arguments, job.training, job.vocab_size, first_step)) as outputs,
    ):
        stop = signals.agreed(parallel.compute_device())
        if stop is not None:
            parallel.say(f"{stop.name} received: the job ends before its first step")
        while not is_done(job, progress) and stop is None:
            heartbeat.begin_step(progress.iteration + 1)
            metrics, progress = _train_step(job, outputs, progress)
            records.append(metrics)
            if metrics.step % arguments.log_interval == 0:
                parallel.say(log_line(metrics, arguments.train_iters))
            stop = signals.agreed(parallel.compute_device())
            save_if_due(job, progress, stop)
        if stop is None and progress.iteration < arguments.train_iters:
            parallel.say(
                "every source of the data has ended: the job ends after iteration "
                f"{progress.iteration} of {arguments.train_iters}"
            )
    return records


def require_same_arguments(arguments: TrainingArguments) -> None:
    """Stops a job whose ranks were started with different flags; paths may differ."""
    facts = {
        flag_of(item.name): fingerprint(getattr(arguments, item.name))
        for item in fields(arguments)
        if item.name != "data_path" and "Path" not in str(item.type)
    }
    require_agreement(facts, parallel.compute_device())


@dataclass(frozen=True)
class StepDone:
    """A step whose gradients the optimizer has applied, before anything was said of it."""

    report: StepReport
    step: int
    learning_rate: float
    grad_norm: float
    consumed_tokens: int
    seconds: float

    def progress(self) -> Progress:
        """How far training has come by it."""
        return Progress(self.step, self.report.position_after, self.consumed_tokens)


def _train_step(
    job: TrainingJob, outputs: StepOutputs, progress: Progress
) -> tuple[StepMetrics, Progress]:
    started = time.perf_counter()
    report = gradients_of_step(job, outputs, progress)
    require_finite(job, progress, report)
    done = apply_step(job, progress, report, started)
    outputs.end_step(done.step)
    return write_step(job, outputs, done), done.progress()


def gradients_of_step(job: TrainingJob, outputs: StepOutputs, progress: Progress) -> StepReport:
    """Runs the next step, and leaves its gradients, summed over all ranks."""
    step = progress.iteration + 1
    outputs.begin_step(step)
    for chunk in job.chunks:
        chunk.zero_grad_buffer()
    job.optimizer.zero_grad()
    return job.training.run(progress.position)


def require_finite(job: TrainingJob, progress: Progress, report: StepReport) -> None:
    """The vote: whoever passes it has seen that all ranks have whole and finite gradients.

    Raises:
        NonFiniteError: on every rank: the loss or a gradient is not.
    """
    step = progress.iteration + 1
    _require_finite_loss(report, f"step {step}")
    _require_finite_gradients(job, report, step)


def apply_step(
    job: TrainingJob, progress: Progress, report: StepReport, started: float
) -> StepDone:
    """Lets the optimizer apply a step's gradients; `started` is when the step was."""
    learning_rate = job.optimizer.param_groups[0]["lr"]
    with job.timeline.span(OPTIMIZER):
        _, grad_norm, _ = job.optimizer.step()
    job.scheduler.step(increment=1)
    job.timeline.settle()
    return StepDone(
        report=report,
        step=progress.iteration + 1,
        learning_rate=learning_rate,
        grad_norm=float(grad_norm),
        consumed_tokens=progress.consumed_tokens + report.tokens,
        seconds=time.perf_counter() - started,
    )


def write_step(job: TrainingJob, outputs: StepOutputs, done: StepDone) -> StepMetrics:
    """Evaluates if that is due, and writes the metrics of a step."""
    return outputs.write(
        done.report,
        step=done.step,
        grad_norm=done.grad_norm,
        learning_rate=done.learning_rate,
        consumed_tokens=done.consumed_tokens,
        seconds=done.seconds,
        validation=validate(job, done.step),
    )


def validate(job: TrainingJob, step: int) -> EvaluationLoss | None:
    """Mean loss over `eval_iters` validation batches, on the steps that are due."""
    arguments = job.arguments
    if job.validation is None or step % arguments.eval_interval:
        return None
    make_parameters_whole(job.chunks)
    for chunk in job.chunks:
        chunk.eval()
    position, reports = Position(), []
    for batch in range(arguments.eval_iters):
        report = job.validation.run(position, forward_only=True)
        _require_finite_loss(report, f"batch {batch + 1} of the validation after step {step}")
        position = report.position_after
        reports.append(report)
    for chunk in job.chunks:
        chunk.train()
    return EvaluationLoss.of(reports)


def _require_finite_loss(report: StepReport, what: str) -> None:
    """Raises on every rank if the loss is NaN or infinite, before anything comes of it."""
    if report.non_finite or not math.isfinite(report.loss):
        raise _non_finite(f"the loss of {what} is {report.loss}", report.non_finite)


def _require_finite_gradients(job: TrainingJob, report: StepReport, step: int) -> None:
    """Raises on every rank if a gradient is NaN or infinite, before the optimizer sees it."""
    with job.timeline.noted(AGREEMENT):
        parameters = non_finite_parameters(job.chunks)
        if not parameters:
            return
        where = job.training.non_finite_gradients()
    raise _non_finite(
        f"the gradient of step {step}, whose loss is {report.loss}, is NaN or infinite, first in "
        f"{', '.join(parameters)}",
        where,
    )


def _non_finite(what: str, where: Sequence[str]) -> NonFiniteError:
    remedy = "resume from the last checkpoint with a lower --lr"
    if where:
        remedy = "\n  ".join([f"look at these documents, or {remedy}", *where])
    return NonFiniteError(
        f"{what}: expected finite numbers. The job stops and saves nothing: {remedy}"
    )


def is_done(job: TrainingJob, progress: Progress) -> bool:
    """Whether no step follows."""
    if progress.iteration >= job.arguments.train_iters:
        return True
    return job.training.is_over(progress.position)


def save_if_due(job: TrainingJob, progress: Progress, stop: signal.Signals | None) -> None:
    """Saves behind steps that are due, behind the last one, and what is owed."""
    arguments, iteration = job.arguments, progress.iteration
    if stop is not None:
        place = "without --save, nothing is saved" if arguments.save is None else "saving first"
        parallel.say(f"{stop.name} received: the job ends after iteration {iteration}, {place}")
    last = stop is not None or is_done(job, progress)
    due = arguments.save_interval and iteration % arguments.save_interval == 0
    with job.timeline.span(CHECKPOINT):
        job.checkpoints.poll()
        if last or due or job.checkpoints.is_owed:
            make_parameters_whole(job.chunks)
            job.checkpoints.save(progress)
