"""Everything that a run holds, built from its arguments.

The steps are all in which a run under hybrid data parallelism differs from stock Megatron-Core's.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from megatron_hdp.data import DataOrder, Tokenizer, build_tokenizer
from megatron_hdp.data.tables import count_documents, split_documents
from megatron_hdp.megatron import parallel
from megatron_hdp.megatron.checkpoint.checkpoints import Checkpoints
from megatron_hdp.megatron.checkpoint.state import Progress, TrainingState
from megatron_hdp.megatron.model import build_gpt
from megatron_hdp.megatron.optimizer import build_optimizer, build_scheduler
from megatron_hdp.megatron.options import TrainingArguments
from megatron_hdp.megatron.step import (
    HdpSteps,
    StepReport,
    StockSteps,
    build_datasets,
    build_executor,
    cost_model_of,
)
from megatron_hdp.runtime.timeline import Timeline

_TOKENIZER_PREFIX = {"HuggingFaceTokenizer": "hf:", "TikTokenizer": "tiktoken:"}


class Steps(Protocol):
    """What runs one step over one split of the data: HDP's or stock Megatron's."""

    order: DataOrder

    def follow(self, order_version: int) -> None:
        """Draws in the version of the order that the run began with; before its first step here."""
        ...

    def run(self, consumed: int, forward_only: bool = False) -> StepReport:
        """Runs the step that begins after `consumed` sequences."""
        ...

    def non_finite_gradients(self) -> tuple[str, ...]:
        """Micro-batches of the latest step that gave NaN or infinite gradients, where one can tell.

        Every rank must call it.
        """
        ...

    def draw_plan(self, path: Path, title: str) -> None:
        """Draws the latest step's plan."""
        ...

    def close(self) -> None:
        """Ends what prepares steps that will not run."""
        ...


@dataclass
class Job:
    """One run in this process."""

    arguments: TrainingArguments
    timeline: Timeline
    model: Any
    optimizer: Any
    scheduler: Any
    training: Steps
    validation: Steps | None
    state: TrainingState
    checkpoints: Checkpoints
    vocab_size: int
    """Entries of the tokenizer."""

    def load(self) -> Progress:
        """Restores the checkpoint that the arguments name, and the order in which its run draws.

        Every rank must call it, before the first step.
        """
        progress = self.checkpoints.load()
        version = self.state.order.version
        if version != self.training.order.version:
            parallel.say(self.state.order.announcement)
            self.training.follow(version)
            if self.validation is not None:
                self.validation.follow(version)
        return progress

    def close(self) -> None:
        """Ends what works in the background."""
        self.training.close()
        if self.validation is not None:
            self.validation.close()


def build_job(arguments: TrainingArguments, timeline: Timeline) -> Job:
    """The job, once `parallel.initialise` has run; every rank must call this.

    Args:
        arguments: of the run.
        timeline: where this rank's time will be noted.
    """
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
    state = TrainingState(arguments, training.order, model, optimizer, scheduler)
    return Job(
        arguments=arguments,
        timeline=timeline,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        training=training,
        validation=validation,
        state=state,
        checkpoints=Checkpoints(arguments, state, parallel.say),
        vocab_size=tokenizer.vocab_size,
    )


def _hdp_steps(
    arguments: TrainingArguments, model: Any, tokenizer: Tokenizer, timeline: Timeline
) -> tuple[Steps, Steps | None]:
    num_documents = count_documents(arguments.data_path[0])
    train, valid, _ = split_documents(num_documents, arguments.split)
    executor = build_executor(arguments, model, timeline)
    cost_model = cost_model_of(arguments, executor)

    def steps(documents: range) -> HdpSteps:
        return HdpSteps(arguments, executor, cost_model, documents, tokenizer.vocab_size)

    training = steps(train)
    parallel.say(training.describe("to train on"))
    return training, steps(valid) if arguments.eval_iters else None


def _stock_steps(
    arguments: TrainingArguments, model: Any, tokenizer: Tokenizer
) -> tuple[Steps, Steps | None]:
    batch = arguments.global_batch_size or (parallel.num_hdp_ranks() * arguments.micro_batch_size)
    samples = (batch * arguments.train_iters, batch * arguments.eval_iters)
    train, valid = build_datasets(arguments, tokenizer, samples)
    validation = StockSteps(arguments, model, valid) if arguments.eval_iters else None
    return StockSteps(arguments, model, train), validation
