"""What a frozen model says of a run's answers, once: from a file, or by a pass before the steps.

The pass runs the steps that are left forward, under the weights of the reference in the model's
place, and notes one number an answer. Those of earlier runs over the same answers are not computed
again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import torch
from megatron.core.distributed import DistributedDataParallel

from megatron_hdp.data.mixture import Position
from megatron_hdp.megatron import parallel
from megatron_hdp.megatron.adapters import is_adapter
from megatron_hdp.megatron.checkpoint.checksums import fingerprint_of
from megatron_hdp.megatron.checkpoint.folder import CheckpointFolder
from megatron_hdp.megatron.checkpoint.together import on_first_rank
from megatron_hdp.megatron.checkpoint.weights import load_weights
from megatron_hdp.megatron.options import TrainingArguments
from megatron_hdp.megatron.step.hdp_steps import HdpSteps
from megatron_hdp.megatron.step.reference_sums import ReferenceSums
from megatron_hdp.runtime.gathering import from_first_rank

_NAME = "reference-log-probs.npz"
_WRITTEN_EVERY_S = 60.0
_UNKNOWN_AHEAD = ("mix", "plan")  # functions of the user's own that decide what a step holds


@dataclass(frozen=True)
class StepsLeft:
    """Steps over a split that a run has still to do."""

    steps: HdpSteps
    position: Position
    """Where the first of them begins."""
    count: int


class Reference:
    """The frozen model of a run, and what it has said so far.

    Attributes:
        sums: what it has said; None before it is asked.

    Args:
        arguments: of the run.
        chunks: this rank's parts of the model that is trained.
        checksums: whether a checkpoint's files are read to be checked.
    """

    def __init__(
        self,
        arguments: TrainingArguments,
        chunks: Sequence[DistributedDataParallel],
        *,
        checksums: bool,
    ) -> None:
        self._arguments, self._chunks, self._checksums = arguments, chunks, checksums
        self._path = _file(arguments)
        self._source: Path | None = None
        self.sums: ReferenceSums | None = None

    def enter(self, held: ReferenceSums | None) -> None:
        """Goes on in another epoch of the job, all ranks with what its first one knows.

        Every rank must call this; who joins has `held` from another one.
        """
        self.sums = from_first_rank(self.sums or held, parallel.compute_device())
        self._source = _checkpoint(self._arguments)

    def add(
        self, given: Sequence[StepsLeft], is_to_end: Callable[[], bool] = lambda: False
    ) -> None:
        """Gives steps what the reference says of their answers, if they need it.

        Every rank must call this, with the weights that training begins with, or goes on with. It
        stops between two steps where the job `is_to_end`, which every rank says alike.

        Raises:
            ValueError: there is no reference, it is another one, or it does not say all.
        """
        left = [one for one in given if _needs_reference(one.steps)]
        if not left:
            return
        if self.sums is None:
            self.sums = self._opened()
        for one in left:
            assert one.steps.preferences is not None
            if one.steps.preferences.reference is None:
                one.steps.preferences.hold(self.sums)
        missing = _missing(left)
        first = next(missing, None)
        if first is not None:
            self._require_computable(left)
            self._compute(chain([first], missing), is_to_end)

    def _opened(self) -> ReferenceSums:
        path = self._path
        self._source = _checkpoint(self._arguments)
        model = _model(self._arguments, self._source)
        sums = on_first_rank(lambda: ReferenceSums.read(path) if path and path.exists() else None)
        if sums is None and model is None:
            raise ValueError(
                f"--hdp-reference-log-probs {path}: found no such file, expected one: give "
                "--hdp-reference-checkpoint to make it, or the path of one that was made"
            )
        if sums is not None and model is not None and sums.model != model:
            raise ValueError(
                f"{path}: found log-probabilities of another model than "
                f"{self._source or 'this one'}, expected this reference's: give the checkpoint "
                "that it was made from, or another file"
            )
        if sums is not None:
            return sums
        assert model is not None
        return ReferenceSums(model)

    def _require_computable(self, left: Sequence[StepsLeft]) -> None:
        if self._source is None and not _is_a_try(self._arguments):
            raise ValueError(
                f"--hdp-reference-log-probs {self._path}: found no log-probabilities of some "
                "answers of this run, expected all of them: it is of other data or of a shorter "
                "run; give --hdp-reference-checkpoint as well"
            )
        for one in left:
            spec = one.steps.corpus.spec
            named = [key for key in spec.primitives.named if key in _UNKNOWN_AHEAD]
            if named:
                raise ValueError(
                    f"{spec.origin}: found primitives: {named[0]} beside an objective with a "
                    "reference, expected steps that are known before the first one: leave it out"
                )

    def _compute(
        self, missing: Iterator[tuple[HdpSteps, Position]], is_to_end: Callable[[], bool]
    ) -> None:
        """Runs steps under the reference's weights, and keeps what it says in the file."""
        count, written, path, sums = 0, time.monotonic(), self._path, self.sums
        assert sums is not None

        def write(least_s: float) -> None:
            nonlocal written
            if path is not None and time.monotonic() - written >= least_s:
                sums.write(path)
                parallel.say(f"reference: answers of {count:,} steps so far, kept in {path}")
                written = time.monotonic()

        with self._weights():
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
    def _weights(self) -> Iterator[None]:
        """Within it the model has the reference's weights; without a checkpoint no adapters."""
        modules = [chunk.module for chunk in self._chunks]
        tensors = [one for module in modules for one in (*module.parameters(), *module.buffers())]
        kept = [one.detach().to("cpu", copy=True) for one in tensors]
        try:
            with torch.no_grad():
                for module in modules:
                    for name, parameter in module.named_parameters():
                        if is_adapter(name):
                            parameter.zero_()
            if (source := self._source) is not None:
                load_weights(
                    self._chunks, source.parent, checksums=self._checksums, say=parallel.say
                )
            yield
        finally:
            with torch.no_grad():
                for one, value in zip(tensors, kept, strict=True):
                    one.copy_(value)


def _needs_reference(steps: HdpSteps) -> bool:
    return steps.preferences is not None and steps.preferences.objective.needs_reference


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
    return f"drawn by seed {arguments.seed}" if _is_a_try(arguments) else None


def _is_a_try(arguments: TrainingArguments) -> bool:
    """Whether adapters are trained beside weights of no checkpoint, which are the reference."""
    return arguments.lora_rank is not None and arguments.hdp_reference_log_probs is None


def _missing(left: Sequence[StepsLeft]) -> Iterator[tuple[HdpSteps, Position]]:
    """Those of which the reference does not say all, in order."""
    for one in left:
        steps, position = one.steps, replace(one.position, costs=None)
        assert steps.preferences is not None
        for _ in range(one.count):
            if steps.is_over(position):
                break
            drawn = steps.planner.mix(position.following(steps.planner.losses_behind))
            if not steps.preferences.knows(drawn):
                yield steps, position
            position = drawn.after
