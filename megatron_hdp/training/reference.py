"""What a frozen model says of a run's answers, once: from a file, or by a pass before the steps.

The pass runs the steps that are left forward, under the weights of the reference in the model's
place, and notes one number an answer. Those of earlier runs over the same answers are not computed
again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path

import torch

from megatron_hdp.data.mixture import Position
from megatron_hdp.megatron import parallel
from megatron_hdp.megatron.adapters import is_adapter
from megatron_hdp.megatron.checkpoint.checksums import fingerprint_of
from megatron_hdp.megatron.checkpoint.folder import CheckpointFolder
from megatron_hdp.megatron.checkpoint.state import Progress
from megatron_hdp.megatron.checkpoint.together import on_first_rank
from megatron_hdp.megatron.checkpoint.weights import load_weights
from megatron_hdp.megatron.options import TrainingArguments
from megatron_hdp.megatron.step import HdpSteps, ReferenceSums
from megatron_hdp.training.training_job import TrainingJob

_NAME = "reference-log-probs.npz"
_WRITTEN_EVERY_S = 60.0
_UNKNOWN_AHEAD = ("mix", "plan")  # functions of the user's own that decide what a step holds


def add_references(
    job: TrainingJob, progress: Progress, is_to_end: Callable[[], bool] = lambda: False
) -> None:
    """Gives the steps that are left what the reference says of their answers, if they need it.

    Every rank must call this, with the weights and the data position that training begins with. It
    stops between two steps where the job `is_to_end`, which every rank says alike.

    Raises:
        ValueError: there is no reference, it is another one, or it does not say all.
    """
    steps = [one for one in (job.training, job.validation) if isinstance(one, HdpSteps)]
    steps = [one for one in steps if one.preferences and one.preferences.objective.needs_reference]
    if not steps:
        return
    arguments = job.arguments
    path, source = _file(arguments), _checkpoint(arguments)
    model = _model(arguments, source)
    sums = on_first_rank(lambda: ReferenceSums.read(path) if path and path.exists() else None)
    if sums is None and model is None:
        raise ValueError(
            f"--hdp-reference-log-probs {path}: found no such file, expected one: give "
            "--hdp-reference-checkpoint to make it, or the path of one that was made"
        )
    if sums is not None and model is not None and sums.model != model:
        raise ValueError(
            f"{path}: found log-probabilities of another model than {source or 'this one'}, "
            "expected this reference's: give the checkpoint that it was made from, or another file"
        )
    if sums is None:
        assert model is not None
        sums = ReferenceSums(model)
    for one in steps:
        assert one.preferences is not None
        one.preferences.hold(sums)
    missing = _missing(job, progress)
    first = next(missing, None)
    if first is None:
        return
    _require_computable(steps, path, model)
    _compute(job, source, sums, path, chain([first], missing), is_to_end)


def _file(arguments: TrainingArguments) -> Path | None:
    if arguments.hdp_reference_log_probs is None and arguments.save is not None:
        return Path(arguments.save) / _NAME
    return arguments.hdp_reference_log_probs


def _checkpoint(arguments: TrainingArguments) -> Path | None:
    """The checkpoint of the reference's weights; None where no folder is given."""
    path = arguments.hdp_reference_checkpoint
    if path is None and arguments.lora_rank is not None:
        path = arguments.pretrained_checkpoint
    if path is None:
        return None
    source = on_first_rank(CheckpointFolder(path).newest)
    if source is None:
        raise ValueError(
            f"--hdp-reference-checkpoint {path}: found no checkpoint, expected one: name the "
            "folder that --save or `megatron-hdp convert --to` was given"
        )
    return source


def _model(arguments: TrainingArguments, source: Path | None) -> str | None:
    """What tells the reference from other models; None where there is none to run."""
    if source is not None:
        return on_first_rank(lambda: fingerprint_of(source))
    if arguments.lora_rank is not None and arguments.hdp_reference_log_probs is None:
        return f"drawn by seed {arguments.seed}"  # a try: adapters beside weights of no checkpoint
    return None


def _missing(job: TrainingJob, progress: Progress) -> Iterator[tuple[HdpSteps, Position]]:
    """Steps that are left of which the reference does not say all, in order."""
    arguments, left = job.arguments, job.arguments.train_iters - progress.iteration
    for steps, begin, count in (
        (job.training, progress.position, left),
        (job.validation, Position(), arguments.eval_iters),
    ):
        if not isinstance(steps, HdpSteps):
            continue
        assert steps.preferences is not None
        position = replace(begin, costs=None)
        for _ in range(count):
            if steps.is_over(position):
                break
            drawn = steps.planner.mix(position.following(steps.planner.losses_behind))
            if not steps.preferences.knows(drawn):
                yield steps, position
            position = drawn.after


def _require_computable(steps: list[HdpSteps], path: Path | None, model: str | None) -> None:
    if model is None:
        raise ValueError(
            f"--hdp-reference-log-probs {path}: found no log-probabilities of some answers of this "
            "run, expected all of them: it is of other data or of a shorter run; give "
            "--hdp-reference-checkpoint as well"
        )
    for one in steps:
        named = [key for key in one.corpus.spec.primitives.named if key in _UNKNOWN_AHEAD]
        if named:
            raise ValueError(
                f"{one.corpus.spec.origin}: found primitives: {named[0]} beside an objective with "
                "a reference, expected steps that are known before the first one: leave it out"
            )


def _compute(
    job: TrainingJob,
    source: Path | None,
    sums: ReferenceSums,
    path: Path | None,
    missing: Iterator[tuple[HdpSteps, Position]],
    is_to_end: Callable[[], bool],
) -> None:
    """Runs steps under the reference's weights, and keeps what it says in the file."""
    count, written = 0, time.monotonic()

    def write(least_s: float) -> None:
        nonlocal written
        if path is not None and time.monotonic() - written >= least_s:
            sums.write(path)
            parallel.say(f"reference: answers of {count:,} steps so far, kept in {path}")
            written = time.monotonic()

    with _weights_of(job, source):
        step = next(missing, None)
        while step is not None and not is_to_end():
            following = next(missing, None)
            steps, position = step
            if following is not None and following[0] is steps:
                found = steps.answers(position, following[1])
            else:
                found = steps.answers(position)
            assert steps.preferences is not None
            steps.preferences.note(found)
            step, count = following, count + 1
            on_first_rank(lambda: write(_WRITTEN_EVERY_S))
    on_first_rank(lambda: write(0.0))
    parallel.say(f"reference: has run over the answers of {count:,} steps")


@contextmanager
def _weights_of(job: TrainingJob, source: Path | None) -> Iterator[None]:
    """Within it the model has the reference's weights; without a checkpoint no adapters."""
    modules = [chunk.module for chunk in job.chunks]
    tensors = [one for module in modules for one in (*module.parameters(), *module.buffers())]
    kept = [one.detach().to("cpu", copy=True) for one in tensors]
    try:
        with torch.no_grad():
            for module in modules:
                for name, parameter in module.named_parameters():
                    if is_adapter(name):
                        parameter.zero_()
        if source is not None:
            checksums = job.arguments.checkpoint_checksums
            load_weights(job.chunks, source.parent, checksums=checksums, say=parallel.say)
        yield
    finally:
        with torch.no_grad():
            for one, value in zip(tensors, kept, strict=True):
                one.copy_(value)
