"""A training job in this process: model, optimizer, steps, checkpoints, built from its arguments.

The steps are all in which a run under hybrid data parallelism differs from stock Megatron-Core's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from megatron_hdp.data.mixture import Corpus
from megatron_hdp.data.tokenizers import Tokenizer, build_tokenizer
from megatron_hdp.encoders import load_encoder
from megatron_hdp.megatron import parallel
from megatron_hdp.megatron.checkpoint.checkpoints import Checkpoints
from megatron_hdp.megatron.checkpoint.state import Progress, TrainingState
from megatron_hdp.megatron.execution import HdpExecutor
from megatron_hdp.megatron.model import build_chunks, model_dtype
from megatron_hdp.megatron.optimizer import build_optimizer, build_scheduler
from megatron_hdp.megatron.options import TrainingArguments, tokenizer_of
from megatron_hdp.megatron.step import (
    DataPlane,
    HdpSteps,
    StockSteps,
    build_datasets,
    build_executor,
    cost_model_of,
    join_data_plane,
    open_split,
    split_specs,
)
from megatron_hdp.runtime.timeline import Timeline

Steps: TypeAlias = HdpSteps | StockSteps
"""What runs one step over one split of the data."""


@dataclass
class TrainingJob:
    """One run in this process."""

    arguments: TrainingArguments
    timeline: Timeline
    chunks: list[Any]
    """This rank's parts of the model; one without virtual stages."""
    optimizer: Any
    scheduler: Any
    training: Steps
    validation: Steps | None
    state: TrainingState
    checkpoints: Checkpoints
    vocab_size: int
    """Entries of the tokenizer."""
    plane: DataPlane | None = None

    def load(self) -> Progress:
        """Restores the checkpoint that the arguments name, and the order in which its run draws.

        Every rank must call it, before the first step.
        """
        progress = self.checkpoints.load()
        for line in self.state.announcements:
            parallel.say(line)
        if self.state.order != self.training.order:
            self.training.follow(self.state.order)
            if self.validation is not None:
                self.validation.follow(self.state.order)
        return progress

    def close(self) -> None:
        """Ends what works in the background."""
        self.training.close()
        if self.validation is not None:
            self.validation.close()
        if self.plane is not None:
            self.plane.close()


@dataclass
class Model:
    """What of a run does not depend on who else is in the job."""

    tokenizer: Tokenizer
    chunks: list[Any]
    optimizer: Any
    scheduler: Any

    @classmethod
    def build(cls, arguments: TrainingArguments) -> Model:
        """Freshly initialised, once `parallel.initialise` has run."""
        tokenizer = build_tokenizer(tokenizer_of(arguments) or arguments.tokenizer_type)
        encoder = None
        if arguments.hdp_encoder is not None:
            encoder = load_encoder(
                arguments.hdp_encoder,
                dtype=model_dtype(arguments),
                patches_per_pack=arguments.hdp_encoder_patches,
                costs=arguments.hdp_item_costs,
            )
        chunks = build_chunks(arguments, tokenizer.vocab_size, encoder)
        optimizer = build_optimizer(arguments, chunks)
        return cls(tokenizer, chunks, optimizer, build_scheduler(arguments, optimizer))


def build_training_job(arguments: TrainingArguments, timeline: Timeline) -> TrainingJob:
    """The job, once `parallel.initialise` has run; every rank must call this."""
    plane = join_data_plane(arguments) if arguments.hybrid_data_parallel else None
    model = Model.build(arguments)
    if arguments.hybrid_data_parallel:
        executor = build_executor(arguments, model.chunks, timeline)
        corpora = open_corpora(arguments)
        steps: tuple[Steps, Steps | None] = hdp_steps(
            arguments, model.tokenizer, executor, corpora, plane
        )
    else:
        steps = _stock_steps(arguments, model.chunks[0], model.tokenizer)
    return job_of(arguments, timeline, model, steps, plane)


def job_of(
    arguments: TrainingArguments,
    timeline: Timeline,
    model: Model,
    steps: tuple[Steps, Steps | None],
    plane: DataPlane | None = None,
) -> TrainingJob:
    """The job of a model and its steps of training and validation."""
    training, validation = steps
    state = TrainingState(arguments, training.order, model.chunks, model.optimizer, model.scheduler)
    return TrainingJob(
        arguments=arguments,
        timeline=timeline,
        chunks=model.chunks,
        optimizer=model.optimizer,
        scheduler=model.scheduler,
        training=training,
        validation=validation,
        state=state,
        checkpoints=Checkpoints(arguments, state, parallel.say),
        vocab_size=arguments.vocab_size or model.tokenizer.vocab_size,
        plane=plane,
    )


def open_corpora(arguments: TrainingArguments) -> dict[str, Corpus]:
    """The opened splits that a run draws from: train, and valid if it evaluates.

    Raises:
        ValueError: one of them cannot be opened, or there is none to evaluate on.
    """
    specs = split_specs(arguments)
    if arguments.eval_iters and "valid" not in specs:
        raise ValueError(
            f"--eval-iters {arguments.eval_iters}: found no validation data: add validation to the "
            "file of --hdp-data, add --valid-data-path, or leave --eval-iters out"
        )
    splits = ["train", *(["valid"] if arguments.eval_iters else [])]
    return {split: open_split(arguments, specs[split]) for split in splits}


def hdp_steps(
    arguments: TrainingArguments,
    tokenizer: Tokenizer,
    executor: HdpExecutor,
    corpora: Mapping[str, Corpus],
    plane: DataPlane | None = None,
) -> tuple[HdpSteps, HdpSteps | None]:
    """The steps of training and of validation; every rank must call this."""
    cost_model = cost_model_of(arguments, executor)

    def steps(split: str) -> HdpSteps:
        return HdpSteps(
            arguments,
            executor,
            cost_model,
            corpora[split],
            tokenizer.vocab_size,
            split=split,
            plane=plane,
        )

    training = steps("train")
    for line in training.describe("to train on"):
        parallel.say(line)
    return training, steps("valid") if arguments.eval_iters else None


def _stock_steps(
    arguments: TrainingArguments, model: Any, tokenizer: Tokenizer
) -> tuple[Steps, Steps | None]:
    batch = arguments.global_batch_size or (parallel.num_hdp_ranks() * arguments.micro_batch_size)
    samples = (batch * arguments.train_iters, batch * arguments.eval_iters)
    train, valid = build_datasets(arguments, tokenizer, samples)
    validation = StockSteps(arguments, model, valid) if arguments.eval_iters else None
    return StockSteps(arguments, model, train), validation
