"""Models by name: what the cost model needs to know of them.

They are those of ByteScale's table 1, with heads of 128 channels. Those of its 30B, 56 over a
hidden size of 6,656, are wider together than that; the public model's 52 are no multiple of its 8
groups.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Self

from megatron_hdp.nearest import nearest
from megatron_hdp.planner.cost_model import CostModel
from megatron_hdp.planner.shape.model import ModelShape

BYTES_PER_VALUE = 2
"""What travels is in BF16."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """What a model costs: ``cost_model()``."""

    num_layers: int
    attention_width: float
    """Channels of attention of a layer, mean over layers (`Attention.width`)."""
    travelling_size: int
    """Values of K and V of one token over all layers without a window."""
    active_parameters: float
    """Parameters that take part in a token's forward pass P."""
    expert_parameters: float = 0.0
    """Those of them that are experts'."""
    expert_values_per_token: int = 0
    """Values of a token that go to its experts in a forward pass, of all layers."""
    halo_size: int = 0
    """Values that a member of a ring sends forward in layers with a window, at most."""
    window: int | None = None
    """Tokens that a query sees there; None: no layer has one."""
    window_share: float = 0.0
    """Their share of attention's width."""

    @classmethod
    def of_shape(cls, shape: ModelShape) -> Self:
        """The model of that shape."""
        return cls(
            num_layers=shape.num_layers,
            attention_width=shape.attention_width / shape.num_layers,
            travelling_size=shape.travelling_size,
            active_parameters=shape.active_parameters,
            expert_parameters=shape.expert_parameters,
            expert_values_per_token=shape.sent_to_experts,
            halo_size=shape.halo_size,
            window=shape.window,
            window_share=shape.window_share,
        )

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V of one token over all layers without a window."""
        return self.travelling_size * BYTES_PER_VALUE

    def cost_model(self) -> CostModel:
        """The cost model at 400 TFLOP/s a rank."""
        return CostModel.from_model_shape(
            num_layers=self.num_layers,
            hidden_size=self.attention_width,
            num_parameters=self.active_parameters,
            expert_parameters=self.expert_parameters,
            kv_bytes_per_token=self.kv_bytes_per_token,
            halo_bytes=3 * self.halo_size * BYTES_PER_VALUE,
            window_tokens=self.window or 0,
            window_share=self.window_share,
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
    return replace(Model.of_shape(shape), active_parameters=parameters)


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


def cost_model_of(name: str) -> CostModel:
    """The cost model of a named model; ValueError for a name that is none."""
    return model_of(name).cost_model()
