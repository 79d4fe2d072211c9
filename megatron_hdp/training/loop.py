"""The training loop: the same for hybrid data parallelism and for stock Megatron-Core.

It names no Megatron symbol; what differs between the two is in the steps it is given.
"""

from __future__ import annotations

import math
import signal
import time
from contextlib import closing
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

from megatron_hdp.data import DataOrder, TokenFile, Tokenizer, build_tokenizer, split_documents
from megatron_hdp.megatron import parallel
from megatron_hdp.megatron.arguments import TrainingArguments
from megatron_hdp.megatron.checkpoint import Checkpoints, Progress, TrainingState
from megatron_hdp.megatron.hdp_steps import HdpSteps, build_executor, cost_model_of
from megatron_hdp.megatron.model import build_gpt
from megatron_hdp.megatron.non_finite import NonFiniteLossError
from megatron_hdp.megatron.optimizer import build_optimizer, build_scheduler
from megatron_hdp.megatron.step_report import StepReport
from megatron_hdp.megatron.stock_steps import StockSteps, build_datasets
from megatron_hdp.options import flag_of
from megatron_hdp.runtime.agreement import fingerprint, require_agreement
from megatron_hdp.runtime.heartbeat import Heartbeat
from megatron_hdp.runtime.signals import StopSignals
from megatron_hdp.runtime.timeline import CHECKPOINT, OPTIMIZER, START, Timeline
from megatron_hdp.training.flops import ModelFlops
from megatron_hdp.training.metrics import MetricsLogger, StepMetrics, log_line
from megatron_hdp.training.tracer import StepTracer

_TOKENIZER_PREFIX = {"HuggingFaceTokenizer": "hf:", "TikTokenizer": "tiktoken:"}


class Steps(Protocol):
    """What runs one step over one split of the data: HDP's or stock Megatron's."""

    order: DataOrder

    def run(self, consumed: int, forward_only: bool = False) -> StepReport:
        """Runs the step that begins after `consumed` sequences."""
        ...

    def draw_plan(self, path: Path, title: str) -> None:
        """Draws the latest step's plan."""
        ...

    def close(self) -> None:
        """Ends what prepares steps that will not run."""
        ...


@dataclass
class _Job:
    """Everything that a run holds."""

    arguments: TrainingArguments
    timeline: Timeline
    model: Any
    optimizer: Any
    scheduler: Any
    training: Steps
    validation: Steps | None
    checkpoints: Checkpoints
    flops: ModelFlops
    tracer: StepTracer | None

    def close(self) -> None:
        self.training.close()
        if self.validation is not None:
            self.validation.close()


def pretrain(arguments: TrainingArguments) -> list[StepMetrics]:
    """Trains as `arguments` say, in a job that was joined; returns every step's metrics.

    SIGTERM or SIGUSR1 to any rank ends it after the step, with a checkpoint.

    Raises:
        NonFiniteLossError: the loss is NaN or infinite; on every rank, weights as before the step.
        RankFailure: communication failed; names the rank to blame.
    """
    timeline = Timeline()
    heartbeat = Heartbeat.of_job(
        timeline,
        stall_timeout_s=arguments.stall_timeout_seconds,
        slow_timeout_s=60.0 * arguments.distributed_timeout_minutes,
    )
    with StopSignals() as signals, heartbeat:  # a signal must not cut short who is to blame
        with timeline.span(START):
            _require_same_arguments(arguments)
            parallel.initialise(arguments)
            parallel.set_seeds(arguments.seed)
            job = _build(arguments, timeline)
            progress = job.checkpoints.load()
        records = _train(job, progress, heartbeat, signals)
        with timeline.span(CHECKPOINT):
            job.checkpoints.finish()
    parallel.finish()
    return records


def _train(
    job: _Job, progress: Progress, heartbeat: Heartbeat, signals: StopSignals
) -> list[StepMetrics]:
    """Runs the steps that are left, or until a signal; returns their metrics."""
    arguments = job.arguments
    writes = dist.get_rank() == 0
    records = []
    with (
        closing(job),
        MetricsLogger(
            arguments.metrics_path if writes else None,
            arguments.tensorboard_dir if writes else None,
            first_step=progress.iteration + 1,
        ) as logger,
    ):
        stop = None
        while progress.iteration < arguments.train_iters and stop is None:
            heartbeat.begin_step(progress.iteration + 1)
            metrics, progress = _train_step(job, progress)
            records.append(metrics)
            logger.write(metrics)
            if metrics.step % arguments.log_interval == 0:
                _say(log_line(metrics, arguments.train_iters))
            stop = signals.agreed(parallel.compute_device())
            _save_if_due(job, progress, stop)
    return records


def _require_same_arguments(arguments: TrainingArguments) -> None:
    """Stops a job whose ranks were started with different flags; paths may differ."""
    facts = {
        flag_of(item.name): fingerprint(getattr(arguments, item.name))
        for item in fields(arguments)
        if item.name != "data_path" and "Path" not in str(item.type)
    }
    require_agreement(facts, parallel.compute_device())


def _build(arguments: TrainingArguments, timeline: Timeline) -> _Job:
    model_name = arguments.tokenizer_model or ""
    prefix = _TOKENIZER_PREFIX.get(arguments.tokenizer_type)
    tokenizer = build_tokenizer(prefix + model_name if prefix else arguments.tokenizer_type)
    model = build_gpt(arguments, tokenizer.vocab_size)
    optimizer = build_optimizer(arguments, model)
    scheduler = build_scheduler(arguments, optimizer)
    if arguments.hybrid_data_parallel:
        training, validation = _hdp_steps(arguments, model, tokenizer, timeline)
    else:
        training, validation = _stock_steps(arguments, model, tokenizer)
    state = TrainingState(model, optimizer, scheduler)
    return _Job(
        arguments=arguments,
        timeline=timeline,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        training=training,
        validation=validation,
        checkpoints=Checkpoints(arguments, state, training.order, _say),
        flops=ModelFlops.of_model(arguments, tokenizer.vocab_size),
        tracer=_build_tracer(arguments, training),
    )


