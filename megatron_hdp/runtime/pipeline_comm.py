"""Activations between pipeline stages: the receiver knows every shape from the plan beforehand.

It answers the calls of Megatron's one-forward-one-backward schedule. Micro-batches pass in order,
forward and backward each, so the receiver only counts; no shape is ever exchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from megatron_hdp.runtime.timeline import PIPELINE_WAIT, Timeline

Shape: TypeAlias = tuple[int, ...]
One: TypeAlias = list[torch.Tensor | None]
"""The schedule passes tensors in lists; a GPT's stages hand on a single one, an end of the pipeline
none."""


class Stages:
    """A rank's place among the stages of its pipeline, as Megatron's schedules ask for it.

    Attributes:
        pp_group: the stages of this rank's pipeline, in order.
        config: Megatron's model configuration, which its schedules ask for here.
    """

    def __init__(self, pp_group: dist.ProcessGroup, config: Any) -> None:
        self.pp_group = pp_group
        self.config = config

    @property
    def total_stages(self) -> int:
        """Stages of this rank's pipeline."""
        return int(self.pp_group.size())

    @property
    def current_stage(self) -> int:
        """This rank's stage, from 0."""
        return int(self.pp_group.rank())

    @property
    def is_pp_first_stage(self) -> bool:
        """Whether tokens enter the model on this rank."""
        return self.current_stage == 0

    @property
    def is_pp_last_stage(self) -> bool:
        """Whether the loss is computed on this rank."""
        return self.current_stage == self.total_stages - 1


class PipelineComm(Stages):
    """Point-to-point traffic of one pipeline, over the communicator of its stages.

    A send is waited for when the next one starts, so that two stages that send to each other do not
    block each other.
    """

    def __init__(
        self,
        pp_group: dist.ProcessGroup,
        config: Any,
        dtype: torch.dtype,
        device: torch.device,
        timeline: Timeline,
    ) -> None:
        super().__init__(pp_group, config)
        self._dtype = dtype
        self._device = device
        self._timeline = timeline
        self._forward_shapes: Iterator[Shape] = iter(())
        self._backward_shapes: Iterator[Shape] = iter(())
        self._leaving: list[tuple[dist.Work, torch.Tensor]] = []

    def begin(self, shapes: Sequence[Shape]) -> None:
        """Starts a step whose micro-batches, in order, have activations of these shapes."""
        self._forward_shapes, self._backward_shapes = iter(shapes), iter(shapes)

    def finish(self) -> None:
        """Waits until everything sent has left."""
        with self._timeline.span(PIPELINE_WAIT):
            while self._leaving:
                work, _ = self._leaving.pop()
                wait_for_stage(work)

    def recv_forward(self, _shapes: Any, is_first_stage: bool) -> One:
        """The next micro-batch's input from the stage before; None on the first stage."""
        if is_first_stage:
            return [None]
        return self._exchange(-1, None, next(self._forward_shapes))

    def send_forward(self, outputs: One, is_last_stage: bool) -> None:
        """Sends a micro-batch's output to the stage after."""
        if not is_last_stage:
            self._exchange(1, outputs, None)

    def recv_backward(self, _shapes: Any, is_last_stage: bool) -> One:
        """The gradient of the next micro-batch's output; None on the last stage."""
        if is_last_stage:
            return [None]
        return self._exchange(1, None, next(self._backward_shapes))

    def send_backward(self, input_grads: One, is_first_stage: bool) -> None:
        """Sends the gradient of a micro-batch's input to the stage before."""
        if not is_first_stage:
            self._exchange(-1, input_grads, None)

    def send_forward_recv_backward(self, outputs: One, _shapes: Any, is_last_stage: bool) -> One:
        """Sends one micro-batch's output and receives the gradient of an earlier one's."""
        if is_last_stage:
            return [None]
        return self._exchange(1, outputs, next(self._backward_shapes))

    def send_backward_recv_forward(
        self, input_grads: One, _shapes: Any, is_first_stage: bool
    ) -> One:
        """Sends the gradient of one micro-batch's input and receives a later one's input."""
        if is_first_stage:
            return [None]
        return self._exchange(-1, input_grads, next(self._forward_shapes))

    def _exchange(self, steps: int, sent: One | None, shape: Shape | None) -> One:
        """Sends to and receives from the stage `steps` further, as one batch."""
        peer = self.pp_group.rank() + steps
        operations, received = [], None
        leaving, self._leaving = self._leaving, []
        if sent is not None:
            (tensor,) = sent
            assert tensor is not None, "a stage had nothing to hand on"
            tensor = tensor.detach().contiguous()  # the schedule empties what it has sent
            operations.append(dist.P2POp(dist.isend, tensor, group=self.pp_group, group_peer=peer))
        if shape is not None:
            received = torch.empty(shape, dtype=self._dtype, device=self._device)
            operations.append(
                dist.P2POp(dist.irecv, received, group=self.pp_group, group_peer=peer)
            )
        works = dist.batch_isend_irecv(operations)
        if sent is not None:
            self._leaving.append((works[0], tensor))
        with self._timeline.span(PIPELINE_WAIT):
            for work, _ in leaving:
                wait_for_stage(work)
            if received is not None:
                wait_for_stage(works[-1])
                received.requires_grad_()
        return [received]


def wait_for_stage(work: dist.Work) -> None:
    """Waits for a message of another stage; says what failed if it does not come."""
    try:
        work.wait()
    except RuntimeError as error:
        raise RuntimeError(f"a pipeline stage did not answer: {error}") from error
