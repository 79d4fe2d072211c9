"""Runs a case on every rank of the job at once and says what it took, the same on all of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist

from megatron_hdp.arrays import Int64Array
from megatron_hdp.data.steps import FEWEST_TOKENS, RankMicroBatch, padding_micro_batch
from megatron_hdp.megatron.execution import HdpExecutor
from megatron_hdp.megatron.model import HdpPackedSeqParams, model_dtype, without_shared_experts
from megatron_hdp.megatron.options import TrainingArguments, expert_layers, head_sizes
from megatron_hdp.megatron.parallel import compute_device
from megatron_hdp.planner.slices import chunks_of
from megatron_hdp.profile.cases import ATTENTION, COMPUTE, EXPERTS, RING, TRANSFER, Case
from megatron_hdp.runtime.attention import RunShapes
from megatron_hdp.runtime.gathering import gathered
from megatron_hdp.runtime.loss import RoutedCounts
from megatron_hdp.runtime.offload import select_copy_engine
from megatron_hdp.runtime.ring import TokenLayout

_HOPS = 4  # of a transfer at a time
_COPY_BYTES = 32 * 2**20
_COPIES = 7


class Bench:
    """Times cases on this rank's executor; every rank must make one, and give it the same cases."""

    def __init__(
        self, arguments: TrainingArguments, executor: HdpExecutor, vocab_size: int, seed: int = 0
    ) -> None:
        self._arguments = arguments
        self._executor = executor
        self._place = executor.place
        self._vocab_size = vocab_size
        self._device = compute_device()
        self._rng = np.random.default_rng(seed)
        self._runs: dict[str, Callable[[Case], float]] = {
            COMPUTE: self._micro_batch_s,
            RING: self._micro_batch_s,
            ATTENTION: self._attention_s,
            EXPERTS: self._experts_s,
            TRANSFER: self._transfer_s,
        }
        self._began_s: float | None = None
        self.elapsed_s = 0.0
        """Seconds since the first case began, of the rank that waited longest."""

    def seconds(self, case: Case) -> float:
        """What a case takes: of a ring its slowest member, else the median over the HDP ranks."""
        dist.all_reduce(torch.zeros(1, device=self._device))  # a common start
        if self._began_s is None:
            self._began_s = time.perf_counter()
        own_s = self._runs[case.kind](case)
        mine = [own_s, self._place.hdp_rank, time.perf_counter() - self._began_s]
        found = np.array(gathered(mine))
        self.elapsed_s = float(found[:, 2].max())
        of_ranks = np.zeros(self._place.num_hdp_ranks)  # the slowest device of each HDP rank
        np.maximum.at(of_ranks, found[:, 1].astype(int), found[:, 0])
        if case.degree > 1:
            return float(of_ranks[: case.degree].max())
        return float(np.median(of_ranks))

    def host_bytes_per_s(self) -> float:
        """Bytes a second of copies by the engine of offload, in the slower direction."""
        engine = select_copy_engine(self._device, self._executor.timeline)
        on_device = torch.zeros(_COPY_BYTES, dtype=torch.uint8, device=self._device)
        pinned = self._device.type == "cuda"
        host = torch.zeros(_COPY_BYTES, dtype=torch.uint8, pin_memory=pinned)
        rates = []
        for copy in (
            lambda: engine.to_host(host, on_device)(),
            lambda: engine.to_device(on_device, host)(),
        ):
            taken = [self._timed(copy) for _ in range(_COPIES)]
            rates.append(_COPY_BYTES / float(np.median(taken[1:])))
        return min(gathered(min(rates))) * self._place.num_tensor_ranks

    def on_any_rank(self, found: bool) -> bool:
        """Whether something holds on any rank of the job; the same on all of them."""
        return any(gathered(found))

    def _timed(self, run: Callable[[], object]) -> float:
        timeline = self._executor.timeline
        timeline.reset()
        run()
        return timeline.since_start_s(timeline.now())

    def _micro_batch_s(self, case: Case) -> float:
        """A micro-batch from its start until gradient sync, which is left out."""
        self._executor.chunks[0].zero_grad_buffer()
        return self._executor.run([self._micro_batch(case)], case.num_tokens).until_sync_s

    def _micro_batch(self, case: Case) -> RankMicroBatch:
        rank = self._place.hdp_rank
        if rank >= case.degree > 1:  # not in the ring
            return padding_micro_batch(rank, FEWEST_TOKENS * self._place.token_multiple)
        is_ring = case.degree > 1
        parts = [np.arange(length) for length in case.lengths]
        if is_ring:
            parts = [_slice(length, case.degree, rank) for length in case.lengths]
        lengths = tuple(len(part) for part in parts)
        num_tokens = sum(lengths)
        # tensor ranks and stages of one HDP rank hold the same tokens
        numbers = np.random.default_rng(num_tokens).integers(0, self._vocab_size, (2, num_tokens))
        return replace(
            padding_micro_batch(rank, num_tokens),
            tokens=numbers[0],
            labels=numbers[1],
            positions=np.concatenate(parts),
            loss_mask=np.ones(num_tokens, dtype=np.bool_),
            sequence_index=np.arange(len(parts)).repeat(lengths),
            ring=tuple(range(case.degree)) if is_ring else (rank,),
            ring_slices=lengths if is_ring else (),
            local_lengths=() if is_ring else lengths,
            sequence_ids=tuple(range(len(parts))),
            sources=(0,) * len(parts),
            index=0,
        )

    def _attention_s(self, case: Case) -> float:
        """The attention of all layers, forward and backward, one layer after the other."""
        arguments, place = self._arguments, self._place
        layout = self._layout(case)
        heads = arguments.num_attention_heads // place.num_tensor_ranks
        groups = max(1, (arguments.num_query_groups or heads) // place.num_tensor_ranks)
        head_dim, value_dim = head_sizes(arguments)
        kind = self._device, model_dtype(arguments), head_dim
        shapes = RunShapes(*kind, heads=heads, kv_heads=groups, value_dim=value_dim)
        *inputs, gradient = shapes.inputs(case.num_tokens)
        scale = float(head_dim) ** -0.5
        cores = [layer.self_attention.core_attention for layer in self._executor.layers]

        def run() -> None:
            for core in cores:
                out = self._executor.attention(
                    *(*inputs, layout, self._executor.comm, scale),
                    window=core.window,
                    sink=core.softmax_offset,
                )
                torch.autograd.grad(out, inputs, gradient)

        return self._timed(run) * self._whole_model

    def _experts_s(self, case: Case) -> float:
        """Routers and routed experts of all layers, forward and backward, one after the other."""
        shape = (case.num_tokens // self._place.token_multiple, 1, self._arguments.hidden_size)
        hidden, gradient = (
            torch.randn(shape, dtype=model_dtype(self._arguments), device=self._device)
            for _ in range(2)
        )
        hidden.requires_grad_()
        mixtures = [layer.mlp for layer in self._executor.layers if hasattr(layer.mlp, "router")]

        def run() -> None:
            for mixture in mixtures:
                params = self._params(case)  # what routers count is a micro-batch's
                with mixture.router.routes(params), without_shared_experts(mixture):
                    out, _ = mixture(hidden)
                wanted = [hidden, *mixture.parameters()]
                torch.autograd.grad(out, wanted, gradient, allow_unused=True)

        whole_model = sum(expert_layers(self._arguments)) / max(1, len(mixtures))
        return self._timed(run) * whole_model

    def _params(self, case: Case) -> HdpPackedSeqParams:
        """One sequence after the other, all on this rank."""
        return HdpPackedSeqParams(
            qkv_format="sbhd",
            layout=self._layout(case),
            positions=torch.arange(case.num_tokens, device=self._device),
            sequence_index=torch.zeros(case.num_tokens, dtype=torch.int64, device=self._device),
            comm=self._executor.comm,
            attention=self._executor.attention,
            routed=RoutedCounts(1, 0),
        )

    @property
    def _whole_model(self) -> float:
        """Layers of the model for each one of this rank; 0 on a stage without any."""
        own = len(self._executor.layers)
        return self._arguments.num_layers / own if own else 0.0

    def _layout(self, case: Case) -> TokenLayout:
        """Whole sequences on this rank."""
        return TokenLayout(
            ring=(self._place.hdp_rank,),
            index=0,
            ring_slices=(),
            local_lengths=case.lengths,
            device=self._device,
        )

    def _transfer_s(self, case: Case) -> float:
        """One hop, of several one after the other; the tensor ranks of a member share its bytes."""
        rank = self._place.hdp_rank
        if rank >= case.degree:
            return 0.0
        num_bytes = max(1, case.num_bytes // self._place.num_tensor_ranks)
        tensor = torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)
        ring, comm = tuple(range(case.degree)), self._executor.comm

        def run() -> None:
            sent, spare = tensor, torch.empty_like(tensor)
            for _ in range(_HOPS):
                sent, spare = comm.pass_on(sent, ring, rank, into=spare).wait(), sent

        return self._timed(run) / _HOPS


def _slice(length: int, degree: int, rank: int) -> Int64Array:
    """Positions of a member's head chunk and tail chunk."""
    chunk = length // (2 * degree)
    return np.concatenate(
        [np.arange(one * chunk, (one + 1) * chunk) for one in chunks_of(rank, degree)]
    )
