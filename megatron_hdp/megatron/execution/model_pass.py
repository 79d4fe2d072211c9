"""One micro-batch on its way through a model chunk: what attention is told, and its loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import CheckpointWithoutOutput
from megatron.core.utils import get_attr_wrapped_model

from megatron_hdp.data.steps import RankMicroBatch
from megatron_hdp.megatron.execution.own_loss import Arrays, OwnLoss
from megatron_hdp.megatron.finite import norm
from megatron_hdp.megatron.model import FurtherTokens, HdpPackedSeqParams
from megatron_hdp.megatron.parallel import RankPlace, compute_device
from megatron_hdp.runtime.attention import AttentionBackend
from megatron_hdp.runtime.loss import LossSums, RoutedCounts, token_sum_loss
from megatron_hdp.runtime.offload import ActivationOffload, MicroBatchStash
from megatron_hdp.runtime.ring import EarlierKeys, RingComm, TokenLayout


@dataclass
class StepInProgress:
    """What a step is given and has found so far, for what Megatron's schedule calls back.

    The gradient's path: each micro-batch's forward (`ModelPass`) leaves its loss in
    `losses`, its backward the norm of what reached the embedding in `gradient_norms`. Behind the
    last backward `HdpExecutor._finalize` notes `reached_sync`, sums over ranks and divides.
    """

    num_sources: int = 1
    learns: bool = False
    """Whether backward follows each forward."""
    own_loss: OwnLoss | None = None
    mtp_weights: tuple[float, ...] = ()
    """Of the sum of losses at each depth behind the label."""
    losses: list[torch.Tensor] = field(default_factory=list)
    gradient_norms: list[torch.Tensor] = field(default_factory=list)
    reached_sync: Any = None
    """When this rank reached gradient sync, by its timeline."""

    def __post_init__(self) -> None:
        device = compute_device()
        self.source_losses = torch.zeros(self.num_sources, dtype=torch.float64, device=device)
        self.mtp_losses = torch.zeros(len(self.mtp_weights), dtype=torch.float64, device=device)

    def without_backward(self) -> StepInProgress:
        """The same step for forwards that keep no graph: what they find counts."""
        found = copy(self)
        found.learns = False
        return found

    def computed_again(self) -> StepInProgress:
        """For forwards that run once more, because of their graph: what they find is known."""
        return StepInProgress(self.num_sources, self.learns, self.own_loss, self.mtp_weights)

    def note_gradient(self, embedding: Any, inputs: Any, embedded: torch.Tensor) -> None:
        """Watches for the gradient of one micro-batch's embedding.

        Backward follows in the order of forward, so norms stand in that of micro-batches.
        """
        if torch.is_grad_enabled():
            # also where the embedding is frozen: recomputation differentiates what has a gradient
            embedded.requires_grad_()
            embedded.register_hook(lambda gradient: self.gradient_norms.append(norm(gradient)))

    def read_losses(self) -> tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]:
        """Those of the micro-batches, of the sources and of MTP's depths; one wait for all."""
        values = torch.hstack([*self.losses, self.source_losses, self.mtp_losses]).tolist()
        begin, end = len(self.losses), len(self.losses) + self.num_sources
        return tuple(values[:begin]), tuple(values[begin:end]), tuple(values[end:])


