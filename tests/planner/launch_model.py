"""What ranks launch in a step, and whether all of it can run: streams, and drivers that wait.

A process is a stage of a rank. Its host launches work in a fixed order and waits for none of it,
but where its driver waits for the whole device ("sync" below). A stream runs its work in order.
Communication ends once every process that takes part has got to it, on its own stream.

- compute: rings, exchanges of experts' tokens and transfers between stages. Computation itself
  takes no part in any circle; what follows an exchange waits for it.
- reduce, and one for experts: buckets of gradients, each behind what computed them.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron_hdp.planner import Plan
from megatron_hdp.planner.lockstep import PADDING

Name = tuple[object, ...]
Process = tuple[int, int]  # rank, stage


@dataclass(frozen=True)
class Launch:
    """Communication of several processes that one call launches."""

    stream: str
    names: tuple[Name, ...]


SYNC = Launch("", ())


@dataclass
class State:
    """One process: what its host has still to do, and what its streams have."""

    program: deque[Launch]
    streams: dict[str, deque[tuple[Launch, int]]] = field(default_factory=dict)
    launched: int = 0
    ended: int = 0
    """On the compute stream."""


@dataclass(frozen=True)
class Step:
    """A plan as its ranks run it."""

    plan: Plan
    slots: Sequence[np.ndarray]
    stages: int
    layers: int
    lockstep_ranks: int

    def program(self, rank: int, stage: int, overlaps: bool, deferred_order: str) -> list[Launch]:
        """Launches of a process, in order, without any sync."""
        reductions = [list(self._reductions(rank, stage, layer)) for layer in range(self.layers)]
        found: list[Launch] = []
        for kind, place in self._schedule(rank, stage):
            if kind not in "FB":
                found.append(self._transfer(kind, place, rank, stage))
                continue
            is_last = place == len(self.slots[rank]) - 1 and kind == "B"
            layers = range(self.layers) if kind == "F" else reversed(range(self.layers))
            for layer in layers:
                found += self._layer(kind, place, rank, stage, layer)
                if is_last and overlaps:
                    found += reductions[layer]
        if not overlaps:
            later = [one for layer in reversed(reductions) for one in layer]
            if deferred_order == "by kind":
                later.sort(key=lambda one: one.stream)
            found += later
        return found

    def _layer(self, kind: str, place: int, rank: int, stage: int, layer: int) -> Iterator[Launch]:
        m = int(self.slots[rank][place])
        if m != PADDING and len(self.plan.micro_batch(m).ranks) > 1:
            yield Launch("compute", ((kind, "ring", m, stage, layer),))
        if self.lockstep_ranks > 1:
            domain = rank // self.lockstep_ranks
            yield Launch("compute", ((kind, "experts", domain, place, stage, layer),))

    def _reductions(self, rank: int, stage: int, layer: int) -> Iterator[Launch]:
        yield Launch("reduce", (("reduce", stage, layer),))
        if self.lockstep_ranks > 1:
            of = rank % self.lockstep_ranks
            yield Launch("experts", (("reduce experts", of, stage, layer),))

    def _schedule(self, rank: int, stage: int) -> Iterator[tuple[str, int]]:
        """1F1B as Megatron's schedule calls it; what is exchanged at once is one word."""
        count = len(self.slots[rank])
        warm_up = min(count, self.stages - 1 - stage)
        is_first, is_last = stage == 0, stage == self.stages - 1
        for i in range(warm_up):
            if not is_first:
                yield "receive forward", i
            yield "F", i
            yield "send forward", i
        if count > warm_up and not is_first:
            yield "receive forward", warm_up
        for i in range(count - warm_up):
            yield "F", warm_up + i
            if not is_last:
                yield "send forward, receive backward", i
            yield "B", i
            if not is_first:
                more = warm_up + i + 1 < count
                yield "send backward, receive forward" if more else "send backward", i
        for i in range(count - warm_up, count):
            yield "receive backward", i
            yield "B", i
            if not is_first:
                yield "send backward", i

    def _transfer(self, words: str, i: int, rank: int, stage: int) -> Launch:
        warm_up = min(len(self.slots[rank]), self.stages - 1 - stage)
        names: dict[str, Name] = {
            "receive forward": ("forward", i, rank, stage - 1),
            "send forward": ("forward", i, rank, stage),
            "receive backward": ("backward", i, rank, stage),
            "send backward": ("backward", i, rank, stage - 1),
        }
        if words == "send forward, receive backward":
            names["send forward"] = ("forward", warm_up + i, rank, stage)
        if words == "send backward, receive forward":
            names["receive forward"] = ("forward", warm_up + i + 1, rank, stage - 1)
        return Launch("compute", tuple(names[word] for word in words.split(", ")))


def hangs(
    step: Step,
    overlaps: Sequence[bool],
    syncs: Callable[[], bool],
    deferred_order: str = "by layer",
) -> bool:
    """Whether a step comes to no end.

    Args:
        step: what runs.
        overlaps: of each rank, whether it reduces gradients inside of its last backward.
        syncs: asked after each launch of each process, whether its driver waits for its device.
        deferred_order: of reductions that begin after the last backward: "by layer" or "by kind".
    """
    states: dict[Process, State] = {}
    members: defaultdict[Name, set[Process]] = defaultdict(set)
    for rank in range(step.plan.num_ranks):
        for stage in range(step.stages):
            program: deque[Launch] = deque()
            for launch in step.program(rank, stage, overlaps[rank], deferred_order):
                program.append(launch)
                for name in launch.names:
                    members[name].add((rank, stage))
                if syncs():
                    program.append(SYNC)
            states[rank, stage] = State(program)
    arrived: defaultdict[Name, set[Process]] = defaultdict(set)
    waiting = deque(states)
    queued = set(states)
    while waiting:
        process = waiting.popleft()
        queued.discard(process)
        woken: set[Process] = set()
        while _goes_on(process, states[process], members, arrived, woken):
            pass
        for one in woken - queued:
            waiting.append(one)
            queued.add(one)
    return any(one.program or any(one.streams.values()) for one in states.values())


def _goes_on(
    process: Process,
    state: State,
    members: defaultdict[Name, set[Process]],
    arrived: defaultdict[Name, set[Process]],
    woken: set[Process],
) -> bool:
    """One round of a process; false if nothing has changed."""
    changed = False
    while state.program:
        launch = state.program[0]
        if launch is SYNC:
            if any(state.streams.values()):
                break
        else:
            behind = state.launched  # of computation, which a reduction waits for
            state.streams.setdefault(launch.stream, deque()).append((launch, behind))
            state.launched += launch.stream == "compute"
        state.program.popleft()
        changed = True
    for stream, queue in state.streams.items():
        while queue:
            launch, behind = queue[0]
            if stream != "compute" and state.ended < behind:
                break
            for name in launch.names:
                if process not in arrived[name]:
                    arrived[name].add(process)
                    if arrived[name] == members[name]:
                        woken |= members[name] - {process}
            if any(arrived[name] != members[name] for name in launch.names):
                break
            queue.popleft()
            state.ended += stream == "compute"
            changed = True
    return changed
