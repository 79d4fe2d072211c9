"""Megatron-LM's training loop in a job whose ranks die and join: left, and called again.

Megatron's ``train()`` keeps the model, the optimizer and the schedule, whose content changes in
place (`megatron.world`), and counts on from its arguments. So a rank that leaves an epoch lets an
error end ``train()``, puts the arguments back to where a step began, and calls it again. If the
optimizer has applied that step, it is only gone through: loss and norm are known, and what comes
behind a step (log, evaluation, checkpoint) is done again by those who are left.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.num_microbatches_calculator import update_num_microbatches
from megatron.core.rerun_state_machine import RerunMode, RerunState, get_rerun_state_machine
from megatron.core.transformer.moe.moe_utils import clear_aux_losses_tracker

from megatron_hdp.megatron import parallel
from megatron_hdp.megatron.lm import checkpoint, options
from megatron_hdp.megatron.lm.pretrain_job import PretrainJob
from megatron_hdp.megatron.lm.run import LmRun
from megatron_hdp.megatron.lm.saves_under_way import SavesUnderWay
from megatron_hdp.megatron.step import HdpSteps, ReferenceSums, StepReport, speeds_at
from megatron_hdp.megatron.world import EpochEnds, Recovery
from megatron_hdp.overrides import Overrides
from megatron_hdp.runtime.epochs import Epoch, Membership
from megatron_hdp.runtime.gathering import largest
from megatron_hdp.runtime.health import RankFailure

_COUNTED = (
    *("consumed_train_samples", "consumed_valid_samples", "skipped_train_samples"),
    *("exit_interval", "hdp_data_order", "hdp_data_positions", "hdp_consumed_tokens"),
)
"""What Megatron's arguments and HDP's among them say of how far a run is."""
_OF_GROUPS = ("save_strategy", "load_strategy")
"""What Megatron keeps for its next checkpoint, and what holds groups."""
FIRST, LAST = "first", "last"

_Outcome = tuple[bool, float | None, int | None]
"""What Megatron's optimizer returns: whether it was applied, gradient norm, zeros."""


@dataclass(frozen=True)
class Before:
    """What Megatron's loop knows when a step begins."""

    counted: dict[str, Any]
    """Arguments by their names."""
    scheduler_steps: int
    operations: float
    """Floating-point operations so far."""
    totals: dict[str, Any]
    """Sums since the latest line of the log."""
    reports: list[StepReport]
    """Steps since that."""
    reports_memory: bool
    """Whether the log will tell the memory."""
    elapsed_s: float
    """Seconds since the latest line."""


@dataclass(frozen=True)
class Applied:
    """A step that the optimizer has applied."""

    report: StepReport
    outcome: _Outcome


@dataclass(frozen=True)
class _Word:
    """What a rank knows of the step that all stand behind."""

    is_behind: bool
    """Whether all that follows it was done: log, evaluation, checkpoint."""
    lines: dict[str, int]
    """The latest steps whose lines the first and the last rank are known to have written."""


@dataclass
class _Shared:
    """What those who join take over, beside weights and optimizer."""

    before: dict[int, Before]
    applied: Applied | None
    counts: list[dict[str, Any]]
    reference: ReferenceSums | None
    """Of a loss of preferences."""


