"""A micro-batch that runs in parts, as one forward and one backward of Megatron's schedule.

Forward takes part after part from the stage before, and hands each on as soon as it is there.
Backward, a single node of autograd to the schedule, takes the parts from the last to the first. So
neighbouring stages work on parts of one micro-batch at the same time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel.schedules import custom_backward, deallocate_output_tensor
from megatron.core.tensor_parallel import random
from megatron.core.utils import get_attr_wrapped_model

from megatron_hdp.data.steps import RankMicroBatch
from megatron_hdp.megatron.execution.grad_sync import GradSync
from megatron_hdp.megatron.execution.model_pass import ModelPass, StepInProgress, routed_of
from megatron_hdp.megatron.parallel import compute_device
from megatron_hdp.runtime.ring import (
    EarlierKeys,
    HostKeys,
    HostRoom,
    SumType,
    TokenLayout,
    part_layouts,
)
from megatron_hdp.runtime.streamed_comm import StreamedComm
from megatron_hdp.runtime.timeline import BACKWARD, FORWARD

Parts = Iterator[tuple[RankMicroBatch, dict[str, torch.Tensor]]]
"""Each part as a micro-batch of its own, and its tensors on the device."""


@dataclass(frozen=True)
class PartedPass:
    """Forward, and with it backward, of micro-batches that run in parts.

    Args:
        model_pass: forward of one part.
        config: of the model.
        grad_sync: of the step.
        pipeline: where parts come from and go to; None: the model has one stage.
        sum_type: of what a stream keeps of its keys' gradients.
    """

    model_pass: ModelPass
    config: Any
    grad_sync: GradSync
    pipeline: StreamedComm | None
    sum_type: SumType

    def __call__(
        self, step: StepInProgress, micro_batch: RankMicroBatch, parts: Parts, model: Any
    ) -> tuple[Any, Any]:
        """Output and loss function as Megatron's schedule asks; arguments as of `ModelPass`."""
        run = _Run(self, step, micro_batch, parts, model)
        if torch.is_grad_enabled():
            anchor = torch.zeros(1, device=compute_device(), requires_grad=True)
            output = _InParts.apply(anchor, run)
        else:
            output = run.forward()
        return output, lambda loss: (loss, run.num_tokens, {})


class _InParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, run: _Run) -> torch.Tensor:
        ctx.run = run
        with torch.enable_grad():
            return run.forward()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.run.backward(gradient)
        return torch.zeros(1, device=gradient.device), None


@dataclass
class _Part:
    """What a part has been given, and what it has made until its backward."""

    layout: TokenLayout
    micro_batch: RankMicroBatch
    tensors: dict[str, torch.Tensor]
    received: torch.Tensor | None = None
    output: torch.Tensor | None = None
    """None in a stream."""
    random: tuple[Any, ...] | None = None
    """Where a stream has dropout: the generators' states before its forward."""


