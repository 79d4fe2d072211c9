"""Activations between stages of several model chunks: shapes known from the plan, transfers beside
the compute.

It answers the calls of Megatron's interleaved schedule with its exchange overlapped
(``overlap_p2p_comm``, batches off). The stages form a circle: what the last one makes of a chunk is
the first one's input of the next chunk. Messages pass in the schedule's order, so the receiver only
counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from megatron_hdp.runtime.pipeline_comm import Shape, Stages, wait_for_stage
from megatron_hdp.runtime.timeline import PIPELINE_WAIT, Timeline

Table: TypeAlias = Sequence[tuple[int, int]]
"""Micro-batch and model chunk of each forward of a stage, in order: places of a rank's list."""


class InterleavedComm(Stages):
    """Point-to-point traffic of one pipeline whose stages hold several model chunks.

    Activations and gradients have a communicator each: with two stages both go to the same
    neighbour, and what comes first depends on the stage.

    Attributes:
        virtual_pipeline_model_parallel_size: model chunks of a stage.
    """

    def __init__(
        self,
        pp_group: dist.ProcessGroup,
        gradient_group: dist.ProcessGroup,
        num_model_chunks: int,
        config: Any,
        dtype: torch.dtype,
        device: torch.device,
        timeline: Timeline,
    ) -> None:
        super().__init__(pp_group, config)
        self.virtual_pipeline_model_parallel_size = num_model_chunks
        self._timeline = timeline
        like = torch.empty(0, dtype=dtype, device=device)
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
        self._activations.expected = iter(
            [shapes[m] for m, chunk in table if not self.is_pp_first_stage or chunk < last]
        )
        self._gradients.expected = iter(
            [shapes[m] for m, chunk in table if not self.is_pp_last_stage or chunk < last]
        )

    def finish(self) -> None:
        """Waits until everything sent has left."""
        with self._timeline.span(PIPELINE_WAIT):
            self._activations.finish()
            self._gradients.finish()

    def recv_forward(self, _shape: Any, is_first_stage: bool) -> torch.Tensor | None:
        """The first micro-batch's input of the first chunk; None where tokens enter."""
        return None if is_first_stage else self._activations.exchange(None, True).tensor()

    def recv_backward(self, _shape: Any, is_last_stage: bool) -> torch.Tensor | None:
        """The gradient of the first micro-batch's output; None where the loss is computed."""
        return None if is_last_stage else self._gradients.exchange(None, True).tensor()

    def send_forward_recv_forward(
        self,
        output_tensor: torch.Tensor | None,
        recv_prev: bool,
        tensor_shape: Any,
        overlap_p2p_comm: bool = False,
    ) -> Any:
        """Sends an output to the stage after, and receives the next forward's input."""
        received = self._activations.exchange(output_tensor, recv_prev)
        return received.with_handle("recv_prev") if overlap_p2p_comm else received.tensor()

    def send_backward_recv_backward(
        self,
        input_tensor_grad: torch.Tensor | None,
        recv_next: bool,
        tensor_shape: Any,
        overlap_p2p_comm: bool = False,
    ) -> Any:
        """Sends an input's gradient to the stage before, and receives the next backward's."""
        received = self._gradients.exchange(input_tensor_grad, recv_next)
        return received.with_handle("recv_next") if overlap_p2p_comm else received.tensor()


class _Arriving:
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

    def with_handle(self, name: str) -> tuple[torch.Tensor | None, dict[str, _Arriving]]:
        """It, perhaps still on its way, and what to wait for.

        Of what is sent nothing is given: the circle keeps it until it has left, and Megatron would
        wait for that at once.
        """
        return self._tensor, {} if self._tensor is None else {name: self}


class _Circle:
    """Messages of one kind, each from a stage to its neighbour in one direction."""

    def __init__(
        self, group: dist.ProcessGroup, step: int, like: torch.Tensor, timeline: Timeline
    ) -> None:
        size, stage = group.size(), group.rank()
        self._group = group
        self._to, self._from = (stage + step) % size, (stage - step) % size
        self._like = like
        self._timeline = timeline
        self._leaving: list[tuple[dist.Work, torch.Tensor]] = []
        self.expected: Iterator[Shape] = iter(())
        """Shapes of what this rank will receive."""

    def exchange(self, sent: torch.Tensor | None, receives: bool) -> _Arriving:
        """Begins to send and to receive, as one batch; waits for what it sent the time before."""
        operations, received = [], None
        leaving, self._leaving = self._leaving, []
        if sent is not None:
            sent = sent.detach().contiguous()  # the schedule empties what it has sent
            operations.append(dist.P2POp(dist.isend, sent, group=self._group, group_peer=self._to))
        if receives:
            received = self._like.new_empty(next(self.expected))
            operations.append(
                dist.P2POp(dist.irecv, received, group=self._group, group_peer=self._from)
            )
        works = dist.batch_isend_irecv(operations) if operations else []
        if sent is not None:
            self._leaving.append((works[0], sent))
        if leaving:
            with self._timeline.span(PIPELINE_WAIT):
                for work, _ in leaving:
                    wait_for_stage(work)
        return _Arriving(received, works[-1] if receives else None, self._timeline)

    def finish(self) -> None:
        """Waits until everything sent has left."""
        while self._leaving:
            work, _ = self._leaving.pop()
            wait_for_stage(work)
