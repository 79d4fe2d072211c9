"""Activations between pipeline stages part by part: a part leaves while the next one is computed.

Megatron's schedule without interleaving decides what runs in which order, and is told nothing of
parts: it asks for an input, hands on an output, and gets and gives placeholders. What stages really
send passes inside of its forwards and backwards, in the schedule's order.

Activations and gradients have a communicator each, and each pair of neighbours a stream within it
(messages are not batched), so a message waits for nothing but those before it on its way. Nobody
waits for what it sends, and what it receives was sent before anything that waits for it, so the
parts of a schedule that ends, end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist

from megatron_hdp.runtime.pipeline_comm import One, Shape, Stages, wait_for_stage
from megatron_hdp.runtime.timeline import PIPELINE_WAIT, Timeline


class _Way:
    """Messages of one kind from one neighbour to this stage, and from it to the other neighbour.

    Args:
        group: communicator of the pipeline's stages.
        step: 1 if they pass to later stages, -1 if to earlier ones.
        like: an empty tensor that they are like but for their shapes.
        timeline: notes what is waited for.
    """

    def __init__(
        self, group: dist.ProcessGroup, step: int, like: torch.Tensor, timeline: Timeline
    ) -> None:
        self._group, self._like, self._timeline = group, like, timeline
        stage, stages = group.rank(), group.size()
        self._to = stage + step if 0 <= stage + step < stages else None
        self._from = stage - step if 0 <= stage - step < stages else None
        self._expected: Iterator[Shape] = iter(())
        self._coming: deque[tuple[torch.Tensor, dist.Work]] = deque()
        self._leaving: deque[tuple[torch.Tensor, dist.Work]] = deque()
        self._connect(stage)

    def _connect(self, stage: int) -> None:
        """Lets neighbours talk once, pair after pair: NCCL blocks both until they have."""
        token = self._like.new_zeros(1)
        for parity in (0, 1):
            for other, call in ((self._to, dist.isend), (self._from, dist.irecv)):
                if other is not None and min(stage, other) % 2 == parity:
                    wait_for_stage(call(token, group=self._group, **_peer(call, other)))

    def begin(self, shapes: Sequence[Shape]) -> None:
        """Starts a step in which messages of these shapes come."""
        self._expected = iter(shapes if self._from is not None else ())
        self._ask()

    def _ask(self) -> None:
        shape = next(self._expected, None)
        if shape is not None:
            tensor = self._like.new_empty(shape)
            work = dist.irecv(tensor, group=self._group, group_src=self._from)
            assert work is not None, "this rank is of the group"
            self._coming.append((tensor, work))

    def receive(self) -> torch.Tensor:
        """The next message; the one after it is asked for before this one is waited for."""
        tensor, work = self._coming.popleft()
        self._ask()
        with self._timeline.span(PIPELINE_WAIT):
            wait_for_stage(work)
        return tensor

    def send(self, tensor: torch.Tensor) -> None:
        """Begins to send a message, which must not change any more."""
        if self._to is None:
            return
        sent = tensor.detach().contiguous()
        work = dist.isend(sent, group=self._group, group_dst=self._to)
        assert work is not None, "this rank is of the group"
        self._leaving.append((sent, work))
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

    Attributes:
        activations: messages to later stages.
        gradients: messages to earlier stages.
    """

    def __init__(
        self,
        pp_group: dist.ProcessGroup,
        gradient_group: dist.ProcessGroup,
        config: Any,
        like: torch.Tensor,
        timeline: Timeline,
    ) -> None:
        super().__init__(pp_group, config)
        self._like = like
        self.activations = _Way(pp_group, 1, like, timeline)
        self.gradients = _Way(gradient_group, -1, like, timeline)

    def begin(self, shapes: Sequence[Sequence[Shape]], forward_only: bool) -> None:
        """Starts a step.

        Args:
            shapes: of the activations of each part of each micro-batch, in order.
            forward_only: no gradients come.
        """
        self.activations.begin(list(chain.from_iterable(shapes)))
        backwards = () if forward_only else chain.from_iterable(one[::-1] for one in shapes)
        self.gradients.begin(list(backwards))

    def finish(self) -> None:
        """Waits until everything sent has left."""
        self.activations.finish()
        self.gradients.finish()

    def placeholder(self) -> torch.Tensor:
        """What the schedule hands on in the place of messages."""
        return self._like.new_zeros(1)

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


def _peer(call: Any, other: int) -> dict[str, int]:
    return {"group_dst" if call is dist.isend else "group_src": other}
