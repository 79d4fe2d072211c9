"""Training that survives: ranks die and join, the steps stay the same.

A rank runs epoch after epoch. When one ends, because a member died or others join, it makes all
groups anew and continues (`megatron.world.Recovery`): with the step that ran, or behind it if
somebody has applied it.
"""

from __future__ import annotations

import time
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import Any

from megatron_hdp.data import DataOrder
from megatron_hdp.data.mixture import Corpus
from megatron_hdp.megatron import parallel
from megatron_hdp.megatron.checkpoint.state import Progress
from megatron_hdp.megatron.execution import HdpExecutor
from megatron_hdp.megatron.optimizer import build_optimizer
from megatron_hdp.megatron.options import TrainingArguments
from megatron_hdp.megatron.step import (
    DataPlane,
    HdpSteps,
    Reference,
    ReferenceSums,
    StepReport,
    build_executor,
    join_data_plane,
    speeds_at,
)
from megatron_hdp.megatron.world import EpochEnds, Recovery
from megatron_hdp.runtime.epochs import Epoch, Membership, nccl
from megatron_hdp.runtime.health import Heartbeat, RankFailure, StopSignals
from megatron_hdp.runtime.timeline import CHECKPOINT, START, Timeline
from megatron_hdp.training.loop import (
    StepDone,
    apply_step,
    gradients_of_step,
    is_done,
    require_finite,
    require_same_arguments,
    save_if_due,
    steps_left,
    validate,
    write_step,
)
from megatron_hdp.training.metrics import StepMetrics, log_line
from megatron_hdp.training.step_outputs import RunOutputs, StepOutputs
from megatron_hdp.training.training_job import (
    Model,
    TrainingJob,
    hdp_steps,
    job_of,
    open_corpora,
)


@dataclass
class Shared:
    """What those who join take over, beside weights and optimizer."""

    progress: Progress
    order: DataOrder
    counts: list[dict[str, Any]]
    """What steps of training and of validation had counted, see `HdpSteps.kept`."""
    reference: ReferenceSums | None
    """Of a loss of preferences."""


def pretrain(arguments: TrainingArguments, membership: Membership) -> list[StepMetrics]:
    """Trains as `arguments` say, in a job that the agent has started; returns metrics of each step.

    Raises:
        NotNamedError: the job continues without this rank.
        NonFiniteError: the loss or a gradient is NaN or infinite.
        RankFailure: too few ranks are left.
    """
    if parallel.compute_device().type == "cuda":
        nccl.prepare()
    with StopSignals() as signals, closing(membership):
        run = _Run(arguments, membership, signals)
        with closing(run):
            return run.recovery.through_epochs(run.begin(), run.take_part)


@dataclass(frozen=True)
class _Behind:
    """The state behind a step."""

    progress: Progress
    done: StepDone | None
    """None: behind the one that this process has begun or joined with."""


