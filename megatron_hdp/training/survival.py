"""Training that survives: ranks die and join, the steps stay the same.

A rank runs epoch after epoch. When one ends, because a member died or others join, it says which
step it has applied, hears who is in the next one, makes all groups anew and continues: with the
step that ran, or behind it if somebody has applied it. Whoever has applied a step has seen all
ranks with whole gradients of it, so the others apply theirs. Where ranks hold shards of the
optimizer, all go back to the newest version of which every shard is left.
"""

from __future__ import annotations

import time
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

from megatron_hdp.data import DataOrder
from megatron_hdp.data.mixture import Corpus
from megatron_hdp.megatron import parallel
from megatron_hdp.megatron.checkpoint.state import Progress
from megatron_hdp.megatron.execution import HdpExecutor
from megatron_hdp.megatron.optimizer import build_optimizer
from megatron_hdp.megatron.options import TrainingArguments
from megatron_hdp.megatron.step import HdpSteps, StepReport, build_executor, loaders_spec
from megatron_hdp.megatron.world import World, give_state
from megatron_hdp.overrides import Overrides
from megatron_hdp.runtime.epochs import Epoch, Membership, Terms
from megatron_hdp.runtime.gathering import gathered
from megatron_hdp.runtime.health import Heartbeat, RankFailure, StopSignals
from megatron_hdp.runtime.timeline import CHECKPOINT, START, Timeline
from megatron_hdp.training.before_commit import BeforeCommit
from megatron_hdp.training.loop import (
    StepDone,
    apply_step,
    gradients_of_step,
    is_done,
    require_finite,
    require_same_arguments,
    save_if_due,
    validate,
    write_step,
)
from megatron_hdp.training.metrics import StepMetrics, log_line
from megatron_hdp.training.step_outputs import StepOutputs
from megatron_hdp.training.surviving_shards import SurvivingShards
from megatron_hdp.training.training_job import (
    Model,
    TrainingJob,
    hdp_steps,
    job_of,
    open_corpora,
)

_NOTICE_S = 20.0
"""How long failed communication may remain without a word of the agent's."""


class EpochEnds(Exception):
    """Others join: the epoch ends between two steps."""


@dataclass
class Shared:
    """What those who join take over, beside weights and optimizer."""

    progress: Progress
    order: DataOrder
    identities: tuple[int, ...]
    """Members that stood for the HDP ranks of the epoch before, in their order."""
    scheduler: dict[str, Any]
    counts: list[dict[str, Any]]
    """What steps of training and of validation had counted, see `HdpSteps.kept`."""


def pretrain(arguments: TrainingArguments, membership: Membership) -> list[StepMetrics]:
    """Trains as `arguments` say, in a job that the agent has started; returns metrics of each step.

    Raises:
        NotNamedError: the job continues without this rank.
        NonFiniteError: the loss or a gradient is NaN or infinite.
        RankFailure: too few ranks are left.
    """
    _require_known(arguments)
    with StopSignals() as signals, closing(membership):
        run = _Run(arguments, membership, signals)
        epoch = run.begin()
        while True:
            try:
                return run.take_part(epoch)
            except EpochEnds:
                pass
            except RankFailure:
                raise
            except RuntimeError as error:
                run.require_survivable(error)
            epoch = run.leave(epoch)  # behind the block, which holds what the step has kept


@dataclass(frozen=True)
class _Kept:
    """A step that may have to be gone back to: what is known of the state behind it."""

    progress: Progress
    done: StepDone | None
    scheduler_steps: int
    before: BeforeCommit


