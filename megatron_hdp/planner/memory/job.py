"""What the memory of a GPU depends on: a model's shape, its layout on GPUs and the capacity."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from megatron_hdp.planner.shape import Layer, ModelShape
from megatron_hdp.planner.stages import StageSplit, waiting_passes


@dataclass(frozen=True, kw_only=True)
class EncoderMemory:
    """What an encoder of pictures or sound holds of every GPU, whatever stage it is of."""

    parameters: int
    trained: int
    """Parameters of them that are trained."""
    rows_bytes: float
    """Its rows in a step, their gradients and what is sent of both."""
    pack_bytes: float
    """Activations of one call, behind or before the micro-batches."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training job; degrees are assumed to divide."""

    shape: ModelShape
    """Its vocabulary is padded."""

    num_gpus: int
    tensor_ranks: int = 1
    sequence_parallel: bool = False
    stages: int = 1
    model_chunks: int = 1
    """Parts of the model on each stage (virtual stages)."""
    stage_layers: tuple[int, ...] = ()
    """Layers of every virtual stage in the model's order; empty: equally many on each."""
    expert_ranks: int = 1
    expert_tensor_ranks: int = 1

    bf16: bool = True
    """Weights and activations in bfloat16, else in float32; gradients are float32 either way."""
    fp64: bool = False
    """Everything in float64."""
    distributed_optimizer: bool = True
    fused_loss: bool = True
    recompute: str | None = None
    """None, "selective" (some modules) or "full"."""
    recompute_modules: tuple[str, ...] = ("core_attn",)
    """Of "selective", by Megatron's names."""
    recompute_method: str | None = None
    """Of "full": "uniform" (every layer, in units) or "block" (the first layers of a stage)."""
    recompute_num_layers: int = 1
    """Of "full": layers of a unit, or layers recomputed in all."""
    tokens_per_rank: int
    runtime_bytes: float | None = None
    """What PyTorch does not count, as measured on a GPU: CUDA, libraries, NCCL; None: not known."""
    streams: bool = False
    """Whether sequences may run as streams, whose keys and values may wait on the host."""
    stream_sums_wide: bool = True
    """Whether streams add up gradients of keys and values in float32, else in the type of those."""
    keeps_latents: bool = False
    """Whether streams keep the latents that keys and values are made of."""
    runs_parts: bool = False
    """Whether micro-batches run in parts, whose keys and values later parts see."""
    encoder: EncoderMemory | None = None
    """Whole on every GPU; None: text alone."""
    double_rings: bool = False
    """Whether rings over several nodes are double (`planner.bounds`)."""

    @property
    def hdp_ranks(self) -> int:
        """HDP ranks, each of as many GPUs as tensor ranks x stages."""
        return self.num_gpus // (self.tensor_ranks * self.stages)

    @property
    def split(self) -> StageSplit:
        """Layers of each stage, and of each part of the model on it."""
        if self.stage_layers:
            return StageSplit(self.stage_layers, self.stages)
        parts = self.stages * self.model_chunks
        return StageSplit((self.shape.num_layers // parts,) * parts, self.stages)

    @property
    def parts(self) -> tuple[tuple[Layer, ...], ...]:
        """Layers of every virtual stage in the model's order, in the order of `split.layers`."""
        layers = iter(self.shape.layers)
        return tuple(tuple(islice(layers, number)) for number in self.split.layers)

    def alive(self, stage: int) -> float:
        """Micro-batches between forward and backward on a stage, at most.

        With model chunks that many of a stage's passes are, each through one of them.
        """
        return waiting_passes(stage, self.stages, self.model_chunks) / self.model_chunks

    def most_alive(self, stage: int, of_chunks: Sequence[float]) -> float:
        """What a stage holds at its fullest moment, of passes between forward and backward.

        Args:
            stage: 0 is the first.
            of_chunks: what a pass through each of the stage's model chunks holds.
        """
        passes = waiting_passes(stage, self.stages, self.model_chunks)
        if len(set(of_chunks)) == 1:
            return passes * of_chunks[0]
        # groups of as many micro-batches as there are stages go through one chunk and the next
        group = [chunk for chunk in range(self.model_chunks) for _ in range(self.stages)]
        held = most = 0.0
        for number in range(4 * len(group)):
            held += of_chunks[group[number % len(group)]]
            most = max(most, held)
            if number >= passes - 1:  # a backward has room again, of the last chunk first
                held -= of_chunks[-1 - group[(number - passes + 1) % len(group)]]
        return most

    @property
    def value_bytes(self) -> int:
        """Bytes of a weight or an activation."""
        return 8 if self.fp64 else 2 if self.bf16 else 4

    @property
    def stream_sum_ratio(self) -> float:
        """Bytes of the sum of a key's gradients in a stream, per those of the key."""
        return max(4, self.value_bytes) / self.value_bytes if self.stream_sums_wide else 1.0

    @property
    def token_share(self) -> float:
        """Share of a micro-batch's tokens that a tensor rank holds outside of the linear layers."""
        return 1 / self.tensor_ranks if self.sequence_parallel else 1.0

    @property
    def recomputed_modules(self) -> tuple[str, ...]:
        """What backward runs once more of every layer, where it is not the whole layer."""
        return self.recompute_modules if self.recompute == "selective" else ()

    @property
    def recomputed_share(self) -> float:
        """Share of the layers whose forward runs once more in backward."""
        return sum(map(self.recomputed_of, self.split.layers)) / self.shape.num_layers

    def recomputed_of(self, num_layers: int) -> int:
        """Layers whose forward runs once more, of so many in one part of the model."""
        if self.recompute != "full":
            return 0
        if self.recompute_method == "uniform":
            return num_layers
        return min(self.recompute_num_layers, num_layers)
