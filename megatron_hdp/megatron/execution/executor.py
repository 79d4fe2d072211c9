"""Runs one rank's micro-batches of a plan with Megatron's own schedule, DDP and finalisation.

Ranks may run different numbers of micro-batches: gradients are sums over tokens, reduced once after
the last one and divided once by the global batch's loss tokens, which every rank knows from the
plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.pipeline_parallel.schedules import (
    forward_backward_no_pipelining,
    forward_backward_pipelining_with_interleaving,
    forward_backward_pipelining_without_interleaving,
    get_schedule_table,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_attr_wrapped_model, get_model_config

from megatron_hdp.data.steps import RankMicroBatch, padding_micro_batch
from megatron_hdp.megatron.execution.grad_sync import GradSync
from megatron_hdp.megatron.execution.model_pass import ModelPass, StepInProgress, arrays_of
from megatron_hdp.megatron.execution.own_loss import Arrays, OwnLoss
from megatron_hdp.megatron.execution.param_gather import finish_param_gather, start_param_gather
from megatron_hdp.megatron.execution.parts import PartedPass, Parts, layouts_of, num_on_device
from megatron_hdp.megatron.execution.schedule_timers import Pass, noting_compute
from megatron_hdp.megatron.model import HdpCoreAttention
from megatron_hdp.megatron.parallel import RankPlace, compute_device
from megatron_hdp.runtime.attention import AttentionBackend, AttentionByLatent
from megatron_hdp.runtime.gathering import EveryRankError
from megatron_hdp.runtime.host_to_device import with_arrays_ahead
from megatron_hdp.runtime.offload import ActivationOffload, saved_bytes
from megatron_hdp.runtime.pipeline_comm import InterleavedComm, PipelineComm
from megatron_hdp.runtime.ring import RingComm, SumType, TokenLayout, wide_type
from megatron_hdp.runtime.streamed_comm import StreamedCircle, StreamedComm, StreamedLine
from megatron_hdp.runtime.timeline import (
    BACKWARD,
    FORWARD,
    HOST_MEMORY,
    PIPELINE_WAIT,
    RING_WAIT,
    ROW_GRADIENTS_WAIT,
    ROWS_WAIT,
    SYNC,
)

_GROUPS = ("tp", "pp", "cp", "embd", "pos_embd", "dp_cp", "tp_dp_cp")
"""Which groups Megatron's pipeline schedule wants to be given beside its communication."""


@dataclass(frozen=True)
class RankOutcome:
    """What one rank did in one step, before anything was exchanged with the others."""

    losses: tuple[float, ...]
    """Sum of the token losses of each micro-batch, in order; empty but on the last stage."""
    source_losses: tuple[float, ...]
    """The same of each source of the data; 0 but on the last stage."""
    further_losses: tuple[float, ...]
    """Sums of the losses at each depth behind the label, times their weights; likewise."""
    until_sync_s: float
    """Seconds from the step's start until this rank reached gradient sync."""
    ring_wait_s: float
    """The part of it spent waiting for ring members."""
    pipeline_wait_s: float
    """The part of it spent waiting for other pipeline stages, or for rows of items."""
    sync_s: float
    """Seconds of gradient sync, waiting for the last rank included."""
    compute_s: float
    """Seconds of forwards and backwards without the waits for other ranks inside them."""
    ring_bytes: int
    offloaded_bytes: int
    """Activations that went to the host and came back."""
    host_bytes: int
    """Host memory held for them."""
    gradient_norms: tuple[torch.Tensor, ...]
    """On the first stage, of each micro-batch: norm of the gradient that reached the embedding.
    Nothing waits for them."""

    @property
    def busy_s(self) -> float:
        """Seconds until gradient sync without waiting for others."""
        return self.until_sync_s - self.ring_wait_s - self.pipeline_wait_s