def _hdp_steps(
    arguments: TrainingArguments, model: Any, tokenizer: Tokenizer, timeline: Timeline
) -> tuple[Steps, Steps | None]:
    token_file = TokenFile(arguments.data_path[0])
    train, valid, _ = split_documents(len(token_file.lengths), arguments.split)
    cost_model = cost_model_of(arguments, parallel.num_parameters(model))
    executor = build_executor(arguments, model, timeline)

    def steps(documents: range) -> HdpSteps:
        return HdpSteps(
            arguments, executor, cost_model, token_file, documents, tokenizer.vocab_size
        )

    training = steps(train)
    table = training.table
    _say(
        f"hybrid data parallelism over {parallel.num_hdp_ranks()} ranks, {len(table):,} sequences "
        f"to train on (documents: {table.num_empty:,} empty and skipped, {table.num_truncated:,} "
        f"truncated, {table.num_split:,} split)"
    )
    return training, steps(valid) if arguments.eval_iters else None


def _stock_steps(
    arguments: TrainingArguments, model: Any, tokenizer: Tokenizer
) -> tuple[Steps, Steps | None]:
    batch = arguments.global_batch_size or (parallel.num_hdp_ranks() * arguments.micro_batch_size)
    samples = (batch * arguments.train_iters, batch * arguments.eval_iters)
    train, valid = build_datasets(arguments, tokenizer, samples)
    validation = StockSteps(arguments, model, valid) if arguments.eval_iters else None
    return StockSteps(arguments, model, train), validation


def _build_tracer(arguments: TrainingArguments, training: Steps) -> StepTracer | None:
    if arguments.hdp_trace is None or arguments.hdp_trace_steps is None:
        return None
    assert isinstance(training, HdpSteps), "tracing without HDP is refused with the flags"
    return StepTracer(arguments.hdp_trace, arguments.hdp_trace_steps, training)


def _train_step(job: _Job, progress: Progress) -> tuple[StepMetrics, Progress]:
    arguments = job.arguments
    step = progress.iteration + 1
    if job.tracer is not None:
        job.tracer.begin(step)
    started = time.perf_counter()
    job.model.zero_grad_buffer()
    job.optimizer.zero_grad()
    report = job.training.run(progress.consumed_sequences)
    _require_finite(report, f"step {step}")
    learning_rate = job.optimizer.param_groups[0]["lr"]
    with job.timeline.span(OPTIMIZER):
        _, grad_norm, _ = job.optimizer.step()
    job.scheduler.step(increment=1)
    seconds = time.perf_counter() - started
    if job.tracer is not None:
        job.tracer.end(step)
    if step == arguments.hdp_plot_step and arguments.hdp_plot_plan and dist.get_rank() == 0:
        title = f"step {step}: {arguments.hdp_strategy}"
        job.training.draw_plan(Path(arguments.hdp_plot_plan), title)
    metrics = StepMetrics.of_report(
        report,
        step=step,
        grad_norm=float(grad_norm),
        learning_rate=learning_rate,
        consumed_tokens=progress.consumed_tokens + report.tokens,
        seconds=seconds,
        model_flops=job.flops.of_batch(report.tokens, report.squared_tokens),
        num_ranks=dist.get_world_size(),
        validation_loss=_validate(job, step),
    )
    return metrics, Progress(step, report.consumed_after, metrics.consumed_tokens)


def _validate(job: _Job, step: int) -> float | None:
    """Mean loss over `eval_iters` validation batches, on the steps that are due."""
    arguments = job.arguments
    if job.validation is None or step % arguments.eval_interval:
        return None
    job.model.eval()
    consumed, loss_sum, loss_tokens = 0, 0.0, 0
    for batch in range(arguments.eval_iters):
        report = job.validation.run(consumed, forward_only=True)
        _require_finite(report, f"batch {batch + 1} of the validation after step {step}")
        consumed = report.consumed_after
        loss_sum += report.loss * report.loss_tokens
        loss_tokens += report.loss_tokens
    job.model.train()
    return loss_sum / max(loss_tokens, 1)


def _require_finite(report: StepReport, what: str) -> None:
    """Raises on every rank if the loss is NaN or infinite, before anything comes of it."""
    if report.non_finite or not math.isfinite(report.loss):
        where = "\n  ".join(["", *report.non_finite])
        raise NonFiniteLossError(
            f"the loss of {what} is {report.loss}, expected a finite number. The job stops "
            "and saves nothing: look at these documents, or go on from the last checkpoint with a "
            f"lower --lr{where}"
        )


def _save_if_due(job: _Job, progress: Progress, stop: signal.Signals | None) -> None:
    arguments, iteration = job.arguments, progress.iteration
    if stop is not None:
        place = "without --save, nothing is saved" if arguments.save is None else "saving first"
        _say(f"{stop.name} received: the job ends after iteration {iteration}, {place}")
    last = stop is not None or iteration == arguments.train_iters
    due = arguments.save_interval and iteration % arguments.save_interval == 0
    with job.timeline.span(CHECKPOINT):
        job.checkpoints.poll()
        if last or due:
            job.checkpoints.save(progress)


def _say(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)
