"""Models by name: what the cost model needs to know of them.

They are those of ByteScale's table 1, with heads of 128 channels. Those of its 30B, 56 over a
hidden size of 6,656, are wider together than that; the public model's 52 are no multiple of its 8
groups.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Self

from megatron_hdp.nearest import nearest
from megatron_hdp.planner.cost_model import CostModel
from megatron_hdp.planner.shape.costs import cost_model_of_shape
from megatron_hdp.planner.shape.model import ModelShape

BYTES_PER_VALUE = 2
"""What travels is in BF16."""


@dataclass(frozen=True)
class Model:
    """What a model costs: ``cost_model()``."""

    shape: ModelShape
    active_parameters: float
    """Parameters that take part in a token's forward pass P; the paper's are nominal."""

    @classmethod
    def of_shape(cls, shape: ModelShape) -> Self:
        """The model of that shape."""
        return cls(shape, shape.active_parameters)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V of one token over all layers without a window."""
        return self.shape.travelling_size * BYTES_PER_VALUE

    def cost_model(self) -> CostModel:
        """The cost model of ranks of one GPU, at 400 TFLOP/s."""
        return cost_model_of_shape(
            self.shape, value_bytes=BYTES_PER_VALUE, active_parameters=self.active_parameters
        )


def _named(
    layers: int, heads: int, parameters: float, hidden_size: int, ffn_hidden_size: int, experts: int
) -> Model:
    """A model of the table, gated, with 8 groups of 128 channels; the count is the nominal one."""
    shape = ModelShape.uniform(
        num_layers=layers,
        hidden_size=hidden_size,
        num_attention_heads=heads,
        num_query_groups=8,
        kv_channels=128,
        ffn_hidden_size=ffn_hidden_size,
        gated=True,
        num_experts=experts,
        experts_per_token=2 if experts else 1,
    )
    return Model(shape, parameters)


MODELS: Mapping[str, Model] = MappingProxyType(
    {
        "llama-7b": _named(32, 32, 7e9, 4096, 11008, 0),
        "llama-13b": _named(40, 40, 13e9, 5120, 13824, 0),
        "llama-30b": _named(60, 56, 30e9, 6656, 17920, 0),
        "llama-70b": _named(80, 64, 70e9, 8192, 28672, 0),
        "mistral-8x7b": _named(32, 32, 13e9, 4096, 14336, 8),
        "mistral-8x22b": _named(56, 48, 39e9, 6144, 16384, 8),
    }
)
"""The paper's models, with its nominal parameter counts: of a mixture, those active for a token."""


def model_of(name: str) -> Model:
    """The model of that name.

    Raises:
        ValueError: there is none; gives the nearest.
    """
    if name in MODELS:
        return MODELS[name]
    near = nearest(name, MODELS)
    raise ValueError(f"model is {name!r}; expected one of {', '.join(MODELS)} (nearest: {near})")