class LmSurvival:
    """What one process carries from epoch to epoch: the loop of its `recovery`.

    Args:
        args: Megatron's, validated, before torch.distributed is there.
        job: of this process.

    Attributes:
        joins: whether this process has joined a job that trains, so that it loads no checkpoint.
        saves: those that are asynchronous.
    """

    def __init__(self, args: argparse.Namespace, job: PretrainJob) -> None:
        self._args = args
        self._job = job
        arguments = options.training_arguments(args)
        membership = Membership.of_environment(60.0 * parallel.communication_minutes(arguments))
        self.recovery = Recovery(arguments, membership, job.timeline, self)
        self._epoch = self.recovery.join()
        self.joins = self._epoch is None
        self.saves = SavesUnderWay(args)
        self._run: LmRun | None = None
        self._optimizer_step: Callable[[], _Outcome] | None = None
        self._make_optimizer: Callable[[list[Any]], Any] | None = None
        self._before: dict[int, Before] = {}
        self._applied: dict[int, Applied] = {}
        self._again: Applied | None = None
        """A step that was applied and is gone through again."""
        self._passed = 0
        """The latest step that all have begun: what is behind the one before was done."""
        self._lines = {FIRST: 0, LAST: 0}
        self._is_behind = True
        self._counts: list[dict[str, Any]] = []
        self._held: ReferenceSums | None = None  # by others, of a joiner
        self._operations = 0.0
        self._totals: dict[str, Any] = {}
        self._restored_totals: dict[str, Any] | None = None
        self._reports_memory = True
        self._offered = False
        self._began_at = -1

    # What Megatron calls, by way of the patches

    def holds(self, optimizer: Any, make_optimizer: Callable[[list[Any]], Any]) -> None:
        """Takes an optimizer whose step nothing replaces yet, and what makes one over chunks."""
        self._optimizer_step, self._make_optimizer = optimizer.step, make_optimizer

    def train(self, run: LmRun, original: Callable[..., Any], given: dict[str, Any]) -> Any:
        """Megatron's ``train()`` to its end, through any number of epochs.

        Args:
            run: of this process.
            original: the function.
            given: its arguments by their names.
        """
        self._run = run
        self._chunks, self._optimizer = given["model"], given["optimizer"]
        self._scheduler = given["opt_param_scheduler"]
        self._given = given
        assert self._make_optimizer is not None, "Megatron has built no optimizer"
        self.recovery.hold(self._chunks, self._optimizer, self._scheduler, self._make_optimizer)
        self._operations = float(self._args.num_floating_point_operations_so_far)
        epoch = self._epoch
        if epoch is None:
            self.drop()
            epoch = self.recovery.admitted()
        else:
            self.recovery.heartbeat = self._job.heartbeat

        def take_part(epoch: Epoch) -> Any:
            self._epoch = epoch
            if epoch.number:
                self._enter(epoch)
            return original(**given)

        return self.recovery.through_epochs(epoch, take_part)

    def train_step(self, original: Callable[..., Any], *positional: Any, **named: Any) -> Any:
        """One call of Megatron's ``train_step()``."""
        if self._again is None:
            self._begin(self._args.curr_iteration + 1)
        return original(*positional, **named)

    def optimizer_step(self) -> _Outcome:
        """The optimizer's step: the commit, or what it was in a step that is gone through again."""
        run, again = self._run, self._again
        assert run is not None
        if again is not None:
            self._again = run.done = None
            return again.outcome
        # whoever passes this has seen that all ranks have whole gradients
        largest([0], parallel.compute_device())
        return self.apply()

    def count_operations(self, of_step: float) -> None:
        """Notes the operations of the step that has just ended."""
        step = self._args.curr_iteration + 1
        if step in self._before:
            self._operations = self._before[step].operations + of_step

    def log(self, original: Callable[..., Any], given: dict[str, Any]) -> Any:
        """Megatron's ``training_log()``, whose lines are written once."""
        self.recovery.membership.require_ongoing()
        totals, step = given["total_loss_dict"], given["iteration"]
        if self._restored_totals is not None:
            totals.update(self._restored_totals)
            given["report_memory_flag"] = self._reports_memory
            self._restored_totals = None
        given["is_first_iteration"] = given["is_first_iteration"] and step == self._first_step
        self._totals = totals
        with Overrides() as overrides:
            if self._lines[LAST] >= step:
                from megatron.training import training

                overrides.set(training, "print_rank_last", lambda *_: None)
            self._reports_memory = original(**given)
        return self._reports_memory

    def writes_line(self, step: int) -> bool:
        """Whether the first rank's line of a step is to be written."""
        return self._lines[FIRST] < step

    def has_logged(self, step: int) -> None:
        """Notes that this rank has written its lines of a step."""
        rank, last = dist.get_rank(), dist.get_world_size() - 1
        for name, is_one in ((FIRST, rank == 0), (LAST, rank == last)):
            if is_one:
                self._lines[name] = max(self._lines[name], step)

    def all_have_logged(self) -> None:
        """Notes that the latest step's lines were written: all have met behind them."""
        self._lines = dict.fromkeys(self._lines, self._args.curr_iteration + 1)

    def close(self) -> None:
        """Takes part no more."""
        self.recovery.shards.close()
        self.recovery.membership.close()

    # What the recovery calls

    def apply(self) -> _Outcome:
        """The commit: from here on the step counts, on this rank and so on all."""
        run, step = self._run, self._args.curr_iteration + 1
        assert run is not None and self._optimizer_step is not None
        report = run.log.latest
        assert report is not None, "others have seen this rank's gradients whole"
        self.recovery.shards.before_change()
        with self.recovery.applying():
            outcome = self._optimizer_step()
        self._applied[step] = Applied(report, outcome)
        norm = None if outcome[1] is None else float(outcome[1])
        self.recovery.keep(step, None, [run.steps(self._chunks)], norm)
        self._forget()
        self.recovery.shards.take(step)
        return outcome

    def go_back(self, state: Any) -> None:
        """Returns to an older step: all that was counted lies in what is kept of each step."""

    def interrupt(self) -> None:
        """Lets who waits for a data plane raise."""
        if self._run is not None:
            self._run.interrupt()

    def drop(self) -> None:
        """Lets go of all that is bound to the epoch's groups."""
        if self.recovery.version is not None and self._offered:
            self._counts = self.recovery.counts()
        if self._run is not None:
            self._run.leave()
        self._job.leave()
        self.saves.leave()
        for name in _OF_GROUPS:
            self._given["checkpointing_context"].pop(name, None)
        if self._args.num_experts is not None:
            clear_aux_losses_tracker()

    def word(self) -> _Word:
        """What this rank knows."""
        version = self.recovery.version
        assert version is not None
        return _Word(self._passed > version or version not in self._applied, dict(self._lines))

    def hear(self, words: list[_Word]) -> None:
        """What nobody knows to be done is done again."""
        self._is_behind = any(one.is_behind for one in words)
        for name in self._lines:
            self._lines[name] = max(self._lines[name], *(one.lines[name] for one in words))

    def shared(self) -> _Shared:
        """For those who join."""
        version = self.recovery.version
        assert version is not None
        step = version + 1 if self._is_behind else version
        applied = None if self._is_behind else self._applied[version]
        sums = None if self._run is None else self._run.reference_sums()
        return _Shared({step: self._before[step]}, applied, self._counts, sums)

    def take_over(self, shared: _Shared) -> None:
        """As one who joins."""
        version = self.recovery.version
        assert version is not None
        self._before, self._counts = dict(shared.before), shared.counts
        self._held = shared.reference
        self._is_behind = shared.applied is None
        if shared.applied is not None:
            self._applied[version] = shared.applied

    # Its own

    @property
    def _first_step(self) -> int:
        """The first step of the job, whose figures Megatron logs without counting them."""
        return self._began_at + 1

    def _begin(self, step: int) -> None:
        """A step that was not begun before: what is behind the latest one was done here.

        Raises:
            EpochEnds: others join.
            RankFailure: too few are left for a step.
        """
        run, recovery = self._run, self.recovery
        assert run is not None and self._epoch is not None
        steps = run.steps(self._chunks)
        self._before[step] = self._state()
        if not self._offered and self._epoch.number == 0:
            self._begin_job(step, steps)
        recovery.name_slow(lambda: speeds_at(checkpoint.position_of(self._args, "train")))
        more = recovery.membership.leaves_next, -recovery.shards.complete
        leaves, lag = largest(more, parallel.compute_device())
        recovery.membership.require_ongoing()
        recovery.copied = -lag
        self._passed = step
        if self._epoch.is_last:
            self._save_and_end(step - 1)
        if leaves:
            recovery.shards.settle()
            raise EpochEnds
        if self.saves.is_owed:
            lines = self._lines
            self._save(step - 1)
            self._lines = lines
        recovery.shards.begin(recovery.copied)

    def _begin_job(self, step: int, steps: HdpSteps) -> None:
        """From here on the job survives."""
        recovery = self.recovery
        assert self._epoch is not None
        recovery.moved(self._epoch, steps)
        self._trace(step - 1, steps)
        recovery.keep(step - 1, None, [steps])
        recovery.make_shards(self._epoch)
        recovery.shards.settle()
        self._began_at = step - 1
        self._offered = True
        terms = recovery.terms(steps)
        if parallel.is_first_rank():
            recovery.membership.offer(terms)

    def _state(self) -> Before:
        args, run = self._args, self._run
        assert run is not None
        return Before(
            counted={name: getattr(args, name) for name in _COUNTED if hasattr(args, name)},
            scheduler_steps=self._scheduler.num_steps,
            operations=self._operations,
            totals={
                name: one.clone() if torch.is_tensor(one) else one
                for name, one in self._totals.items()
            },
            reports=run.log.since_line(),
            reports_memory=self._reports_memory,
            elapsed_s=_interval().elapsed(reset=False),
        )

    def _forget(self) -> None:
        """Lets go of steps that nobody goes back to."""
        oldest = self.recovery.oldest
        self._before = {step: one for step, one in self._before.items() if step >= oldest}
        self._applied = {step: one for step, one in self._applied.items() if step >= oldest}

    def _enter(self, epoch: Epoch) -> None:
        """Makes all that is bound to groups, and puts Megatron's loop to where a step begins."""
        run, recovery, args = self._run, self.recovery, self._args
        assert run is not None
        executor = recovery.enter(epoch)
        assert executor is not None
        args.rank, args.world_size = dist.get_rank(), dist.get_world_size()
        self._job.begin(args)
        recovery.heartbeat = self._job.heartbeat
        run.enter(executor)
        recovery.share()
        recovery.make_shards(epoch)
        self.saves.enter()
        self._offered = True
        version = recovery.version
        assert version is not None
        step = version + 1 if self._is_behind else version
        again = None if self._is_behind else self._applied[version]
        self._restore(step)
        steps = run.steps(self._chunks)
        run.take_reference(self._held)
        places = recovery.moved(epoch, steps)
        for counts in self._counts:
            steps.put_back(counts)
        position = checkpoint.position_of(args, "train")
        if position is not None:
            checkpoint.remember_position(args, "train", steps.moved(position, places))
        if again is not None:
            moved = steps.moved(again.report.position_after, places)
            again = Applied(replace(again.report, position_after=moved), again.outcome)
            self._applied[version] = again
        self._again = again
        run.done = None if again is None else again.report
        norm = None if again is None or again.outcome[1] is None else float(again.outcome[1])
        recovery.keep(version, None, [steps], norm)
        self._trace(version, steps)
        self._passed = step if again is None else version
        if epoch.is_last:
            args.do_valid = 0  # too few for its sequences

    def _trace(self, version: int, steps: HdpSteps) -> None:
        """Lets the trace, if there is one, hold how this rank has come into the epoch."""
        run, recovery = self._run, self.recovery
        assert run is not None and self._epoch is not None
        member, spans = recovery.membership.member, recovery.spans()
        run.outputs.enter(self._epoch, member, steps, version, spans)

    def _restore(self, step: int) -> None:
        """Puts Megatron's arguments and objects to where a step begins."""
        args, run, before = self._args, self._run, self._before[step]
        assert run is not None
        for name in _COUNTED:
            vars(args).pop(name, None)
        vars(args).update(before.counted)
        run.order = checkpoint.order_of_run(args, run.arguments)
        args.iteration = step - 1
        args.num_floating_point_operations_so_far = self._operations = before.operations
        self._scheduler.num_steps = before.scheduler_steps
        self._scheduler.step(increment=0)
        self._restored_totals, self._totals = dict(before.totals), before.totals
        self._reports_memory = before.reports_memory
        run.log.put_back(before.reports)
        update_num_microbatches(args.consumed_train_samples, consistency_check=False)
        machine = get_rerun_state_machine()
        machine.state, machine.mode = RerunState.NOT_RUNNING_YET, RerunMode(args.rerun_mode)
        machine.current_iteration = args.iteration
        _stop_timers()
        interval = _interval()
        interval.set_elapsed(max(before.elapsed_s, interval.elapsed(reset=False)))
        _write_where_last(args)

    def _save(self, version: int) -> None:
        """Saves between two steps, as Megatron's loop does behind one."""
        from megatron.training import training

        given = self._given
        training.save_checkpoint(
            version,
            *(given["model"], given["optimizer"], given["opt_param_scheduler"]),
            self._operations,
            given["checkpointing_context"],
            train_data_iterator=given["train_data_iterator"],
        )

    def _save_and_end(self, version: int) -> None:
        """Too few are left for a step."""
        from megatron.training.async_utils import maybe_finalize_async_save

        assert self._epoch is not None
        if self._args.save:
            self._save(version)
            maybe_finalize_async_save(blocking=True, terminate=True)
        raise RankFailure(f"{self._epoch.why}: the job ends after iteration {version}")


def _interval() -> Any:
    """Megatron's timer of the seconds since the latest line of its log."""
    from megatron.training.global_vars import get_timers

    return get_timers()("interval-time", log_level=0)


def _stop_timers() -> None:
    """Stops those that an error has left running."""
    from megatron.training.global_vars import get_timers

    for timer in get_timers()._timers.values():
        if timer._started:
            timer.stop()


def _write_where_last(args: argparse.Namespace) -> None:
    """Lets the last rank have Megatron's writer of TensorBoard, and nobody else."""
    from megatron.training import global_vars

    writer, is_last = global_vars._GLOBAL_TENSORBOARD_WRITER, args.rank == args.world_size - 1
    if writer is not None and not is_last:
        writer.close()
        global_vars._GLOBAL_TENSORBOARD_WRITER = None
    elif writer is None and is_last:
        global_vars._set_tensorboard_writer(args)