class _Run:
    """What one rank carries from epoch to epoch: the loop of its `recovery`."""

    def __init__(
        self, arguments: TrainingArguments, membership: Membership, signals: StopSignals
    ) -> None:
        self._arguments = arguments
        self._signals = signals
        self._timeline = Timeline()
        self.recovery = Recovery(arguments, membership, self._timeline, self)
        self._shards = self.recovery.shards
        self._executor: HdpExecutor | None = None
        self._job: TrainingJob | None = None
        self._outputs = RunOutputs(arguments)
        self._plane: DataPlane | None = None
        self._report: StepReport | None = None
        self._started = 0.0
        self._latest: StepDone | None = None
        self._is_written = True
        self._records: dict[int, StepMetrics] = {}
        self._counts: list[dict[str, Any]] = []
        self._progress: Progress | None = None  # None: of a joiner
        self._order: DataOrder | None = None
        self._reference: Reference | None = None
        self._held: ReferenceSums | None = None  # by others, of a joiner

    def begin(self) -> Epoch:
        """Builds the model: in the first epoch's groups, or alone with those that join with it."""
        epoch = self.recovery.join()
        self._build()
        return self.recovery.admitted() if epoch is None else epoch

    def _build(self) -> None:
        arguments = self._arguments
        parallel.initialise(arguments)
        parallel.set_seeds(arguments.seed)
        self._model = model = Model.build(arguments)
        self.recovery.hold(
            model.chunks,
            model.optimizer,
            model.scheduler,
            lambda chunks: build_optimizer(arguments, chunks),
        )
        self._corpora: dict[str, Corpus] = open_corpora(arguments)

    def take_part(self, epoch: Epoch) -> list[StepMetrics]:
        """Trains in an epoch, to the end of training.

        Raises:
            EpochEnds: others join.
            RuntimeError: communication failed, as it does when a member has died.
        """
        arguments = self._arguments
        if epoch.number and self._executor is None:
            self._executor = self.recovery.enter(epoch)
        heartbeat = Heartbeat.of_job(
            self._timeline,
            stall_timeout_s=arguments.stall_timeout_seconds,
            slow_timeout_s=60.0 * arguments.distributed_timeout_minutes,
            asked_to_end=self._signals.received,
        )
        heartbeat.__enter__()
        self.recovery.heartbeat = heartbeat
        with self._timeline.span(START):
            job = self._make_job(epoch)
        self._trace(epoch, job)
        assert self._progress is not None
        self._refer(epoch, job)
        is_pending = not self._is_written
        first_step = self._progress.iteration + (0 if is_pending else 1)
        with (
            closing(self._outputs.begin(job.training, job.vocab_size, first_step)) as outputs,
            ExitStack() as ending,
        ):
            ending.callback(job.close)
            stop, is_over = self._end_step(job, outputs) if is_pending else self._agreed()
            is_asked = stop is not None and epoch.number > 0  # nothing is to be saved before
            if not is_pending and (is_asked or job.checkpoints.is_owed):
                save_if_due(job, self._progress, stop)
            while not is_done(job, self._progress) and stop is None:
                if is_over:
                    self._shards.settle()
                    raise EpochEnds
                heartbeat.begin_step(self._progress.iteration + 1)
                self._run_step(job, outputs)
                stop, is_over = self._end_step(job, outputs)
            with self._timeline.span(CHECKPOINT):
                job.checkpoints.finish()
        job.checkpoints.close()
        self._shards.close()
        heartbeat.__exit__(None, None, None)
        parallel.finish()
        parallel.leave_job()
        return [self._records[step] for step in sorted(self._records)]

    def _make_job(self, epoch: Epoch) -> TrainingJob:
        """What runs the steps of an epoch; in the first one a checkpoint is loaded."""
        arguments, model = self._arguments, self._model
        recovery = self.recovery
        if epoch.number:
            recovery.share()
            recovery.make_shards(epoch)
            if epoch.is_last:
                self._save_and_end(epoch)
        else:
            require_same_arguments(arguments)
            self._executor = build_executor(arguments, model.chunks, self._timeline)
        assert self._executor is not None
        self._plane = join_data_plane(arguments, is_late=epoch.number > 0)
        training, validation = hdp_steps(
            arguments, model.tokenizer, self._executor, self._corpora, self._plane
        )
        if self._job is None:
            self._job = job_of(arguments, self._timeline, model, (training, validation))
        job = self._job
        job.training, job.validation = training, validation
        recovery.membership.require_ongoing()  # else who ended it has not seen these
        steps = [training, *([validation] if validation is not None else [])]
        places = recovery.moved(epoch, training)
        if epoch.number == 0:
            self._progress = job.load()
            self._order = job.state.order
            recovery.version = self._progress.iteration
            self._keep(steps)
            recovery.make_shards(epoch)
            self._shards.settle()
            if parallel.is_first_rank():
                recovery.membership.offer(recovery.terms(training))
        else:
            assert self._progress is not None and self._order is not None
            job.state.order = self._order
            for one in steps:
                if self._order != one.order:
                    one.follow(self._order)
            for one, counts in zip(steps, self._counts, strict=True):
                one.put_back(counts)
            position = training.moved(self._progress.position, places)
            self._progress = replace(self._progress, position=position)
            job.checkpoints.enter(self._progress)
            self._keep(steps)
        return job

    def _refer(self, epoch: Epoch, job: TrainingJob) -> None:
        """Lets the reference say what steps need of it, unless it has; it may end the epoch."""
        if self._reference is None:
            checksums = self._arguments.checkpoint_checksums
            self._reference = Reference(self._arguments, job.chunks, checksums=checksums)
        if epoch.number and self._arguments.hdp_objective is not None:
            self._reference.enter(self._held)

        def is_to_end() -> bool:
            stop, is_over = self._agreed()
            if is_over:
                self._shards.settle()
                raise EpochEnds
            return stop is not None

        assert self._progress is not None
        self._reference.add(steps_left(job, self._progress), is_to_end)

    def _trace(self, epoch: Epoch, job: TrainingJob) -> None:
        """Lets the trace, if there is one, hold how this rank has come into an epoch."""
        training, progress, member = job.training, self._progress, self.recovery.membership.member
        assert isinstance(training, HdpSteps) and progress is not None
        self._outputs.enter(epoch, member, training, progress.iteration, self.recovery.spans())

    def _keep(self, steps: list[HdpSteps]) -> None:
        """Notes the state behind the latest step."""
        progress, done = self._progress, self._latest
        assert progress is not None
        norm = None if done is None else done.grad_norm
        self.recovery.keep(progress.iteration, _Behind(progress, done), steps, norm)
        self._counts = self.recovery.counts()

    def _agreed(self) -> tuple[Any, bool]:
        """A signal that asks to end, and whether the epoch ends, on all ranks alike."""
        membership = self.recovery.membership
        more = membership.leaves_next, -self._shards.complete
        stop, (leaves, lag) = self._signals.agreed_with(more, parallel.compute_device())
        membership.require_ongoing()
        self.recovery.copied = -lag
        return stop, bool(leaves)

    def _run_step(self, job: TrainingJob, outputs: StepOutputs) -> None:
        self._started = time.perf_counter()
        self._report = None
        assert self._progress is not None
        self._shards.begin(self.recovery.copied)
        # known before the vote: others may pass it although this rank does not hear of it
        self._report = gradients_of_step(job, outputs, self._progress)
        require_finite(job, self._progress, self._report)
        self.apply()

    def apply(self) -> None:
        """The commit: from here on the step counts, on this rank and so on all."""
        job, progress = self._job, self._progress
        assert job is not None and progress is not None
        assert self._report is not None, "others have seen this rank's gradients whole"
        self._shards.before_change()
        with self.recovery.applying():
            done = apply_step(job, progress, self._report, self._started)
        self._latest = done
        self._progress = done.progress()
        self._shards.take(done.step)
        self._is_written = False
        steps = (job.training, job.validation)
        self._keep([one for one in steps if isinstance(one, HdpSteps)])
        self._report = None

    def _end_step(self, job: TrainingJob, outputs: StepOutputs) -> tuple[Any, bool]:
        """Metrics, log and checkpoint of the latest step, and what all agree on behind it.

        Who joined behind that step knows no figures of it.
        """
        assert self._progress is not None
        position, done = self._progress.position, self._latest
        if done is None:
            validate(job, self._progress.iteration)
        else:
            outputs.end_step(done.step)
            metrics = self._records[done.step] = write_step(job, outputs, done)
            if done.step % self._arguments.log_interval == 0:
                parallel.say(log_line(metrics, self._arguments.train_iters))
        self.recovery.name_slow(lambda: speeds_at(position))
        stop, is_over = self._agreed()
        save_if_due(job, self._progress, stop)
        self._is_written = True
        return stop, is_over

    def go_back(self, state: _Behind) -> None:
        """Returns to an older step, which all have written."""
        self._progress, self._latest, self._is_written = state.progress, state.done, True

    def interrupt(self) -> None:
        """Lets who waits for a data plane raise."""
        for name in ("training", "validation"):
            steps = getattr(self._job, name, None)
            if steps is not None:
                steps.loaders.interrupt()

    def close(self) -> None:
        """Ends this rank's part of the data plane, and gives the checkpoints' folder up.

        Not if it has left its last epoch: the others may continue, and the folder is theirs.
        """
        if self._job is not None and self.recovery.membership.is_in_epoch:
            self._job.checkpoints.close()
        if self._plane is not None:
            self._plane.close()

    def drop(self) -> None:
        """Ends what prepares steps, and lets go of all that is bound to the epoch's groups."""
        self._executor = None
        if self.recovery.version is not None:
            self._counts = self.recovery.counts()
        if self._job is not None:
            self._job.checkpoints.leave()
            for name in ("training", "validation"):
                steps = vars(self._job).pop(name, None)
                if steps is not None:
                    steps.close()
        if self._plane is not None:
            self._plane.end()
            self._plane = None

    def word(self) -> bool:
        """Whether this rank has written the latest step."""
        return self._is_written

    def hear(self, words: list[bool]) -> None:
        """What not all have written is written again."""
        self._is_written = all(words)

    def shared(self) -> Shared:
        """For those who join."""
        assert self._progress is not None and self._order is not None
        sums = None if self._reference is None else self._reference.sums
        return Shared(self._progress, self._order, self._counts, sums)

    def take_over(self, shared: Shared) -> None:
        """As one who joins."""
        self._progress, self._order = shared.progress, shared.order
        self._counts, self._held = shared.counts, shared.reference

    def _save_and_end(self, epoch: Epoch) -> None:
        """Too few are left for a step."""
        job, progress = self._job, self._progress
        assert job is not None and progress is not None
        job.checkpoints.enter(progress)
        job.checkpoints.save(progress)
        job.checkpoints.finish()
        job.checkpoints.close()
        raise RankFailure(f"{epoch.why}: the job ends after iteration {progress.iteration}")