class _Run:
    """One micro-batch: what its parts have made and are still to be given back.

    Those of a stream keep their inputs and `EarlierKeys` alone, and are computed again in backward.

    Attributes:
        num_tokens: with loss, on the last stage.
    """

    def __init__(
        self,
        how: PartedPass,
        step: StepInProgress,
        micro_batch: RankMicroBatch,
        parts: Parts,
        model: Any,
    ) -> None:
        self._how, self._step, self._model = how, step, model
        self._is_first = get_attr_wrapped_model(model, "pre_process")
        self._is_last = get_attr_wrapped_model(model, "post_process")
        self._is_stream = micro_batch.is_stream
        self._given = zip(
            layouts_of(micro_batch, how.model_pass.place.hdp_rank), parts, strict=True
        )
        self._parts: list[_Part] = []
        self._has_earlier = len(micro_batch.parts) > 1
        self.num_tokens = torch.zeros((), dtype=torch.int, device=compute_device())
        self._room = HostRoom(how.model_pass.offload)
        self._num_on_device = num_on_device(micro_batch)
        is_on_host = self._is_stream and micro_batch.offload_ratio > 0
        on_host = partial(HostKeys, self._room, how.sum_type)
        on_device = partial(EarlierKeys, how.sum_type) if self._is_stream else EarlierKeys
        self._keys: defaultdict[int, EarlierKeys] = defaultdict(
            on_host if is_on_host else on_device
        )
        self._routed = routed_of(micro_batch)

    @property
    def _stages(self) -> StreamedComm:
        assert self._how.pipeline is not None, "a model of one stage receives and sends nothing"
        return self._how.pipeline

    def _timed(self, kind: str, number: int) -> AbstractContextManager[None]:
        """What a part computes, without waits for other stages; `number` only if it has others."""
        return self._how.model_pass.comm.timeline.span(
            kind, part=number if self._has_earlier else None
        )

    def forward(self) -> torch.Tensor:
        """The sum of the loss on the last stage, else a placeholder of the output."""
        how, learns = self._how, torch.is_grad_enabled()
        keeps_graphs = learns and not self._is_stream
        step = self._step if keeps_graphs else self._step.without_backward()
        losses = []
        for number, (layout, (micro_batch, tensors)) in enumerate(self._given):
            part = _Part(layout, micro_batch, tensors)
            self._room.stays = number < self._num_on_device
            if not self._is_first:
                part.received = self._stages.activations.receive()
            if how.config.hidden_dropout and not keeps_graphs:
                part.random = random._get_all_rng_states()
            with torch.set_grad_enabled(keeps_graphs), self._timed(FORWARD, number):
                output, num_tokens = self._output_of(part, step)
            if self._is_last:
                losses.append(output.detach())
                self.num_tokens += num_tokens
            else:
                self._stages.activations.send(output)
                deallocate_output_tensor(output, how.config.deallocate_pipeline_outputs)
            if keeps_graphs:
                part.output, part.tensors = output, {}
            if learns:
                self._parts.append(part)
        if not self._is_last:
            return self._stages.placeholder()
        total = torch.stack(losses).sum()
        noted = self._step.losses
        noted[-len(losses) :] = [torch.stack(noted[-len(losses) :]).sum()]
        return total

    def _output_of(self, part: _Part, step: StepInProgress) -> tuple[torch.Tensor, torch.Tensor]:
        """Forward of a part, the loss on the last stage, and its tokens with loss there."""
        if part.received is not None:
            part.received.requires_grad_(torch.is_grad_enabled())
            get_attr_wrapped_model(self._model, "set_input_tensor")([part.received])
        output, loss_of = self._how.model_pass(
            *(step, part.micro_batch, part.tensors, part.layout, self._model),
            keys=self._keys if self._has_earlier else None,
            routed=self._routed,
        )
        if not self._is_last:
            return output, self.num_tokens
        output, num_tokens, _ = loss_of(output)
        return output, num_tokens

    def _again(self, part: _Part, number: int) -> torch.Tensor:
        """The output of a stream's part, with a graph, from the same random numbers."""
        with torch.enable_grad(), self._timed(BACKWARD, number), ExitStack() as stack:
            if part.random is not None:
                stack.enter_context(random._fork_rng())
                random._set_all_rng_states(*part.random)
            output, _ = self._output_of(part, self._step.computed_again())
        return output

    def backward(self, gradient: torch.Tensor) -> None:
        """Goes through the parts from the last to the first; `gradient` is that of the loss."""
        how = self._how
        noted, before = self._step.gradient_norms, len(self._step.gradient_norms)
        while self._parts:
            part, number = self._parts.pop(), len(self._parts)
            output = self._again(part, number) if part.output is None else part.output
            if not self._is_last:
                gradient = self._stages.gradients.receive()
            with how.grad_sync.held_back(bool(self._parts)), self._timed(BACKWARD, number):
                if how.config.deallocate_pipeline_outputs and part.output is not None:
                    custom_backward(output, gradient)
                else:
                    torch.autograd.backward(output, gradient)
            if part.received is not None:
                assert part.received.grad is not None, "it was an input"
                self._stages.gradients.send(part.received.grad)
        if len(noted) > before:  # of the micro-batch, not of its parts
            noted[before:] = [torch.linalg.vector_norm(torch.stack(noted[before:]))]


def num_on_device(micro_batch: RankMicroBatch) -> int:
    """Parts of a stream, the first ones, that keep keys and values on the device."""
    num_parts = len(micro_batch.parts)
    return num_parts - round(micro_batch.offload_ratio * num_parts)


def layouts_of(micro_batch: RankMicroBatch, hdp_rank: int) -> Sequence[TokenLayout]:
    """The layout of each part of a micro-batch on a rank; the only one if it runs whole."""
    ring, device = micro_batch.ring, compute_device()
    held = [(one.ring_slices, one.local_lengths) for one in micro_batch.in_parts()]
    if not micro_batch.parts:
        return [TokenLayout(ring, ring.index(hdp_rank), *held[0], device)]
    told = [(*one, *part[2:]) for one, part in zip(held, micro_batch.parts, strict=True)]
    return part_layouts(ring, ring.index(hdp_rank), told, device, micro_batch.is_stream)