@dataclass(frozen=True)
class ModelPass:
    """Forward of a micro-batch through a model chunk of this rank."""

    place: RankPlace
    comm: RingComm
    attention: AttentionBackend
    offload: ActivationOffload
    fused_loss: bool

    def __call__(
        self,
        step: StepInProgress,
        micro_batch: RankMicroBatch,
        tensors: dict[str, torch.Tensor],
        layout: TokenLayout,
        model: torch.nn.Module,
        keys: Mapping[int, EarlierKeys] | None = None,
        routed: RoutedCounts | None = None,
    ) -> tuple[Any, Any]:
        """What the model makes of it, and what makes a loss of that, as Megatron's schedule asks.

        Args:
            step: of the micro-batch.
            micro_batch: whose tokens run.
            tensors: `arrays_of` the micro-batch on the device, or a part's share of them.
            layout: of these tokens.
            model: a chunk of it.
            keys: where the tokens are a part: of each layer what other parts see or have seen.
            routed: where they are a part: what routers counted of the micro-batch, in this chunk.
        """
        sums = LossSums(tensors["sources"], step.source_losses)
        params = HdpPackedSeqParams(
            qkv_format="sbhd",
            layout=layout,
            positions=tensors["axis_positions"].view(3, -1)
            if len(micro_batch.axis_positions)
            else tensors["positions"],
            tokens=micro_batch.tokens,
            sequence_index=tensors["sequence_index"],
            comm=self.comm,
            attention=self.attention,
            loss_sums=sums,
            routed=routed_of(micro_batch) if routed is None else routed,
            is_whole_loss=step.learns,
            earlier=keys,
        )
        further = params.further = self._further(step, tensors)
        own_loss = step.own_loss
        if own_loss is not None:
            params.loss_head = partial(own_loss.of, micro_batch, tensors)
        targets = {name: tensors[name][None] for name in ("labels", "loss_mask")}
        # without gradients nothing is saved, and a stream's part goes back at once
        is_saved = torch.is_grad_enabled() and not micro_batch.is_stream
        ratio = micro_batch.offload_ratio if is_saved else 0.0
        with (
            self.offload.micro_batch(ratio, layout.num_tokens) as stash,
            emptied_kept(stash),
            recomputing(model if is_saved and micro_batch.is_recomputed else None),
        ):
            # the last stage's loss or logits, else activations for the next stage
            output = model(
                tensors["tokens"][None],
                tensors["positions"][None],
                None,
                packed_seq_params=params,
                **(targets if self.fused_loss and own_loss is None else {}),
            )
        return output, partial(self._loss, step, sums=sums, further=further, **targets)

    def _further(
        self, step: StepInProgress, tensors: dict[str, torch.Tensor]
    ) -> FurtherTokens | None:
        """What MTP layers predict, on the last stage of a step that learns it."""
        weights = step.mtp_weights
        if not weights or not self.place.is_last_stage:
            return None
        shape = (len(weights), -1)
        behind = tensors["further_labels"].view(shape)
        return FurtherTokens(
            torch.cat([tensors["labels"][None], behind]),
            tensors["further_mask"].view(shape),
            weights,
        )

    def _loss(
        self,
        step: StepInProgress,
        output: torch.Tensor,
        labels: torch.Tensor,
        loss_mask: torch.Tensor,
        sums: LossSums,
        further: FurtherTokens | None,
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        loss = output
        if not self.fused_loss:
            group = parallel_state.get_tensor_model_parallel_group()
            group = group if group.size() > 1 else None
            loss = token_sum_loss(output, labels, loss_mask, group, sums)
        of_labels = loss.detach()
        if further is not None and further.label_loss is not None:
            of_labels = further.label_loss
            step.mtp_losses += torch.stack(further.losses)
        step.losses.append(of_labels)
        return loss, loss_mask.sum().to(torch.int), {}


def routed_of(micro_batch: RankMicroBatch) -> RoutedCounts:
    """Where the routers of a model chunk count a micro-batch's tokens."""
    return RoutedCounts(len(micro_batch.sequence_ids), micro_batch.num_on_ring)


def arrays_of(micro_batch: RankMicroBatch) -> Arrays:
    """What of a micro-batch goes to the device, ``[t]`` each; of padding the source is 0."""
    sources = np.array([*micro_batch.sources, 0])  # padding's index is -1, and it has no loss
    return {
        "tokens": micro_batch.tokens,
        "labels": micro_batch.labels,
        "positions": micro_batch.positions,
        "sequence_index": micro_batch.sequence_index,
        "sources": sources[micro_batch.sequence_index],
        "loss_mask": micro_batch.loss_mask,
        "further_labels": micro_batch.further_labels,
        "further_mask": micro_batch.further_mask,
        "axis_positions": micro_batch.axis_positions,
    }


@contextmanager
def recomputing(model: torch.nn.Module | None) -> Iterator[None]:
    """Within it a forward through a model chunk keeps the inputs of its layers alone.

    Megatron asks its configuration when a stack of layers runs, and what that saves knows by itself
    what to run in backward. Modules that selective recomputation runs again know since they were
    built; inside of a layer that is run again they do nothing else.
    """
    if model is None:
        yield
        return
    wanted: dict[str, Any] = {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }
    config = get_attr_wrapped_model(model, "decoder").config
    found = {name: getattr(config, name) for name in wanted}
    try:
        for name, value in wanted.items():
            setattr(config, name, value)
        yield
    finally:
        for name, value in found.items():
            setattr(config, name, value)


@contextmanager
def emptied_kept(stash: MicroBatchStash | None) -> Iterator[None]:
    """Within it the stash keeps what Megatron's recomputation of parts will empty.

    The outputs of some ``--recompute-modules`` are emptied in forward, once the next module has
    used them, and filled again before its backward.
    """
    if stash is None:
        yield
        return
    checkpoint = CheckpointWithoutOutput.checkpoint

    def noting(self: CheckpointWithoutOutput, *args: Any) -> Any:
        found = checkpoint(self, *args)
        stash.keep(self.outputs or ())
        return found

    CheckpointWithoutOutput.checkpoint = noting
    try:
        yield
    finally:
        CheckpointWithoutOutput.checkpoint = checkpoint
