"""Runs one rank's micro-batches of a plan with Megatron's own schedule, DDP and finalisation.

Ranks may run different numbers of micro-batches: gradients are sums over tokens, reduced once after
the last one and divided once by the global batch's loss tokens, which every rank knows from the
plan.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining
from megatron.core.utils import get_model_config

from megatron_hdp.data import RankMicroBatch
from megatron_hdp.megatron.attention import HdpPackedSeqParams
from megatron_hdp.runtime.kernels import AttentionKernel
from megatron_hdp.runtime.layout import TokenLayout
from megatron_hdp.runtime.loss import token_sum_loss
from megatron_hdp.runtime.ring_comm import RingComm
from megatron_hdp.runtime.timeline import FORWARD, RING_WAIT, SYNC


@dataclass(frozen=True)
class RankOutcome:
    """What one rank did in one step, before anything was exchanged with the others."""

    losses: tuple[float, ...]
    """Sum of the token losses of each of this rank's micro-batches, in their order."""
    until_sync_s: float
    """Seconds from the step's start until this rank reached gradient sync."""
    busy_s: float
    """The same without waiting for ring members."""
    ring_bytes: int


class HdpExecutor:
    """Executes the micro-batches of one HDP rank."""

    def __init__(
        self, model: DistributedDataParallel, comm: RingComm, kernel: AttentionKernel
    ) -> None:
        self.model = model
        self.comm = comm
        self.kernel = kernel
        self._losses: list[torch.Tensor] = []
        self._reached_sync = 0.0
        config = get_model_config(model)
        if not config.calculate_per_token_loss:
            raise ValueError("the model's config must have calculate_per_token_loss = True")
        config.no_sync_func = model.no_sync

    def run(
        self,
        micro_batches: Iterable[RankMicroBatch],
        num_micro_batches: int,
        num_loss_tokens: int,
        forward_only: bool = False,
    ) -> RankOutcome:
        """Forward and backward of every micro-batch, then gradient sync.

        Args:
            micro_batches: this rank's, in the plan's order; read one by one.
            num_micro_batches: how many; at least one on every rank.
            num_loss_tokens: loss tokens of the *global* batch, the divisor of every gradient.
            forward_only: no backward and no gradient sync (evaluation).
        """
        self.comm.bytes_sent = 0
        self.comm.timeline.reset()
        self._losses = []
        config = get_model_config(self.model)
        config.finalize_model_grads_func = partial(self._finalize, num_loss_tokens)
        started = time.perf_counter()
        forward_backward_no_pipelining(
            forward_step_func=self._forward_step,
            data_iterator=iter(micro_batches),
            model=[self.model],
            num_microbatches=num_micro_batches,
            seq_length=1,  # not used without pipeline stages
            micro_batch_size=1,
            forward_only=forward_only,
        )
        if forward_only:
            self._reached_sync = time.perf_counter()
        until_sync_s = self._reached_sync - started
        return RankOutcome(
            losses=tuple(torch.stack(self._losses).tolist()),
            until_sync_s=until_sync_s,
            busy_s=until_sync_s - self.comm.timeline.totals_s[RING_WAIT],
            ring_bytes=self.comm.bytes_sent,
        )

    def _forward_step(self, micro_batches: Any, model: torch.nn.Module) -> tuple[Any, Any]:
        micro_batch: RankMicroBatch = next(micro_batches)
        device = next(model.parameters()).device
        tokens, labels, positions, loss_mask = (
            torch.from_numpy(x).to(device, non_blocking=True)
            for x in (
                micro_batch.tokens,
                micro_batch.labels,
                micro_batch.positions,
                micro_batch.loss_mask,
            )
        )
        me = parallel_state.get_data_parallel_rank()
        layout = TokenLayout(
            ring=micro_batch.ring,
            index=micro_batch.ring.index(me),
            ring_slices=micro_batch.ring_slices,
            local_lengths=micro_batch.local_lengths,
            device=device,
        )
        params = HdpPackedSeqParams(
            qkv_format="sbhd",
            layout=layout,
            positions=positions,
            comm=self.comm,
            kernel=self.kernel,
        )
        with self.comm.timeline.span(FORWARD, len(self._losses)):
            logits = model(tokens[None], positions[None], None, packed_seq_params=params)
        return logits, partial(self._loss, labels[None], loss_mask[None])

    def _loss(
        self, labels: torch.Tensor, loss_mask: torch.Tensor, logits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        group = parallel_state.get_tensor_model_parallel_group()
        loss = token_sum_loss(logits, labels, loss_mask, group if group.size() > 1 else None)
        self._losses.append(loss.detach())
        return loss, loss_mask.sum().to(torch.int), {}

    def _finalize(
        self, num_loss_tokens: int, model: list[Any], num_tokens: Any = None, **kwargs: Any
    ) -> None:
        """Stock gradient finalisation, dividing in double precision by a count known beforehand."""
        self._reached_sync = time.perf_counter()
        with self.comm.timeline.span(SYNC):
            finalize_model_grads(model, None, **kwargs)
        for chunk in model:
            chunk.scale_gradients(1.0 / max(num_loss_tokens, 1))
