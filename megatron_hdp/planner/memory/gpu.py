"""Memory of one GPU, summed up before any is booked: state, activations, working memory.

Of a pipeline's stages the fullest decides: the first holds as many micro-batches as there are
stages (with several model chunks more), the last one the loss, and stages may have unequal numbers
of layers. Parts that are not alive at the same
moment (a layer's backward and the loss) are added all the same, so the sum is an upper bound of
what is accounted for here.
"""

from dataclasses import dataclass, replace

from megatron_hdp.planner.memory.activations import (
    backward_bytes,
    halo_bytes,
    kept_of_further,
    kept_of_part,
    keys_of_part,
    recomputed_bytes,
    ring_bytes,
    second_stream_bytes,
    second_stream_kept_of_part,
)
from megatron_hdp.planner.memory.job import Job
from megatron_hdp.planner.shape import EXPERTS, SPLIT, WHOLE, Layer, Weights

_LIBRARIES_BYTES, _COMMUNICATOR_BYTES = 2e9, 0.4e9  # assumed, see `runtime_bytes`

IN_FLIGHT_BYTES = 2**30
"""What the transfers of a library's ring send and receive that the GPU is not past, at most: then
the host waits. PyTorch cannot use that memory again yet; our own ring keeps its buffers instead."""

RESERVE = 0.05
"""Share of the GPU's memory left free, for the allocator's fragmentation."""

_LOGITS_BYTES = 2**30  # of a chunk of the fused loss, see runtime/loss/fused_cross_entropy.py
_GRADIENT, _MASTER, _MOMENTS = 4, 4, 8


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Bytes on one GPU of one pipeline stage."""

    stage: int
    weights: float
    gradients: float
    optimizer: float
    activations: float
    """Between forward and backward, of as many full micro-batches as are alive."""
    keys: float
    """What their parts keep of keys and values for later parts, whatever waits on the host."""
    recomputed: float
    """Layers that backward has recomputed and not yet left."""
    backward: float
    """Of one layer, at its busiest moment."""
    ring_buffers: float
    second_stream: float
    """Of TransformerEngine's ring, in memory that the stream that computes cannot use."""
    in_flight: float
    """Of TransformerEngine's ring, freed and still held by transfers that the GPU is not past."""
    loss: float
    runtime: float
    """What PyTorch does not count: CUDA, libraries, NCCL."""
    rows: float = 0.0
    """Of pictures: rows of the whole step, their gradients and what is sent of both."""
    pack: float = 0.0
    """Activations of one call of an encoder, while no micro-batch has any."""

    @property
    def total(self) -> float:
        """Sum of all; of activations and of what works on them, or of a pack, the larger."""
        state = self.weights + self.gradients + self.optimizer + self.runtime + self.rows
        buffers = self.ring_buffers + self.second_stream + self.in_flight
        work = self.activations + self.keys + self.recomputed + self.backward + self.loss
        return state + buffers + max(work, self.pack)


def num_communicators(job: Job) -> int:
    """NCCL communicators that a GPU of a job is in: those of more than one GPU that a step uses.

    All ranks; gradients and rings of HDP; tensor parallelism; pipelines, twice with several model
    chunks; the model's parts together, for norms; experts and their gradients; tensor ranks in one.
    """
    one_for_each = (
        *(job.num_gpus, job.hdp_ranks, job.hdp_ranks, job.tensor_ranks, job.stages),
        *(job.stages if job.model_chunks > 1 else 1, job.tensor_ranks * job.stages),
        *(job.expert_ranks, job.expert_ranks, job.expert_tensor_ranks),
    )
    return sum(ranks > 1 for ranks in one_for_each)


def runtime_bytes(job: Job) -> float:
    """CUDA's context with all kernels, workspaces of libraries and NCCL's communicators.

    As measured, else assumed: 2 GB, and 0.4 GB for each communicator (0.2 to 0.6 by channels).
    """
    if job.runtime_bytes is not None:
        return job.runtime_bytes
    return _LIBRARIES_BYTES + _COMMUNICATOR_BYTES * num_communicators(job)


