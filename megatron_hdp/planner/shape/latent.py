"""What rings of a model with multi-latent attention cost, by what travels in them."""

from megatron_hdp.planner import CostModel, RingWays
from megatron_hdp.planner.shape.model import ModelShape


def ring_ways(
    shape: ModelShape, cost_model: CostModel, *, value_bytes: int, tensor_ranks: int
) -> RingWays:
    """Keys and values, or their latent.

    Args:
        shape: a model whose attention has a latent.
        cost_model: of an HDP rank.
        value_bytes: bytes of a value that travels.
        tensor_ranks: of an HDP rank; they share keys and values, and each sends the whole latent.
    """
    dense = sum(layer.dense_matrices for layer in shape.layers) + shape.embedding
    return RingWays.of(
        cost_model,
        kv_bytes_per_token=shape.travelling_size * value_bytes,
        latent_bytes_per_token=shape.latent_size * value_bytes * tensor_ranks,
        projection_share=shape.latent_matrices / dense,
    )
