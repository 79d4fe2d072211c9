"""Activations between pipeline stages part by part: a part leaves while the next one is computed.

Megatron's schedules decide what runs in which order, and are told nothing of
parts: it asks for an input, hands on an output, and gets and gives placeholders. What stages really
send passes inside of its forwards and backwards, in the schedule's order.

Activations and gradients have a communicator each, and each pair of neighbours a stream within it
(messages are not batched), so a message waits for nothing but those before it on its way. Nobody
waits for what it sends, and what it receives was sent before anything that waits for it, so the
parts of a schedule that ends, end. With several model chunks the stages form a circle. What passes
from one end to the other has a stream of its own, too: of two stages that is one more communicator,
since a pair of ranks has one stream in each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_hdp.runtime.pipeline_comm import (
    Arriving,
    Interleaved,
    One,
    Shape,
    Stages,
    Table,
    wait_for_stage,
)
from megatron_hdp.runtime.timeline import PIPELINE_WAIT, Timeline


class _Link(NamedTuple):
    """The messages of one kind between this stage and one neighbour, all of them one way."""

    group: dist.ProcessGroup
    other: int
    turn: int
    """When the two connect."""

    def send(self, tensor: torch.Tensor) -> dist.Work:
        work = dist.isend(tensor, group=self.group, group_dst=self.other)
        assert work is not None, "this rank is of the group"
        return work

    def receive(self, tensor: torch.Tensor) -> dist.Work:
        work = dist.irecv(tensor, group=self.group, group_src=self.other)
        assert work is not None, "this rank is of the group"
        return work


class _Way:
    """Messages of one kind from one neighbour to this stage, and from it to the other neighbour.

    Args:
        group: communicator of the pipeline's stages.
        around: of those between its ends, where stages form a circle; None: they do not.
        step: 1 if they pass to later stages, -1 if to earlier ones.
        like: an empty tensor that they are like but for their shapes.
        timeline: notes what is waited for.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        around: dist.ProcessGroup | None,
        step: int,
        like: torch.Tensor,
        timeline: Timeline,
    ) -> None:
        self._like, self._timeline = like, timeline
        stage, stages = group.rank(), group.size()

        def link(other: int) -> _Link | None:
            if 0 <= other < stages:
                return _Link(group, other, min(stage, other) % 2)
            return None if around is None else _Link(around, other % stages, 2)

        self._to, self._from = link(stage + step), link(stage - step)
        self._expected: Iterator[Shape] = iter(())
        self._coming: deque[tuple[torch.Tensor, dist.Work]] = deque()
        self._leaving: deque[tuple[torch.Tensor, dist.Work]] = deque()
        self._connect()

    def _connect(self) -> None:
        """Lets neighbours talk once, pair after pair: NCCL blocks both until they have."""
        token = self._like.new_zeros(1)
        for turn in (0, 1, 2):
            if self._to is not None and self._to.turn == turn:
                wait_for_stage(self._to.send(token))
            if self._from is not None and self._from.turn == turn:
                wait_for_stage(self._from.receive(token))

    def begin(self, shapes: Sequence[Shape]) -> None:
        """Starts a step in which messages of these shapes come."""
        self._expected = iter(shapes)
        self._ask()

    def _ask(self) -> None:
        shape = next(self._expected, None)
        if shape is not None:
            assert self._from is not None, "messages come from somewhere"
            tensor = self._like.new_empty(shape)
            self._coming.append((tensor, self._from.receive(tensor)))

    def receive(self) -> torch.Tensor:
        """The next message; the one after it is asked for before this one is waited for."""
        tensor, work = self._coming.popleft()
        self._ask()
        with self._timeline.span(PIPELINE_WAIT):
            wait_for_stage(work)
        return tensor

    def send(self, tensor: torch.Tensor) -> None:
        """Begins to send a message, which must not change any more."""
        assert self._to is not None, "messages go somewhere"
        sent = tensor.detach().contiguous()
        self._leaving.append((sent, self._to.send(sent)))
        while len(self._leaving) > 1 and self._leaving[0][1].is_completed():
            self._leaving.popleft()

    def finish(self) -> None:
        """Waits until everything sent has left."""
        while self._leaving:
            _, work = self._leaving.popleft()
            with self._timeline.span(PIPELINE_WAIT):
                wait_for_stage(work)