class HdpExecutor:
    """Executes the micro-batches of one HDP rank.

    `chunks` are its parts of the model, in order; one under the plain schedule. With several, or
    where micro-batches may run in parts, `gradient_group` is one more communicator of the pipeline;
    with both and two stages `more_groups` are another two. `stream_sums` is the dtype in which
    streams add up gradients of keys and values.
    """

    def __init__(
        self,
        chunks: Sequence[DistributedDataParallel],
        place: RankPlace,
        comm: RingComm,
        attention: AttentionBackend,
        fused_loss: bool,
        gradient_group: dist.ProcessGroup | None = None,
        runs_parts: bool = False,
        more_groups: Sequence[dist.ProcessGroup] = (),
        stream_sums: SumType = wide_type,
    ) -> None:
        self.chunks = list(chunks)
        self.place = place
        self.comm = comm
        self.attention = attention
        self.fused_loss = fused_loss
        self.timeline = comm.timeline
        self.layers = [
            layer for one in chunks for layer in get_attr_wrapped_model(one, "decoder").layers
        ]
        self.offload = ActivationOffload(
            self.layers,
            compute_device(),
            self._parameters,
            timeline=self.timeline,
            num_parts=len(chunks),
        )
        self._model_pass = ModelPass(place, comm, attention, self.offload, fused_loss)
        device = compute_device()
        self._copy_stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._config = config = get_model_config(chunks[0])
        if not config.calculate_per_token_loss:
            raise ValueError("the model's config must have calculate_per_token_loss = True")
        self._grad_sync = GradSync(self.chunks, config)
        self._pipeline: PipelineComm | InterleavedComm | StreamedComm | None = None
        if place.num_stages > 1:
            group = parallel_state.get_pipeline_model_parallel_group()
            like = torch.empty(0, dtype=config.pipeline_dtype, device=device)
            how = config, like, self.timeline
            if runs_parts:
                assert gradient_group is not None, "parts need a second communicator"
                both = (group, gradient_group)
                if len(chunks) == 1:
                    self._pipeline = StreamedLine(both, *how)
                else:
                    groups = (*both, *(more_groups or both))
                    self._pipeline = StreamedCircle(len(chunks), groups, *how)
            elif len(chunks) == 1:
                self._pipeline = PipelineComm(group, *how)
            else:
                assert gradient_group is not None, "several chunks need a second communicator"
                self._pipeline = InterleavedComm(group, gradient_group, len(chunks), *how)

        streamed = self._pipeline if isinstance(self._pipeline, StreamedComm) else None
        self._stream_sums = stream_sums
        self._in_parts = PartedPass(
            self._model_pass, config, self._grad_sync, streamed, stream_sums
        )

    def _parameters(self) -> Iterator[torch.nn.Parameter]:
        for chunk in self.chunks:
            yield from chunk.parameters()

    def run(
        self,
        micro_batches: Sequence[RankMicroBatch],
        divisor: float,
        forward_only: bool = False,
        num_sources: int = 1,
        ends_together: bool = False,
        begins_together: bool = False,
        own_loss: OwnLoss | None = None,
        further_weights: Sequence[float] = (),
        before_sync: Callable[[], None] | None = None,
    ) -> RankOutcome:
        """Forward and backward of every micro-batch, then gradient sync.

        Args:
            micro_batches: this rank's, in order; at least one on every rank, with several chunks a
                multiple of the stages.
            divisor: of every gradient, above 0: loss tokens of the *global* batch.
            forward_only: no backward and no gradient sync (evaluation).
            num_sources: of the data, by which losses are added up.
            ends_together: whether ``--overlap-grad-reduce`` may reduce inside of the last backward,
                see `planner.lockstep.end_together`.
            begins_together: whether ``--overlap-param-gather`` may gather inside of the first
                forward, see `planner.lockstep.begin_together`; the same on all ranks.
            own_loss: in the place of the cross entropy; the model must have the fused loss.
            further_weights: of the sum of losses at each depth behind the label, if there are any.
            before_sync: adds gradients of weights that no micro-batch has, behind the last backward
                and before gradients are reduced; then none is reduced before.

        Raises:
            EveryRankError: a loss of the caller's own where MTP layers would learn nothing.
        """
        more = getattr(self._config, "mtp_num_layers", None)
        if own_loss is not None and more and not (further_weights or forward_only):
            raise EveryRankError(
                f"found mtp_num_layers {more}, expected none: a loss of the caller's own begins at "
                "the hidden states of the next token, so MTP layers would learn nothing; build the "
                "model without them"
            )
        self.comm.bytes_sent = 0
        self.offload.offloaded_bytes = 0
        if not forward_only:
            self._reserve_host_memory(micro_batches)
        self.timeline.reset()
        start_param_gather(self.chunks, begins_together)
        step = StepInProgress(num_sources, not forward_only, own_loss, tuple(further_weights))
        self._config.finalize_model_grads_func = partial(self._finalize, step, divisor, before_sync)
        table = self._table(len(micro_batches))
        in_parts = [self._runs_in_parts(one) for one in micro_batches]
        passes = [Pass(micro_batches[m].index, chunk, in_parts[m]) for m, chunk in table]
        with (
            torch.set_grad_enabled(not forward_only),
            noting_compute(self._config, self.timeline, passes),
            self._grad_sync.during(ends_together and before_sync is None),
            self._watching_gradients(step),
        ):
            self._run_schedule(step, micro_batches, forward_only)
        finish_param_gather(self.chunks)
        if forward_only:
            step.reached_sync = self.timeline.now()
        totals_s = self.timeline.totals_s
        rows_wait_s = totals_s[ROWS_WAIT]
        losses, source_losses, further_losses = step.read_losses()
        return RankOutcome(
            losses=losses,
            source_losses=source_losses,
            further_losses=further_losses,
            until_sync_s=self.timeline.since_start_s(step.reached_sync),
            ring_wait_s=totals_s[RING_WAIT],
            pipeline_wait_s=totals_s[PIPELINE_WAIT] + rows_wait_s + totals_s[ROW_GRADIENTS_WAIT],
            sync_s=totals_s[SYNC],
            compute_s=totals_s[FORWARD] + totals_s[BACKWARD] - totals_s[RING_WAIT] - rows_wait_s,
            ring_bytes=self.comm.bytes_sent,
            offloaded_bytes=self.offload.offloaded_bytes,
            host_bytes=self.offload.pool.held_bytes,
            gradient_norms=tuple(step.gradient_norms),
        )

    @contextmanager
    def _watching_gradients(self, step: StepInProgress) -> Iterator[None]:
        if not self.place.is_first_stage:
            yield
            return
        embedding = get_attr_wrapped_model(self.chunks[0], "embedding")
        with embedding.register_forward_hook(step.note_gradient):
            yield

    def _reserve_host_memory(self, micro_batches: Sequence[RankMicroBatch]) -> None:
        """Before the first forward the device has nothing to do, so nothing is waited for.

        Others may be in a ring with this rank already: their devices wait for its part, not its for
        theirs.
        """
        loads = [
            (len(one.tokens), 0.0 if one.is_stream else one.offload_ratio) for one in micro_batches
        ]
        # between forward and backward: with several chunks a group may be in its last one and the
        # next group in its first
        stages = self.place.num_stages
        most_alive = stages - self.place.stage if len(self.chunks) == 1 else 2 * stages
        with self.timeline.noted(HOST_MEMORY):
            self.offload.reserve(loads, most_alive, [*map(self._kept_on_host, micro_batches)])

    def _kept_on_host(self, micro_batch: RankMicroBatch) -> tuple[int, int]:
        """Of a stream: bytes of keys, values and sums of their gradients, and the largest piece's.

        Of all layers and of all parts that keep them on the host.
        """
        if not micro_batch.is_stream or not micro_batch.offload_ratio:
            return 0, 0
        sizes = [len(part.tokens) for part in micro_batch.in_parts()]
        sizes = sizes[num_on_device(micro_batch) :]
        windows = [
            module.window
            for chunk in self.chunks
            for module in chunk.modules()
            if isinstance(module, HdpCoreAttention)
        ]
        values, largest = self._kept_values(), max(sizes)
        held = sum(
            sum(sizes) if window is None else len(sizes) * min(window - 1, sum(sizes))
            for window in windows
        )
        kind = self._config.params_dtype
        of_sum = self._stream_sums(torch.empty(0, dtype=kind)).itemsize
        of_value = kind.itemsize + of_sum
        return values * of_value * held, values * of_sum * largest

    def _kept_values(self) -> int:
        """Values of a token that one layer of a stream keeps on this rank."""
        config, tensor_ranks = self._config, self.place.num_tensor_ranks
        if not getattr(config, "multi_latent_attention", False):
            return int(2 * config.kv_channels * config.num_query_groups // tensor_ranks)
        if isinstance(self.attention, AttentionByLatent):
            return int(config.kv_lora_rank + config.qk_pos_emb_head_dim)
        of_head = config.qk_head_dim + config.qk_pos_emb_head_dim + config.v_head_dim
        return int(of_head * config.num_attention_heads // tensor_ranks)

    def activation_bytes_per_token(self) -> float:
        """What autograd keeps of one token in one layer on this rank, counted on a small example.

        Counted in the chunk that has most layers; 0 on a stage without any. Host memory is reserved
        by it from then on.

        All ranks of a model replica, and of an EP group, must call this together.
        """
        step = StepInProgress()
        num_tokens = 64 * self.place.token_multiple
        example = replace(
            padding_micro_batch(self.place.hdp_rank, num_tokens),
            tokens=np.arange(num_tokens) % get_attr_wrapped_model(self.chunks[0], "vocab_size"),
        )
        counts = [len(get_attr_wrapped_model(one, "decoder").layers) for one in self.chunks]
        chunk = counts.index(max(counts))
        if chunk or not self.place.is_first_stage:
            received = torch.zeros(
                self._activation_shape(num_tokens),
                dtype=self._config.pipeline_dtype,
                device=compute_device(),
                requires_grad=True,
            )
            get_attr_wrapped_model(self.chunks[chunk], "set_input_tensor")(received)
        saved = saved_bytes(
            self.layers,
            self._parameters(),
            lambda: self._whole(
                step, *next(self._with_tensors(step, [example])), self.chunks[chunk]
            ),
        )
        of_layers = saved.layers[:-1] or saved.layers  # the loss would count as the last one's
        self.offload.need.expect(replace(saved, layers=of_layers), num_tokens)
        return max(of_layers, default=0) / num_tokens

    def _run_schedule(
        self, step: StepInProgress, micro_batches: Sequence[RankMicroBatch], forward_only: bool
    ) -> None:
        """Megatron's schedule; with pipeline stages, over communication that knows the plan."""
        common = {
            "forward_step_func": partial(self._forward_step, step),
            "data_iterator": [self._with_tensors(step, micro_batches) for _ in self.chunks],
            "model": self.chunks,
            "num_microbatches": len(micro_batches),
            "seq_length": 1,  # activations take their shapes from the plan
            "micro_batch_size": 1,
            "forward_only": forward_only,
        }
        if self._pipeline is None:
            forward_backward_no_pipelining(**common)
            return
        shapes = [
            [self._activation_shape(layout.num_tokens) for layout in self._layouts(one)]
            for one in micro_batches
        ]
        groups = ProcessGroupCollection.use_mpu_process_groups(list(_GROUPS))
        common |= {"p2p_communicator": self._pipeline, "pg_collection": groups}
        table = self._table(len(micro_batches))
        if isinstance(self._pipeline, StreamedComm):
            self._pipeline.begin(shapes, table, forward_only)
        elif isinstance(self._pipeline, InterleavedComm):
            self._pipeline.begin([shape for (shape,) in shapes], table)
        else:
            self._pipeline.begin([shape for (shape,) in shapes])
        if len(self.chunks) > 1:
            forward_backward_pipelining_with_interleaving(**common)
        else:
            forward_backward_pipelining_without_interleaving(**common)
        if forward_only:
            self._pipeline.finish()

    def _table(self, num_micro_batches: int) -> list[tuple[int, int]]:
        """Micro-batch and chunk of each forward; backwards take chunks from the last to the first.

        Both run through the micro-batches in this order.
        """
        group = self._config.microbatch_group_size_per_vp_stage
        table = get_schedule_table(num_micro_batches, len(self.chunks), group)
        return [(int(m), int(chunk)) for m, chunk in table]

    def _with_tensors(
        self, step: StepInProgress, micro_batches: Sequence[RankMicroBatch]
    ) -> Iterator[tuple[RankMicroBatch, Parts]]:
        """Micro-batches with their parts; a part's tensors are copied while the one before runs."""
        own_loss = step.own_loss if self.place.is_last_stage else None

        def all_arrays_of(micro_batch: RankMicroBatch) -> Arrays:
            given = arrays_of(micro_batch)
            added = {} if own_loss is None else own_loss.arrays(micro_batch)
            assert not given.keys() & added.keys(), "a loss names its arrays anew"
            return {**given, **added}

        parts = [part for one in micro_batches for part in one.in_parts()]
        coming = with_arrays_ahead(parts, all_arrays_of, compute_device(), self._copy_stream)
        for one in micro_batches:
            yield one, islice(coming, max(1, len(one.parts)))

    def _layouts(self, micro_batch: RankMicroBatch) -> Sequence[TokenLayout]:
        return layouts_of(micro_batch, self.place.hdp_rank)

    def _activation_shape(self, num_tokens: int) -> tuple[int, int, int]:
        """What passes between stages: ``[t, 1, hidden]``, shared out with sequence parallelism."""
        shares = self.place.num_tensor_ranks if self._config.sequence_parallel else 1
        return num_tokens // shares, 1, self._config.hidden_size

    def _forward_step(
        self, step: StepInProgress, micro_batches: Any, model: torch.nn.Module
    ) -> tuple[Any, Any]:
        micro_batch, parts = next(micro_batches)
        if self._runs_in_parts(micro_batch):
            return self._in_parts(step, micro_batch, parts, model)
        return self._whole(step, micro_batch, parts, model)

    def _runs_in_parts(self, micro_batch: RankMicroBatch) -> bool:
        """Or as one part, where stages exchange parts."""
        return bool(micro_batch.parts) or isinstance(self._pipeline, StreamedComm)

    def _whole(
        self, step: StepInProgress, micro_batch: RankMicroBatch, parts: Parts, model: Any
    ) -> tuple[Any, Any]:
        (layout,), ((_, tensors),) = self._layouts(micro_batch), parts
        return self._model_pass(step, micro_batch, tensors, layout, model)

    def _finalize(
        self,
        step: StepInProgress,
        divisor: float,
        before_sync: Callable[[], None] | None,
        model: list[Any],
        num_tokens: Any = None,
        **kwargs: Any,
    ) -> None:
        """Stock gradient finalisation, dividing in double precision by what was known before."""
        if self._pipeline is not None:
            self._pipeline.finish()
        if before_sync is not None:
            before_sync()
        step.reached_sync = self.timeline.now()
        with self.timeline.span(SYNC):
            self._grad_sync.begin()
            finalize_model_grads(model, None, **kwargs)
        for chunk in model:
            chunk.scale_gradients(1.0 / divisor)


@contextmanager
def in_mode(chunks: Sequence[Any], *, training: bool) -> Iterator[None]:
    """Within it the model is in training or in evaluation; routers add to the loss in training."""
    were_training = [chunk.training for chunk in chunks]
    for chunk in chunks:
        chunk.train(training)
    try:
        yield
    finally:
        for chunk, was_training in zip(chunks, were_training, strict=True):
            chunk.train(was_training)
