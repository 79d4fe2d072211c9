"""Jobs whose memory is counted, of models with layers of one kind."""

from megatron_hdp.planner.memory import Job
from megatron_hdp.planner.shape import ModelShape


def job_of(
    num_layers: int, hidden_size: int, vocabulary: int, *, tied: bool = False, **settings: int
) -> Job:
    """Eight heads in four groups, and an MLP of 2.75 times the width."""
    shape = ModelShape.uniform(
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_attention_heads=8,
        num_query_groups=4,
        kv_channels=hidden_size // 8,
        ffn_hidden_size=hidden_size * 11 // 4,
        gated=True,
        vocab_size=vocabulary,
        tied_embeddings=tied,
    )
    return Job(shape=shape, **settings)