class StreamedComm(Stages):
    """Point-to-point traffic of one pipeline whose micro-batches pass in parts.

    Args:
        groups: communicators of the stages: of activations, of gradients; with several chunks, of
            either between the pipeline's ends. With more than two stages they may be the same.
        config: Megatron's model configuration.
        like: an empty tensor that activations are like but for their shapes.
        timeline: notes what is waited for.

    Attributes:
        activations: messages to later stages.
        gradients: messages to earlier stages.
    """

    def __init__(
        self,
        groups: Sequence[dist.ProcessGroup],
        config: Any,
        like: torch.Tensor,
        timeline: Timeline,
    ) -> None:
        super().__init__(groups[0], config)
        self._like, self._timeline = like, timeline
        around = groups[2:] or (None, None)
        self.activations = _Way(groups[0], around[0], 1, like, timeline)
        self.gradients = _Way(groups[1], around[1], -1, like, timeline)

    def begin(self, shapes: Sequence[Sequence[Shape]], table: Table, forward_only: bool) -> None:
        """Starts a step.

        Args:
            shapes: of the activations of each part of each micro-batch, in order.
            table: what this rank runs forward; backward takes chunks from the last to the first.
            forward_only: no gradients come.
        """
        # backward's first chunk is the last one: nothing comes where the loss is
        there, back = (
            [shapes[m] for m, chunk in table if chunk or not is_end]
            for is_end in (self.is_pp_first_stage, self.is_pp_last_stage)
        )
        self.activations.begin(list(chain.from_iterable(there)))
        backwards = () if forward_only else chain.from_iterable(one[::-1] for one in back)
        self.gradients.begin(list(backwards))

    def finish(self) -> None:
        """Waits until everything sent has left."""
        self.activations.finish()
        self.gradients.finish()

    def placeholder(self) -> torch.Tensor:
        """What the schedule hands on in the place of messages."""
        return self._like.new_zeros(1)


class StreamedLine(StreamedComm):
    """Placeholders for what the schedule of one forward and one backward in turn exchanges."""

    def recv_forward(self, _shapes: Any, is_first_stage: bool) -> One:
        """A placeholder for the next micro-batch's input; None on the first stage."""
        return [None if is_first_stage else self.placeholder().requires_grad_()]

    def send_forward(self, outputs: One, is_last_stage: bool) -> None:
        """The parts have left by themselves."""

    def recv_backward(self, _shapes: Any, is_last_stage: bool) -> One:
        """A placeholder for the gradient of the next micro-batch's output."""
        return [None if is_last_stage else self.placeholder()]

    def send_backward(self, input_grads: One, is_first_stage: bool) -> None:
        """The parts have left by themselves."""

    def send_forward_recv_backward(self, outputs: One, _shapes: Any, is_last_stage: bool) -> One:
        """A placeholder for the gradient of an earlier micro-batch's output."""
        return self.recv_backward(_shapes, is_last_stage)

    def send_backward_recv_forward(
        self, input_grads: One, _shapes: Any, is_first_stage: bool
    ) -> One:
        """A placeholder for a later micro-batch's input."""
        return self.recv_forward(_shapes, is_first_stage)


class StreamedCircle(Interleaved, StreamedComm):
    """Placeholders for what the interleaved schedule exchanges."""

    def __init__(self, num_model_chunks: int, *args: Any) -> None:
        super().__init__(*args)
        self.virtual_pipeline_model_parallel_size = num_model_chunks

    def _hand_on(
        self, tensor: torch.Tensor | None, receives: bool, *, is_forward: bool
    ) -> Arriving:
        found = self.placeholder().requires_grad_(is_forward) if receives else None
        return Arriving(found, None, self._timeline)