def fullest_stage(job: Job, most_tokens: int | None = None) -> StageMemory:
    """The stage that needs the most memory; `most_tokens` as for `stage_memory`."""
    return max(stage_memories(job, most_tokens), key=lambda memory: memory.total)


def stage_memories(job: Job, most_tokens: int | None = None) -> list[StageMemory]:
    """Memory of every stage, the first one first; `most_tokens` as for `stage_memory`."""
    return [stage_memory(job, stage, most_tokens) for stage in range(job.stages)]


def waiting_activations(job: Job, stage: int) -> float:
    """Bytes a token of what a stage's layers keep on a GPU for their backward, at most.

    Of as many micro-batches, or passes through a model chunk, as are between forward and backward.
    Layers of further tokens are not counted: what they keep is never offloaded.
    """
    of_chunks = [kept_of_part(job, part) for part in job.parts[stage :: job.stages]]
    return job.most_alive(stage, of_chunks)


def stage_memory(job: Job, stage: int, most_tokens: int | None = None) -> StageMemory:
    """Memory of one stage.

    Args:
        job: what is trained, and how.
        stage: 0 is the first.
        most_tokens: of a micro-batch on one HDP rank; the capacity unless activations are offloaded
            (equation 3 holds what stays on the device to a capacity's worth; the rest of the work
            grows with the tokens).
    """
    first, last = stage == 0, stage == job.stages - 1
    tokens = most_tokens or job.tokens_per_rank
    shape, parts = job.shape, job.parts[stage :: job.stages]
    layers = [layer for part in parts for layer in part]
    embedding = shape.embedding / job.tensor_ranks
    has_output = last and not (shape.tied_embeddings and job.stages == 1)
    embeddings = first + (last and bool(shape.further) and job.stages > 1)
    of_layers = sum((layer.weights for layer in layers), Weights())
    trained_of_layers = sum((layer.trained_weights for layer in layers), Weights())
    if last:
        of_layers += shape.further_weights + Weights(whole=shape.last_norm)
        trained_of_layers += shape.trained_further_weights + shape.trained_last_norm
    dense, experts = _on_a_gpu(job, of_layers)
    dense += embedding * (embeddings + has_output)
    trained, trained_experts = _on_a_gpu(job, trained_of_layers)
    trained += embedding * (embeddings * shape.trains_embedding + has_output * shape.trains_output)
    if job.encoder is not None:
        dense, trained = dense + job.encoder.parameters, trained + job.encoder.trained
    b = job.value_bytes
    beside = job.most_alive(stage, [second_stream_kept_of_part(job, part) for part in parts])
    of_keys = [keys_of_part(job, part) for part in parts]
    if last:
        of_keys[-1] += keys_of_part(job, shape.further)
    at_work = {*layers, *(shape.further if last else ())}  # without layers none is
    return StageMemory(
        stage=stage,
        weights=b * (dense + experts),
        gradients=_GRADIENT * (trained + trained_experts),
        optimizer=_optimizer_bytes(job, trained, trained_experts),
        activations=waiting_activations(job, stage) * job.tokens_per_rank
        + (kept_of_further(job) * tokens if last else 0.0),
        keys=job.most_alive(stage, of_keys) * tokens,
        recomputed=recomputed_bytes(job, stage) * tokens,
        # and the gradient of one weight, before it is added to the others
        backward=max((backward_bytes(job, layer) for layer in at_work), default=0.0) * tokens
        + b * max((_largest_matrix(job, layer) for layer in at_work), default=0.0),
        ring_buffers=max((_ring_bytes(job, layer, tokens) for layer in at_work), default=0.0),
        second_stream=beside * job.tokens_per_rank
        + max((second_stream_bytes(job, layer, job.hdp_ranks) for layer in at_work), default=0.0)
        * tokens,
        in_flight=max(IN_FLIGHT_BYTES, *(_transfer_bytes(job, layer, tokens) for layer in at_work))
        if at_work and job.hdp_ranks > 1
        else 0.0,
        loss=_loss_bytes(job, tokens, embedding) if last else 0.0,
        runtime=runtime_bytes(job),
        rows=job.encoder.rows_bytes if job.encoder else 0.0,
        pack=job.encoder.pack_bytes if job.encoder else 0.0,
    )


