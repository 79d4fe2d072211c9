"""A rank's way from one epoch of its job to the next, whichever loop runs its steps.

A rank that leaves an epoch says which step it has applied, and hears who is in the next one.
Whoever has applied a step has seen all ranks with whole gradients of it, so the others apply
theirs. Where ranks hold shards of the optimizer, all go back to the newest version of which every
shard is left.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch.distributed as dist

from megatron_hdp.exit_codes import ExitCode
from megatron_hdp.megatron import parallel
from megatron_hdp.megatron.execution import HdpExecutor
from megatron_hdp.megatron.options import TrainingArguments
from megatron_hdp.megatron.step import HdpSteps
from megatron_hdp.megatron.world.before_commit import BeforeCommit
from megatron_hdp.megatron.world.given_state import give_state
from megatron_hdp.megatron.world.surviving_shards import SurvivingShards
from megatron_hdp.megatron.world.world import World
from megatron_hdp.overrides import Overrides
from megatron_hdp.runtime.epochs import Epoch, Membership, Terms, keys, nccl
from megatron_hdp.runtime.gathering import gathered
from megatron_hdp.runtime.health import DataFailure, Heartbeat, RankFailure
from megatron_hdp.runtime.timeline import Span, Timeline

_NOTICE_S = 20.0
"""How long failed communication may remain without a word of the agent's, where one node is."""


LEAVES, AGREES, LETS_GO = "leaves the step", "hears who is left", "lets go of groups"
ENTERS, PREPARES = "makes groups anew", "prepares the step"
_MOST_SPANS = 64  # of recoveries that nobody asks for

_Result = TypeVar("_Result")


class EpochEnds(Exception):
    """Others join: the epoch ends between two steps."""


class Loop(Protocol):
    """What the loop that runs the steps does itself when its rank leaves an epoch for another."""

    def apply(self) -> Any:
        """Lets the optimizer apply the step whose gradients are there, and keeps what follows."""

    def go_back(self, state: Any) -> None:
        """Returns to what it has kept behind an older step."""

    def interrupt(self) -> None:
        """Called in another thread: who waits for a data plane raises, now and until `drop`."""

    def drop(self) -> None:
        """Lets go of all that is bound to the epoch's groups."""

    def word(self) -> Any:
        """What others must know of this rank, who stand behind the same step."""

    def hear(self, words: list[Any]) -> None:
        """The words of all ranks that were at a step, in the order of the new epoch."""

    def shared(self) -> Any:
        """What those who join take over, beside weights and optimizer."""

    def take_over(self, shared: Any) -> None:
        """Takes it over, as one who joins."""


@dataclass(frozen=True)
class _Kept:
    """A step that may have to be gone back to: what is known of the state behind it."""

    norm: float | None
    """Of its gradient; None: not known here."""
    scheduler_steps: int
    before: BeforeCommit
    state: Any
    """The loop's."""


@dataclass(frozen=True)
class _Shared:
    """What those who join take over."""

    version: int
    identities: tuple[int, ...]
    scheduler: dict[str, Any]
    state: Any


