"""What the memory of a GPU depends on: a model's shape, its layout on GPUs and the capacity."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training job; degrees are assumed to divide. Lengths of layers are those of Megatron."""

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    ffn_hidden_size: int
    """Of an MLP, or of one expert."""
    gated: bool
    rotary_percent: float = 1.0
    num_experts: int = 0
    """0: a plain MLP."""
    experts_per_token: int = 1
    vocab_size: int
    """Padded."""
    tied_embeddings: bool

    num_gpus: int
    tensor_ranks: int = 1
    sequence_parallel: bool = False
    stages: int = 1
    model_chunks: int = 1
    """Parts of the model on each stage (virtual stages)."""
    expert_ranks: int = 1
    expert_tensor_ranks: int = 1

    bf16: bool = True
    """Weights and activations in bfloat16, else in float32; gradients are float32 either way."""
    distributed_optimizer: bool = True
    fused_loss: bool = True
    recompute: str | None = None
    """None, "selective" (attention) or "full"."""
    recompute_method: str | None = None
    """Of "full": "uniform" (every layer, in units) or "block" (the first layers of a stage)."""
    recompute_num_layers: int = 1
    """Of "full": layers of a unit, or layers recomputed in all."""
    tokens_per_rank: int

    @property
    def hdp_ranks(self) -> int:
        """HDP ranks, each of as many GPUs as tensor ranks x stages."""
        return self.num_gpus // (self.tensor_ranks * self.stages)

    @property
    def layers_per_stage(self) -> int:
        """Layers of one stage."""
        return self.num_layers // self.stages

    @property
    def layers_per_chunk(self) -> int:
        """Layers of one part of the model."""
        return self.layers_per_stage // self.model_chunks

    def alive(self, stage: int) -> float:
        """Micro-batches between forward and backward on a stage, at most.

        With model chunks that many of a stage's passes are, each through one of them.
        """
        behind = self.stages - 1 - stage
        if self.model_chunks == 1:
            return behind + 1
        passes = 2 * behind + (self.model_chunks - 1) * self.stages + 1
        return passes / self.model_chunks

    @property
    def value_bytes(self) -> int:
        """Bytes of a weight or an activation."""
        return 2 if self.bf16 else 4

    @property
    def query_size(self) -> int:
        """Channels of all heads' queries."""
        return self.num_attention_heads * self.kv_channels

    @property
    def kv_size(self) -> int:
        """Channels of all groups' keys, or values."""
        return self.num_query_groups * self.kv_channels

    @property
    def token_share(self) -> float:
        """Share of a micro-batch's tokens that a tensor rank holds outside of the linear layers."""
        return 1 / self.tensor_ranks if self.sequence_parallel else 1.0

    @property
    def inner_matrices(self) -> int:
        """Matrices into the MLP; one leads out of it."""
        return 2 if self.gated else 1

    @property
    def recomputed_share(self) -> float:
        """Share of the layers whose forward runs once more in backward."""
        if self.recompute != "full":
            return 0.0
        if self.recompute_method == "uniform":
            return 1.0
        return min(self.recompute_num_layers, self.layers_per_chunk) / self.layers_per_chunk