def _on_a_gpu(job: Job, weights: Weights) -> tuple[float, float]:
    """Of these what a GPU holds: what is no expert's, and experts'."""
    experts = weights.experts / job.expert_ranks / job.expert_tensor_ranks
    return weights.split / job.tensor_ranks + weights.whole, experts


def _ring_bytes(job: Job, layer: Layer, tokens: int) -> float:
    whole = ring_bytes(job, layer) * tokens
    return max(whole, whole / 2 + halo_bytes(job, layer))


def _transfer_bytes(job: Job, layer: Layer, tokens: int) -> float:
    """What a hop of a backward sends and receives: K, V and their gradients; two may be under way.

    Of two the buffers of one are in use, which is counted as such.
    """
    return 4 * job.value_bytes * layer.attention.travelling_size / job.tensor_ranks * tokens


def most_tokens_per_rank(job: Job, memory_bytes: float) -> int:
    """The greatest capacity with which every stage is within `memory_bytes`; 0 if there is none.

    Without offload, and a multiple of the tensor ranks.
    """

    def fits(units: int) -> bool:
        tokens = units * job.tensor_ranks
        return fullest_stage(replace(job, tokens_per_rank=tokens)).total <= memory_bytes

    fitting, beyond = 0, 1
    while fits(beyond):
        fitting, beyond = beyond, 2 * beyond
    while beyond - fitting > 1:
        middle = (fitting + beyond) // 2
        fitting, beyond = (middle, beyond) if fits(middle) else (fitting, middle)
    return fitting * job.tensor_ranks


def _optimizer_bytes(job: Job, dense: float, experts: float) -> float:
    """Moments, and a float32 copy of bfloat16 weights, of this GPU's shard."""
    each = _MOMENTS + (_MASTER if job.bf16 else 0)
    if not job.distributed_optimizer:
        return each * (dense + experts)
    per_stage = job.num_gpus // job.stages
    expert_copies = per_stage // (job.expert_ranks * job.expert_tensor_ranks)
    return each * (dense / job.hdp_ranks + experts / expert_copies)


def shard_bytes(job: Job) -> float:
    """One version of a GPU's shard of the distributed optimizer, as it is copied to a neighbour.

    Main parameters and two moments, in float32 unless the job is in float64: of the fullest stage.
    """
    each = _MOMENTS + (_MASTER if job.bf16 else 0)
    state = max(one.optimizer for one in stage_memories(job))
    return state / each * (2 if job.fp64 else 1) * (_MOMENTS + _MASTER)


def copies_bytes(num_bytes: float) -> float:
    """Host memory of the copies of a GPU whose shard has so many bytes.

    Two versions of its own, two of a neighbour's.
    """
    return 2 * 2 * num_bytes


def _largest_matrix(job: Job, layer: Layer) -> float:
    """Parameters on a GPU of the largest one that is trained, of one expert where it is of many."""
    split = {SPLIT: job.tensor_ranks, EXPERTS: job.expert_tensor_ranks, WHOLE: 1}
    sizes = (
        one.rows * one.columns / split[one.held] for one in layer.tensors if layer.trained(one)
    )
    return max(sizes, default=0.0)


def _loss_bytes(job: Job, tokens: int, weights: float) -> float:
    """Last norm, gathered hidden states and their gradient; logits, all or a chunk.

    The fused loss adds the weights' gradient to the sum of gradients, which is counted there.
    """
    b = job.value_bytes
    hidden = (2 * job.token_share + 2) * b * job.shape.hidden_size * tokens
    hidden *= 1 + len(job.shape.further)
    logits = b * job.shape.vocab_size / job.tensor_ranks * tokens
    if job.fused_loss:
        return hidden + min(_LOGITS_BYTES, logits)
    of_weights = b * weights * job.shape.trains_output
    return hidden + logits * (1 + 2 * _GRADIENT / b) + of_weights  # and two in float32
