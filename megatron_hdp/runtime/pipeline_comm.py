"""Activations between pipeline stages: the receiver knows every shape from the plan beforehand.

It answers the calls of Megatron's schedules: one forward and one backward in turn, and the
interleaved one with its exchange overlapped (``overlap_p2p_comm``, batches off). Messages pass in
the schedule's order, so the receiver only counts; no shape is ever exchanged.
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
Table: TypeAlias = Sequence[tuple[int, int]]
"""Micro-batch and model chunk of each forward of a stage, in order: places of a rank's list."""


class Arriving:
    """What comes from the neighbour, if anything does; the schedule waits for it as a handle."""

    def __init__(
        self, tensor: torch.Tensor | None, work: dist.Work | None, timeline: Timeline
    ) -> None:
        self._tensor = tensor
        self._work = work
        self._timeline = timeline

    def wait(self) -> None:
        """Returns when it is there."""
        if self._tensor is None or self._work is None:
            return
        with self._timeline.span(PIPELINE_WAIT):
            wait_for_stage(self._work)
        self._tensor.requires_grad_()

    def tensor(self) -> torch.Tensor | None:
        """It, arrived."""
        self.wait()
        return self._tensor

    def with_handle(self, name: str) -> tuple[torch.Tensor | None, dict[str, Arriving]]:
        """It, perhaps still on its way, and what to wait for.

        Of what is sent nothing is given: `_Messages` keeps it until it has left, and Megatron would
        wait for that at once.
        """
        return self._tensor, {} if self._tensor is None else {name: self}


class _Messages:
    """Messages over one communicator of stages, each like an empty tensor but for its shape."""

    def __init__(self, group: dist.ProcessGroup, like: torch.Tensor, timeline: Timeline) -> None:
        self._group = group
        self._like = like
        self._timeline = timeline
        self._leaving: list[tuple[dist.Work, torch.Tensor]] = []

    def exchange(
        self, sent: torch.Tensor | None, to: int, shape: Shape | None, of: int
    ) -> Arriving:
        """Begins to send to a stage and to receive from one, as one batch.

        Waits for what was sent the time before, so that two stages that send to each other do not
        block each other.
        """
        operations, received = [], None
        leaving, self._leaving = self._leaving, []
        if sent is not None:
            sent = sent.detach().contiguous()  # the schedule empties what it has sent
            operations.append(dist.P2POp(dist.isend, sent, group=self._group, group_peer=to))
        if shape is not None:
            received = self._like.new_empty(shape)
            operations.append(dist.P2POp(dist.irecv, received, group=self._group, group_peer=of))
        works = dist.batch_isend_irecv(operations) if operations else []
        if sent is not None:
            self._leaving.append((works[0], sent))
        if leaving:
            with self._timeline.span(PIPELINE_WAIT):
                for work, _ in leaving:
                    wait_for_stage(work)
        return Arriving(received, works[-1] if shape is not None else None, self._timeline)

    def finish(self) -> None:
        """Waits until everything sent has left."""
        with self._timeline.span(PIPELINE_WAIT):
            while self._leaving:
                work, _ = self._leaving.pop()
                wait_for_stage(work)


class _Circle(_Messages):
    """Messages of one kind, each from a stage to its neighbour in one direction."""

    def __init__(
        self, group: dist.ProcessGroup, step: int, like: torch.Tensor, timeline: Timeline
    ) -> None:
        super().__init__(group, like, timeline)
        size, stage = group.size(), group.rank()
        self._to, self._from = (stage + step) % size, (stage - step) % size
        self.expected: Iterator[Shape] = iter(())
        """Shapes of what this rank will receive."""

    def pass_on(self, sent: torch.Tensor | None, receives: bool) -> Arriving:
        """Begins to send and to receive."""
        shape = next(self.expected) if receives else None
        return self.exchange(sent, self._to, shape, self._from)


class Stages:
    """A rank's place among the stages of its pipeline, as Megatron's schedules ask for it.

    Attributes:
        pp_group: the stages of this rank's pipeline, in order.
        config: Megatron's model configuration, which its schedules ask for here.
        total_stages: of this pipeline.
        current_stage: this rank's, from 0.
        is_pp_first_stage: whether tokens enter the model on this rank.
        is_pp_last_stage: whether the loss is computed on this rank.
    """

    def __init__(self, pp_group: dist.ProcessGroup, config: Any) -> None:
        self.pp_group = pp_group
        self.config = config
        self.total_stages, self.current_stage = pp_group.size(), pp_group.rank()
        self.is_pp_first_stage = self.current_stage == 0
        self.is_pp_last_stage = self.current_stage == self.total_stages - 1