class Recovery:
    """What one rank carries from epoch to epoch.

    Args:
        arguments: of the run.
        membership: of this process.
        timeline: what the rank does.
        loop: that runs the steps.

    Attributes:
        version: steps that the optimizer has applied; None: this process has joined, and no other
            has told it yet.
        copied: the newest version that all ranks' neighbours have of their shards.
        heartbeat: of the epoch, which a loop may set.
    """

    def __init__(
        self,
        arguments: TrainingArguments,
        membership: Membership,
        timeline: Timeline,
        loop: Loop,
    ) -> None:
        self.membership = membership
        self.shards = SurvivingShards(arguments)
        self.version: int | None = None
        self.copied = 0
        self.heartbeat: Heartbeat | None = None
        self._arguments = arguments
        self._timeline = timeline
        self._loop = loop
        self._kept: dict[int, _Kept] = {}
        self._identities: tuple[int, ...] = ()
        self._catches_up = False
        self._spans: deque[Span] = deque(maxlen=_MOST_SPANS)
        self._told_s: float | None = None
        self._mark_s = 0.0

    def hold(
        self,
        chunks: Sequence[Any],
        optimizer: Any,
        scheduler: Any,
        make_optimizer: Callable[[list[Any]], Any],
    ) -> None:
        """Takes what was built; `make_optimizer` makes the optimizer over chunks as it was made."""
        self._chunks, self._scheduler = list(chunks), scheduler
        self._world = World(self._arguments, self._timeline, chunks, make_optimizer)
        self._world.optimizer = optimizer

    def join(self) -> Epoch | None:
        """Makes the group in which the model is built; None: of those that join together."""
        gc.freeze()  # no group is there yet: nothing of this can hold one, see `World.leave`
        together = self.membership.joins_with
        if not together:
            epoch = self.membership.first()
            self.enter(epoch)
            return epoch
        store = self.membership.store_of_joiners()
        place = parallel.JobPlace(store, together.index(self.membership.member), len(together))
        parallel.enter_job(self._arguments, place)
        return None

    def admitted(self) -> Epoch:
        """The first epoch of one that joins, who leaves those that it has built its model with."""
        self._world.leave()
        epoch = self.membership.first()
        self._mark_s = time.perf_counter()
        return epoch

    def enter(self, epoch: Epoch) -> HdpExecutor | None:
        """Makes the groups of an epoch; behind the first one all that is bound to them, too."""
        store = self.membership.enter(epoch, self._give_way)
        rank = epoch.members.index(self.membership.member)
        place = parallel.JobPlace(store, rank, len(epoch.members))
        if epoch.number == 0:
            parallel.enter_job(self._arguments, place)
            return None
        executor = self._world.enter(place)
        self.membership.has_met()
        # the learning rate of the step that was gone back to
        self._scheduler.step(increment=0)
        self._note(ENTERS)
        return executor

    def calm(self) -> None:
        """Before the waits of this rank are broken: that is no reason to end."""
        if self._told_s is None:
            self._told_s = time.perf_counter()
        if self.heartbeat is not None:
            self.heartbeat.abandon()

    def _give_way(self) -> None:
        self.calm()
        self._loop.interrupt()

    def _note(self, kind: str) -> None:
        start_s, self._mark_s = self._mark_s, time.perf_counter()
        self._spans.append(Span(kind, start_s, self._mark_s, None))

    def spans(self) -> list[Span]:
        """What the way into this epoch consisted of, to now; begins anew."""
        self._note(PREPARES)
        found = list(self._spans)
        self._spans.clear()
        return found

    def keep(
        self, version: int, state: Any, steps: list[HdpSteps], norm: float | None = None
    ) -> None:
        """Notes the state behind a step, and those that all may have to go back to."""
        self.version = version
        before = BeforeCommit(self._chunks, steps)
        self._kept[version] = _Kept(norm, self._scheduler.num_steps, before, state)
        least = min(version, self.copied) if self.shards.is_spread else version
        for old in [one for one in self._kept if one < least]:
            del self._kept[old]

    @property
    def oldest(self) -> int:
        """The oldest step that all may have to go back to."""
        return min(self._kept)

    def norm(self) -> float | None:
        """Of the gradient of the latest step that was applied; None: not known here."""
        kept = None if self.version is None else self._kept.get(self.version)
        return None if kept is None else kept.norm

    def counts(self) -> list[dict[str, Any]]:
        """What steps had counted behind the latest one, see `HdpSteps.kept`."""
        assert self.version is not None
        return self._kept[self.version].before.counts()

    def terms(self, steps: HdpSteps) -> Terms:
        """Under which the job survives."""
        place = steps.place
        together = place.lockstep_ranks
        terms = Terms(
            least=steps.least_ranks(),
            replica=together * place.num_tensor_ranks * place.num_stages,
            stages=place.num_stages,
            pause_s=self._arguments.hdp_survive_pause_seconds,
            hdp_ranks=together,
        )
        parallel.say(_words(terms, place.num_hdp_ranks))
        if nccl.backends():
            parallel.say(nccl.UNRUN)
        return terms

    def through_epochs(self, epoch: Epoch, take_part: Callable[[Epoch], _Result]) -> _Result:
        """What `take_part` returns, called for an epoch and those that follow one that ends early.

        Raises:
            NotNamedError: the job continues without this rank.
            RankFailure: too few ranks, or not all parts of the optimizer, are left.
        """
        try:
            while True:
                try:
                    with nccl.hearing(self.membership.require_ongoing):
                        return take_part(epoch)
                except EpochEnds:
                    pass
                except Exception as error:
                    if isinstance(error, RankFailure) and not isinstance(error, DataFailure):
                        raise
                    # perhaps communication failed because the epoch is over; what broken waits have
                    # left on a GPU may lead to any error, but only once it is
                    notice_s = _NOTICE_S + keys.node_timeout_s()
                    may_follow = isinstance(error, RuntimeError)
                    if not self.membership.is_over.wait(notice_s if may_follow else 0.0):
                        raise
                epoch = self._leave(epoch)  # behind the block, which holds what the step kept
        finally:
            gc.unfreeze()  # Python frees it when it ends

    @contextmanager
    def applying(self) -> Iterator[None]:
        """Around the optimizer's step, which changes nothing if its epoch ends before it could.

        It follows the vote; the optimizer itself asks others for the norm of gradients before it
        changes weights, and for nothing while it does.

        Raises:
            EpochOverError: what others said does not count.
        """
        optimizer = self._world.optimizer
        assert optimizer is not None
        get_grad_norm = optimizer.get_grad_norm

        def require_ongoing() -> None:
            if not self._catches_up:  # with those who have counted both
                self.membership.require_ongoing()

        def checked() -> Any:
            norm = get_grad_norm()
            require_ongoing()
            return norm

        require_ongoing()

        with Overrides() as overrides:
            overrides.set(optimizer, "get_grad_norm", checked)
            yield

    def _leave(self, epoch: Epoch) -> Epoch:
        """Leaves an epoch; returns the one that follows.

        Raises:
            NotNamedError: that is without this rank.
            RankFailure: a part of the optimizer is lost.
        """
        self.calm()
        self.heartbeat = None
        nccl.settle(parallel.compute_device())
        if self.version not in self._kept:
            self.version = None  # it has joined, and stood behind no step yet: it joins anew
        assert self.version is not None or epoch.number, "a joiner has no first epoch"
        vote: dict[str, Any] = {"step": -1, "norm": None, "versions": self.shards.leave()}
        if self.version is not None:
            vote |= {"step": self.version, "norm": self.norm()}
        assert self._told_s is not None
        self._mark_s = self._told_s
        self.membership.leave(vote)
        self._told_s = None  # until the next epoch nobody is told of an end
        self._note(LEAVES)
        following, votes = self.membership.settled(epoch)
        self._note(AGREES)
        if self.shards.is_spread:
            self._go_back(epoch, following, votes)
        else:
            self._catch_up(max(votes.values(), key=lambda one: one["step"]))
        if self.version in self._kept:
            self._kept[self.version].before.put_back(self._chunks)
        self._loop.drop()
        self._world.leave()
        self._note(LETS_GO)
        return following

    def _go_back(self, epoch: Epoch, following: Epoch, votes: dict[int, dict[str, Any]]) -> None:
        """To the newest step of which every part of the optimizer is left.

        Raises:
            RankFailure: there is none.
        """
        left = {member: one for member, one in votes.items() if member in following.members}
        stages = self._arguments.pipeline_model_parallel_size
        version = self.shards.choose(epoch, stages, left, self.membership.member)
        if version is None:
            raise RankFailure(
                f"{following.why}: a part of the optimizer is lost that no other rank has a copy "
                "of: the job ends, start it again from its latest checkpoint"
            )
        if self.version is None:
            return  # it never was at a step
        kept = self._kept[version]
        if version < self.version:
            self._loop.go_back(kept.state)
        self.version = version
        self._scheduler.num_steps = kept.scheduler_steps  # without an optimizer by now

    def _catch_up(self, ahead: dict[str, Any]) -> None:
        """Applies a step that another rank has applied: so all gradients of it were whole."""
        if self.version is None or self.version >= ahead["step"]:
            return
        self._catches_up = True
        with Overrides() as overrides:  # all that the optimizer would ask others for
            overrides.set(self._world.optimizer, "get_grad_norm", lambda: ahead["norm"])
            self._loop.apply()
        self._catches_up = False

    def share(self) -> None:
        """Gives joiners what the others have, who are all behind the same step.

        Every rank of an epoch but the first must call this.

        Raises:
            RankFailure: nobody was at a step.
        """
        known = gathered((self.version, None if self.version is None else self._loop.word()))
        everyone = [version for version, _ in known]
        if not any(one is not None for one in everyone):
            raise RankFailure("nobody is left who was at a step: start again from a checkpoint")
        assert len({one for one in everyone if one is not None}) == 1, everyone
        self._loop.hear([word for version, word in known if version is not None])
        if None not in everyone:
            return
        source = next(rank for rank, one in enumerate(everyone) if one is not None)
        shared: list[Any] = [None]
        if dist.get_rank() == source:
            assert self.version is not None
            shared[0] = _Shared(
                self.version, self._identities, self._scheduler.state_dict(), self._loop.shared()
            )
        dist.broadcast_object_list(shared, source, device=parallel.compute_device())
        hdp_rank = source // self._arguments.tensor_model_parallel_size
        optimizer = None if self.shards.is_spread else self._world.optimizer
        give_state(self._chunks, optimizer, hdp_rank)
        if self.version is None:
            found = shared[0]
            self.version, self._identities = found.version, found.identities
            self._scheduler.num_steps = 0  # what is loaded is added, and it may join anew
            self._scheduler.load_state_dict(found.scheduler)
            self._loop.take_over(found.state)

    def name_slow(self, speeds: Callable[[], Sequence[float]]) -> None:
        """Lets the first rank name those that are too slow; `speeds` of HDP ranks, if known."""
        bound = self._arguments.hdp_survive_least_speed
        if bound is None or not parallel.is_first_rank() or not (found := speeds()):
            return
        by_member = zip(self._identities, found, strict=True)
        slow = {member: speed for member, speed in by_member if speed < bound}
        if slow:
            self.membership.name_slow(slow)

    def make_shards(self, epoch: Epoch) -> None:
        """Puts this rank's shard together, and begins to copy; see `SurvivingShards.enter`."""
        assert self.version is not None
        self.shards.enter(epoch, self._world.optimizer, self._chunks, self.version)

    def moved(self, epoch: Epoch, steps: HdpSteps) -> list[int | None]:
        """Where each HDP rank of an epoch stood in the one before, None: it was not there."""
        place, before = steps.place, self._identities
        # the first member of each HDP rank stands for it
        end = place.num_hdp_ranks * place.num_tensor_ranks
        self._identities = epoch.members[: end : place.num_tensor_ranks]
        return [before.index(one) if one in before else None for one in self._identities]


def _words(terms: Terms, num_hdp_ranks: int) -> str:
    """What a job survives, for the log."""
    unit = f"{terms.hdp_ranks} HDP ranks that share experts leave together; "
    if num_hdp_ranks == terms.hdp_ranks:
        return (
            f"survives no loss of a rank, which ends it with exit code {ExitCode.BLAMES_ANOTHER}: "
            f"no other rank has what its {num_hdp_ranks} HDP ranks hold. Start it on more"
        )
    return (
        f"survives the loss of up to {num_hdp_ranks - terms.least} of {num_hdp_ranks} HDP ranks: "
        f"{unit if terms.hdp_ranks > 1 else ''}the longest sequence needs {terms.least}"
    )
