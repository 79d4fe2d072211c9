"""A micro-batch that runs in parts, as one forward and one backward of Megatron's schedule.

Forward takes part after part from the stage before, and hands each on as soon as it is there.
Backward, a single node of autograd to the schedule, takes the parts from the last to the first. So
neighbouring stages work on parts of one micro-batch at the same time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.pipeline_parallel.schedules import custom_backward, deallocate_output_tensor
from megatron.core.utils import get_attr_wrapped_model

from megatron_hdp.data.steps import RankMicroBatch
from megatron_hdp.megatron.execution.grad_sync import GradSync
from megatron_hdp.megatron.execution.model_pass import ModelPass, StepInProgress
from megatron_hdp.megatron.parallel import compute_device
from megatron_hdp.runtime.ring import EarlierKeys, TokenLayout, part_layouts
from megatron_hdp.runtime.streamed_comm import StreamedComm

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
    """

    model_pass: ModelPass
    config: Any
    grad_sync: GradSync
    pipeline: StreamedComm | None

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


class _Run:
    """One micro-batch: what its parts have made and are still to be given back.

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
        self._how, self._step, self._parts, self._model = how, step, parts, model
        self._layouts = layouts_of(micro_batch, how.model_pass.place.hdp_rank)
        self.num_tokens = torch.zeros((), dtype=torch.int, device=compute_device())
        self._keys: defaultdict[int, EarlierKeys] = defaultdict(EarlierKeys)
        self._made: list[tuple[torch.Tensor | None, torch.Tensor]] = []
        """Input and output of each part."""

    @property
    def _stages(self) -> StreamedComm:
        assert self._how.pipeline is not None, "a model of one stage receives and sends nothing"
        return self._how.pipeline

    def forward(self) -> torch.Tensor:
        """The sum of the loss on the last stage, else a placeholder of the output."""
        how, place = self._how, self._how.model_pass.place
        losses = []
        for layout, (part, tensors) in zip(self._layouts, self._parts, strict=True):
            received = None
            if not place.is_first_stage:
                received = self._stages.activations.receive()
                received.requires_grad_(torch.is_grad_enabled())
                get_attr_wrapped_model(self._model, "set_input_tensor")([received])
            output, loss_of = how.model_pass(
                *(self._step, part, tensors, layout, self._model),
                keys=self._keys if len(self._layouts) > 1 else None,
            )
            if place.is_last_stage:
                output, num_tokens, _ = loss_of(output)
                losses.append(output.detach())
                self.num_tokens += num_tokens
            else:
                self._stages.activations.send(output)
                deallocate_output_tensor(output, how.config.deallocate_pipeline_outputs)
            if torch.is_grad_enabled():
                self._made.append((received, output))
        if not place.is_last_stage:
            return self._stages.placeholder()
        total = torch.stack(losses).sum()
        noted = self._step.losses
        noted[-len(losses) :] = [torch.stack(noted[-len(losses) :]).sum()]
        return total

    def backward(self, gradient: torch.Tensor) -> None:
        """Goes through the parts from the last to the first; `gradient` is that of the loss."""
        how, place = self._how, self._how.model_pass.place
        noted, before = self._step.gradient_norms, len(self._step.gradient_norms)
        while self._made:
            received, output = self._made.pop()
            if not place.is_last_stage:
                gradient = self._stages.gradients.receive()
            with how.grad_sync.held_back(bool(self._made)):
                if how.config.deallocate_pipeline_outputs:
                    custom_backward(output, gradient)
                else:
                    torch.autograd.backward(output, gradient)
            if received is not None:
                assert received.grad is not None, "it was an input"
                self._stages.gradients.send(received.grad)
        if len(noted) > before:  # of the micro-batch, not of its parts
            noted[before:] = [torch.linalg.vector_norm(torch.stack(noted[before:]))]


def layouts_of(micro_batch: RankMicroBatch, hdp_rank: int) -> Sequence[TokenLayout]:
    """The layout of each part of a micro-batch on a rank; the only one if it runs whole."""
    ring, device = micro_batch.ring, compute_device()
    held = [(one.ring_slices, one.local_lengths) for one in micro_batch.in_parts()]
    if not micro_batch.parts:
        return [TokenLayout(ring, ring.index(hdp_rank), *held[0], device)]
    told = [(*one, *part[2:]) for one, part in zip(held, micro_batch.parts, strict=True)]
    return part_layouts(ring, ring.index(hdp_rank), told, device)