class PipelineComm(Stages):
    """Point-to-point traffic of one pipeline, over the communicator of its stages.

    Activations are `like` an empty tensor but for their shapes.
    """

    def __init__(
        self, pp_group: dist.ProcessGroup, config: Any, like: torch.Tensor, timeline: Timeline
    ) -> None:
        super().__init__(pp_group, config)
        self._messages = _Messages(pp_group, like, timeline)
        self._forward_shapes: Iterator[Shape] = iter(())
        self._backward_shapes: Iterator[Shape] = iter(())

    def begin(self, shapes: Sequence[Shape]) -> None:
        """Starts a step whose micro-batches, in order, have activations of these shapes."""
        self._forward_shapes, self._backward_shapes = iter(shapes), iter(shapes)

    def finish(self) -> None:
        """Waits until everything sent has left."""
        self._messages.finish()

    def recv_forward(self, _shapes: Any, is_first_stage: bool) -> One:
        """The next micro-batch's input from the stage before; None on the first stage."""
        return [None] if is_first_stage else self._before(None, next(self._forward_shapes))

    def send_forward(self, outputs: One, is_last_stage: bool) -> None:
        """Sends a micro-batch's output to the stage after."""
        if not is_last_stage:
            self._after(outputs, None)

    def recv_backward(self, _shapes: Any, is_last_stage: bool) -> One:
        """The gradient of the next micro-batch's output; None on the last stage."""
        return [None] if is_last_stage else self._after(None, next(self._backward_shapes))

    def send_backward(self, input_grads: One, is_first_stage: bool) -> None:
        """Sends the gradient of a micro-batch's input to the stage before."""
        if not is_first_stage:
            self._before(input_grads, None)

    def send_forward_recv_backward(self, outputs: One, _shapes: Any, is_last_stage: bool) -> One:
        """Sends one micro-batch's output and receives the gradient of an earlier one's."""
        return [None] if is_last_stage else self._after(outputs, next(self._backward_shapes))

    def send_backward_recv_forward(
        self, input_grads: One, _shapes: Any, is_first_stage: bool
    ) -> One:
        """Sends the gradient of one micro-batch's input and receives a later one's input."""
        return [None] if is_first_stage else self._before(input_grads, next(self._forward_shapes))

    def _before(self, sent: One | None, shape: Shape | None) -> One:
        return self._exchange(self.current_stage - 1, sent, shape)

    def _after(self, sent: One | None, shape: Shape | None) -> One:
        return self._exchange(self.current_stage + 1, sent, shape)

    def _exchange(self, stage: int, sent: One | None, shape: Shape | None) -> One:
        (tensor,) = [None] if sent is None else sent
        assert sent is None or tensor is not None, "a stage had nothing to hand on"
        return [self._messages.exchange(tensor, stage, shape, stage).tensor()]


class Interleaved:
    """What Megatron's interleaved schedule asks for, its exchange overlapped.

    Attributes:
        virtual_pipeline_model_parallel_size: model chunks of a stage.
    """

    virtual_pipeline_model_parallel_size: int

    def _hand_on(
        self, tensor: torch.Tensor | None, receives: bool, *, is_forward: bool
    ) -> Arriving:
        """Hands a tensor to the next stage on its way; what comes in turn."""
        raise NotImplementedError

    def recv_forward(self, _shape: Any, is_first_stage: bool) -> torch.Tensor | None:
        """The first micro-batch's input of the first chunk; None where tokens enter."""
        return None if is_first_stage else self._hand_on(None, True, is_forward=True).tensor()

    def recv_backward(self, _shape: Any, is_last_stage: bool) -> torch.Tensor | None:
        """The gradient of the first micro-batch's output; None where the loss is computed."""
        return None if is_last_stage else self._hand_on(None, True, is_forward=False).tensor()

    def send_forward_recv_forward(
        self,
        output_tensor: torch.Tensor | None,
        recv_prev: bool,
        tensor_shape: Any,
        overlap_p2p_comm: bool = False,
    ) -> Any:
        """Sends an output to the stage after, and receives the next forward's input."""
        received = self._hand_on(output_tensor, recv_prev, is_forward=True)
        return received.with_handle("recv_prev") if overlap_p2p_comm else received.tensor()

    def send_backward_recv_backward(
        self,
        input_tensor_grad: torch.Tensor | None,
        recv_next: bool,
        tensor_shape: Any,
        overlap_p2p_comm: bool = False,
    ) -> Any:
        """Sends an input's gradient to the stage before, and receives the next backward's."""
        received = self._hand_on(input_tensor_grad, recv_next, is_forward=False)
        return received.with_handle("recv_next") if overlap_p2p_comm else received.tensor()


class InterleavedComm(Interleaved, Stages):
    """Point-to-point traffic of one pipeline whose stages hold several model chunks.

    The stages form a circle: what the last one makes of a chunk is the first one's input of the
    next chunk. Activations and gradients have a communicator each: with two stages both go to the
    same neighbour, and what comes first depends on the stage.
    """

    def __init__(
        self,
        pp_group: dist.ProcessGroup,
        gradient_group: dist.ProcessGroup,
        num_model_chunks: int,
        config: Any,
        like: torch.Tensor,
        timeline: Timeline,
    ) -> None:
        super().__init__(pp_group, config)
        self.virtual_pipeline_model_parallel_size = num_model_chunks
        self._activations = _Circle(pp_group, 1, like, timeline)
        self._gradients = _Circle(gradient_group, -1, like, timeline)

    def begin(self, shapes: Sequence[Shape], table: Table) -> None:
        """Starts a step.

        Args:
            shapes: of the activations of each micro-batch, in order.
            table: what this rank runs forward; backward takes chunks from the last to the first.
        """
        last = self.virtual_pipeline_model_parallel_size - 1
        # the first stage receives nothing for the first chunk, whose place the last one's end takes
        for circle, is_end in (
            (self._activations, self.is_pp_first_stage),
            (self._gradients, self.is_pp_last_stage),
        ):
            circle.expected = iter([shapes[m] for m, chunk in table if not is_end or chunk < last])

    def finish(self) -> None:
        """Waits until everything sent has left."""
        self._activations.finish()
        self._gradients.finish()

    def _hand_on(
        self, tensor: torch.Tensor | None, receives: bool, *, is_forward: bool
    ) -> Arriving:
        circle = self._activations if is_forward else self._gradients
        return circle.pass_on(tensor, receives)


def wait_for_stage(work: dist.Work) -> None:
    """Says what failed if a message of another stage does not come."""
    try:
        work.wait()
    except RuntimeError as error:
        raise RuntimeError(f"a pipeline stage did not answer: {error}") from error
