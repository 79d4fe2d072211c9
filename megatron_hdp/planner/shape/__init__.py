"""The shape of a model, layer by layer: what parameters, FLOP and memory are counted from."""

from megatron_hdp.planner.shape.costs import cost_model_of_shape, ring_ways
from megatron_hdp.planner.shape.latent_rings import RingWays
from megatron_hdp.planner.shape.layers import (
    NO_ATTENTION,
    NO_MLP,
    Attention,
    Layer,
    Mlp,
    Router,
    seen_in_window,
)
from megatron_hdp.planner.shape.model import ModelShape
from megatron_hdp.planner.shape.named import (
    BYTES_PER_VALUE,
    MODELS,
    Model,
    model_of,
)
from megatron_hdp.planner.shape.tensors import EACH_EXPERT, EXPERTS, SPLIT, WHOLE, Adapters, Weights

__all__ = [
    "BYTES_PER_VALUE",
    "EACH_EXPERT",
    "EXPERTS",
    "MODELS",
    "NO_ATTENTION",
    "NO_MLP",
    "SPLIT",
    "WHOLE",
    "Adapters",
    "Attention",
    "Layer",
    "Mlp",
    "Model",
    "ModelShape",
    "RingWays",
    "Router",
    "Weights",
    "cost_model_of_shape",
    "model_of",
    "ring_ways",
    "seen_in_window",
]