class _Run:
    """What one rank carries from epoch to epoch."""

    def __init__(
        self, arguments: TrainingArguments, membership: Membership, signals: StopSignals
    ) -> None:
        self._arguments = arguments
        self._membership = membership
        self._signals = signals
        self._timeline = Timeline()
        self._heartbeat: Heartbeat | None = None
        self._executor: HdpExecutor | None = None
        self._job: TrainingJob | None = None
        self._before: BeforeCommit | None = None
        self._report: StepReport | None = None
        self._started = 0.0
        self._latest: StepDone | None = None
        self._is_written = True
        self._records: dict[int, StepMetrics] = {}
        self._shards = SurvivingShards(arguments)
        self._copied = 0
        """The newest version that all ranks' neighbours have of their shards."""
        self._kept: dict[int, _Kept] = {}
        self._counts: list[dict[str, Any]] = []
        self._progress: Progress | None = None  # None: of a joiner
        self._order: DataOrder | None = None
        self._identities: tuple[int, ...] = ()

    def begin(self) -> Epoch:
        """Builds the model: in the first epoch's groups, or alone with those that join with it."""
        together = self._membership.joins_with
        if not together:
            epoch = self._membership.first()
            self._enter_groups(epoch)
            self._build()
            return epoch
        store = self._membership.store_of_joiners()
        place = parallel.JobPlace(store, together.index(self._membership.member), len(together))
        parallel.enter_job(self._arguments, place)
        self._build()
        self._world.leave()
        return self._membership.first()

    def _enter_groups(self, epoch: Epoch) -> None:
        store = self._membership.enter(epoch, self._calm)
        rank = epoch.members.index(self._membership.member)
        place = parallel.JobPlace(store, rank, len(epoch.members))
        if epoch.number == 0:
            parallel.enter_job(self._arguments, place)
        else:
            self._executor = self._world.enter(place)
            # the learning rate of the step that was gone back to
            self._model.scheduler.step(increment=0)

    def _build(self) -> None:
        arguments = self._arguments
        parallel.initialise(arguments)
        parallel.set_seeds(arguments.seed)
        self._model = Model.build(arguments)
        chunks = self._model.chunks
        self._world = World(
            arguments, self._timeline, chunks, lambda parts: build_optimizer(arguments, parts)
        )
        self._world.optimizer = self._model.optimizer
        self._world.require_movable()
        self._corpora: dict[str, Corpus] = open_corpora(arguments)

    def _calm(self) -> None:
        """Before the waits of this rank are broken: that is no reason to end."""
        if self._heartbeat is not None:
            self._heartbeat.abandon()

    def take_part(self, epoch: Epoch) -> list[StepMetrics]:
        """Trains in an epoch, to the end of training.

        Raises:
            EpochEnds: others join.
            RuntimeError: communication failed, as it does when a member has died.
        """
        arguments = self._arguments
        if epoch.number and self._executor is None:
            self._enter_groups(epoch)
        heartbeat = Heartbeat.of_job(
            self._timeline,
            stall_timeout_s=arguments.stall_timeout_seconds,
            slow_timeout_s=60.0 * arguments.distributed_timeout_minutes,
            asked_to_end=self._signals.received,
        )
        heartbeat.__enter__()
        self._heartbeat = heartbeat
        with self._timeline.span(START):
            job = self._make_job(epoch)
        assert self._progress is not None
        is_pending = not self._is_written
        first_step = self._progress.iteration + (0 if is_pending else 1)
        with (
            closing(StepOutputs(arguments, job.training, job.vocab_size, first_step)) as outputs,
            ExitStack() as ending,
        ):
            ending.callback(job.close)
            stop, is_over = self._end_step(job, outputs) if is_pending else self._agreed()
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
        if epoch.number:
            self._share()
            assert self._progress is not None
            self._shards.enter(epoch, model, self._progress.iteration)
            if epoch.is_last:
                self._save_and_end(epoch)
        else:
            require_same_arguments(arguments)
            self._executor = build_executor(arguments, model.chunks, self._timeline)
        assert self._executor is not None
        training, validation = hdp_steps(arguments, model.tokenizer, self._executor, self._corpora)
        if self._job is None:
            self._job = job_of(arguments, self._timeline, model, (training, validation))
        job = self._job
        job.training, job.validation = training, validation
        steps = [training, *([validation] if validation is not None else [])]
        before, self._identities = self._identities, _identities(epoch, training.place)
        if epoch.number == 0:
            self._progress = job.load()
            self._order = job.state.order
            self._shards.enter(epoch, model, self._progress.iteration)
            self._shards.settle()
            if parallel.is_first_rank():
                self._membership.offer(self._terms(training))
        else:
            assert self._progress is not None and self._order is not None
            job.state.order = self._order
            for one in steps:
                if self._order != one.order:
                    one.follow(self._order)
            for one, counts in zip(steps, self._counts, strict=True):
                one.put_back(counts)
            places = [before.index(one) if one in before else None for one in self._identities]
            position = training.moved(self._progress.position, places)
            self._progress = replace(self._progress, position=position)
            job.checkpoints.enter(self._progress)
        self._keep(BeforeCommit(model.chunks, steps), self._latest)
        return job

    def _keep(self, before: BeforeCommit, done: StepDone | None) -> None:
        """Notes the state behind the latest step; with shards, back to one that all hold whole."""
        assert self._progress is not None
        self._before, self._counts, self._latest = before, before.counts(), done
        version = self._progress.iteration
        scheduler_steps = self._model.scheduler.num_steps
        self._kept[version] = _Kept(self._progress, done, scheduler_steps, before)
        least = min(version, self._copied) if self._shards.is_spread else version
        for old in [one for one in self._kept if one < least]:
            del self._kept[old]

    def _terms(self, training: HdpSteps) -> Terms:
        place = training.place
        terms = Terms(
            least=training.least_ranks(),
            replica=place.num_tensor_ranks * place.num_stages,
            stages=place.num_stages,
            pause_s=self._arguments.hdp_survive_pause_seconds,
        )
        parallel.say(
            f"survives the loss of up to {place.num_hdp_ranks - terms.least} of "
            f"{place.num_hdp_ranks} HDP ranks: the longest sequence needs {terms.least}"
        )
        return terms

    def _share(self) -> None:
        """Gives joiners what the others have, who are all at the same step."""
        mine = None if self._progress is None else self._progress.iteration
        known = gathered((mine, self._is_written))
        everyone = [one for one, _ in known]
        if not any(one is not None for one in everyone):
            raise RankFailure("nobody is left who was at a step: start again from a checkpoint")
        assert len({one for one in everyone if one is not None}) == 1, everyone
        self._is_written = all(is_written for _, is_written in known)
        if None not in everyone:
            return
        source = next(rank for rank, one in enumerate(everyone) if one is not None)
        model = self._model
        shared: list[Any] = [None]
        if dist.get_rank() == source:
            assert self._progress is not None and self._order is not None
            shared[0] = Shared(
                self._progress,
                self._order,
                self._identities,
                model.scheduler.state_dict(),
                self._counts,
            )
        dist.broadcast_object_list(shared, source, device=parallel.compute_device())
        hdp_rank = source // self._arguments.tensor_model_parallel_size
        is_spread = self._shards.is_spread
        give_state(model.chunks, None if is_spread else model.optimizer, hdp_rank)
        if mine is None:
            found = shared[0]
            self._progress, self._order = found.progress, found.order
            self._identities, self._counts = found.identities, found.counts
            model.scheduler.load_state_dict(found.scheduler)

    def _agreed(self) -> tuple[Any, bool]:
        """A signal that asks to end, and whether the epoch ends, on all ranks alike."""
        more = self._membership.leaves_next, -self._shards.complete
        stop, (leaves, lag) = self._signals.agreed_with(more, parallel.compute_device())
        self._copied = -lag
        return stop, bool(leaves)

    def _run_step(self, job: TrainingJob, outputs: StepOutputs) -> None:
        self._started = time.perf_counter()
        self._report = None
        assert self._progress is not None
        self._shards.begin(self._copied)
        # known before the vote: others may pass it although this rank does not hear of it
        self._report = gradients_of_step(job, outputs, self._progress)
        require_finite(job, self._progress, self._report)
        self._apply(job)

    def _apply(self, job: TrainingJob) -> None:
        """The commit: from here on the step counts, on this rank and so on all."""
        assert self._progress is not None and self._report is not None
        self._shards.before_change()
        done = apply_step(job, self._progress, self._report, self._started)
        self._progress = done.progress()
        self._shards.take(done.step)
        self._is_written = False
        steps = (job.training, job.validation)
        found = [one for one in steps if isinstance(one, HdpSteps)]
        self._keep(BeforeCommit(job.chunks, found), done)
        self._report = None

    def _end_step(self, job: TrainingJob, outputs: StepOutputs) -> tuple[Any, bool]:
        """Metrics, log and checkpoint of the latest step, and what all agree on behind it.

        Who joined behind that step knows no figures of it.
        """
        assert self._progress is not None
        done = self._latest
        if done is None:
            validate(job, self._progress.iteration)
        else:
            outputs.end_step(done.step)
            metrics = self._records[done.step] = write_step(job, outputs, done)
            if done.step % self._arguments.log_interval == 0:
                parallel.say(log_line(metrics, self._arguments.train_iters))
        stop, is_over = self._agreed()
        save_if_due(job, self._progress, stop)
        self._is_written = True
        return stop, is_over

    def require_survivable(self, error: RuntimeError) -> None:
        """Returns if the epoch is over, which explains why communication failed; else raises."""
        if not self._membership.is_over.wait(_NOTICE_S):
            raise error

    def leave(self, epoch: Epoch) -> Epoch:
        """Leaves an epoch; returns the one that follows.

        Raises:
            NotNamedError: that is without this rank.
        """
        if self._heartbeat is not None:
            self._heartbeat.abandon()
            self._heartbeat = None
        assert self._progress is not None or epoch.number, "a joiner has no first epoch"
        vote: dict[str, Any] = {"step": -1, "norm": None, "versions": self._shards.leave()}
        if self._progress is not None:
            norm = None if self._latest is None else self._latest.grad_norm
            vote |= {"step": self._progress.iteration, "norm": norm}
        self._membership.leave(vote)
        following, votes = self._membership.settled(epoch)
        if self._shards.is_spread:
            self._go_back(epoch, following, votes)
        else:
            self._catch_up(max(votes.values(), key=lambda one: one["step"]))
        if self._before is not None:
            self._before.put_back(self._model.chunks)
        self._drop_steps()
        self._executor = None
        self._world.leave()
        return following

    def _go_back(self, epoch: Epoch, following: Epoch, votes: dict[int, dict[str, Any]]) -> None:
        """To the newest step of which every part of the optimizer is left.

        Raises:
            RankFailure: there is none.
        """
        left = {member: one for member, one in votes.items() if member in following.members}
        stages = self._arguments.pipeline_model_parallel_size
        version = self._shards.choose(epoch, stages, left, self._membership.member)
        if version is None:
            raise RankFailure(
                f"{following.why}: a part of the optimizer is lost that no other rank has a copy "
                "of: the job ends, start it again from its latest checkpoint"
            )
        if self._progress is None:
            return  # it never was at a step
        kept = self._kept[version]
        if version < self._progress.iteration:
            self._is_written = True
        self._progress, self._latest, self._before = kept.progress, kept.done, kept.before
        self._counts = kept.before.counts()
        self._model.scheduler.num_steps = kept.scheduler_steps  # without an optimizer by now

    def _drop_steps(self) -> None:
        """Ends what prepares steps, and lets go of all that is bound to the epoch's groups."""
        if self._job is None:
            return
        for name in ("training", "validation"):
            steps = vars(self._job).pop(name, None)
            if steps is not None:
                steps.close()

    def _catch_up(self, ahead: dict[str, Any]) -> None:
        """Applies a step that another rank has applied: so all gradients of it were whole."""
        if self._progress is None or self._progress.iteration >= ahead["step"]:
            return
        assert self._report is not None, "the other has seen this rank's gradients whole"
        job = self._job
        assert job is not None
        with Overrides() as overrides:  # all that the optimizer would ask others for
            overrides.set(job.optimizer, "get_grad_norm", lambda: ahead["norm"])
            self._apply(job)

    def _save_and_end(self, epoch: Epoch) -> None:
        """Too few are left for a step."""
        job, progress = self._job, self._progress
        assert job is not None and progress is not None
        job.checkpoints.enter(progress)
        job.checkpoints.save(progress)
        job.checkpoints.close()
        raise RankFailure(f"{epoch.why}: the job ends after iteration {progress.iteration}")


def _identities(epoch: Epoch, place: parallel.RankPlace) -> tuple[int, ...]:
    """The first member of each HDP rank, which stands for it."""
    return epoch.members[: place.num_hdp_ranks * place.num_tensor_ranks : place.num_tensor_ranks]


def _require_known(arguments: TrainingArguments) -> None:
    """Refuses what does not survive.

    Raises:
        ValueError: there is something.
    """
    if parallel.compute_device().type != "cpu":
        raise ValueError(
            "--hdp-survive: found a GPU, expected CPUs: what waits inside of NCCL cannot be ended "
            "yet: leave it out, and start the job again from its checkpoint when a rank is lost"
        )
    found = {
        "--async-save": arguments.async_save,
        "--hdp-loaders ray": loaders_spec(arguments).backend == "ray",
        "--hdp-rank-speeds": arguments.hdp_rank_speeds is not None,
        "--hdp-trace": arguments.hdp_trace is not None,
    }
    for name, is_there in found.items():
        if is_there:
            raise ValueError(
                f"--hdp-survive: found {name}, expected none, because what it begins is bound to "
                "the ranks that were there: leave it out"
            )
