"""Models by name: what the cost model needs to know of their shape.

The named ones are those of ByteScale's table 1, with heads of 128 channels. Those of its 30B, 56
over a hidden size of 6,656, are wider together than that; the public model's 52 are no multiple of
its 8 groups.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from megatron_hdp.planner.cost_model import CostModel

BYTES_PER_VALUE = 2
"""What travels is in BF16."""

_MIXTRAL_8X7B = {"hidden_size": 4096, "ffn_hidden_size": 14336, "experts_per_token": 2}
_MIXTRAL_8X22B = {"hidden_size": 6144, "ffn_hidden_size": 16384, "experts_per_token": 2}


@dataclass(frozen=True, kw_only=True)
class Model:
    """The shape of a transformer; ``cost_model()`` is what it costs."""

    num_layers: int
    num_attention_heads: int
    num_query_groups: int
    """Heads of K and V."""
    kv_channels: int
    """Size of a head."""
    active_parameters: float
    """Parameters that take part in a token's forward pass P."""
    expert_parameters: float = 0.0
    """Those of them that are experts'."""
    expert_values_per_token: int = 0
    """Values of a token that go to its experts in a forward pass, of all layers."""

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V of one token over all layers."""
        kv_size = 2 * self.num_query_groups * self.kv_channels
        return self.num_layers * kv_size * BYTES_PER_VALUE

    def cost_model(self) -> CostModel:
        """The cost model at 400 TFLOP/s a rank; attention is as wide as all heads together."""
        return CostModel.from_model_shape(
            num_layers=self.num_layers,
            hidden_size=self.num_attention_heads * self.kv_channels,
            num_parameters=self.active_parameters,
            expert_parameters=self.expert_parameters,
            kv_bytes_per_token=self.kv_bytes_per_token,
        )


def active_parameters(
    *,
    num_layers: int,
    hidden_size: int,
    num_attention_heads: int,
    num_query_groups: int,
    kv_channels: int,
    ffn_hidden_size: int,
    gated: bool,
    experts_per_token: int = 1,
    num_experts: int = 0,
    vocab_size: int = 0,
) -> int:
    """Parameters that multiply a token in a forward pass, each at 6 FLOP forward and backward.

    Of a layer: the projections to Q, K and V and back, the matrices of the MLP (three if it is
    gated, else two) of every expert that the token visits, and the router. Of the model: the
    output layer; an embedding is looked up and not multiplied. Norms and biases are left out: in
    real models they are below 0.1 %.
    """
    attention_size = num_attention_heads * kv_channels
    attention = hidden_size * (2 * attention_size + 2 * num_query_groups * kv_channels)
    mlps = expert_parameters(
        num_layers=num_layers,
        hidden_size=hidden_size,
        ffn_hidden_size=ffn_hidden_size,
        gated=gated,
        experts_per_token=experts_per_token,
    )
    router = hidden_size * num_experts
    return num_layers * (attention + router) + mlps + hidden_size * vocab_size


def expert_parameters(
    *, num_layers: int, hidden_size: int, ffn_hidden_size: int, gated: bool, experts_per_token: int
) -> int:
    """Those of them in the MLPs that a token visits, in all layers: the experts of a mixture."""
    matrices = 3 if gated else 2
    return num_layers * matrices * hidden_size * ffn_hidden_size * experts_per_token


def _named(
    layers: int,
    heads: int,
    groups: int,
    parameters: float,
    experts: Mapping[str, int] | None = None,
) -> Model:
    in_experts = sent = 0
    if experts:
        in_experts = expert_parameters(num_layers=layers, gated=True, **experts)
        sent = layers * experts["hidden_size"] * experts["experts_per_token"]
    return Model(
        num_layers=layers,
        num_attention_heads=heads,
        num_query_groups=groups,
        kv_channels=128,
        active_parameters=parameters,
        expert_parameters=in_experts,
        expert_values_per_token=sent,
    )


MODELS: Mapping[str, Model] = MappingProxyType(
    {
        "llama-7b": _named(32, 32, 8, 7e9),
        "llama-13b": _named(40, 40, 8, 13e9),
        "llama-30b": _named(60, 56, 8, 30e9),
        "llama-70b": _named(80, 64, 8, 70e9),
        "mistral-8x7b": _named(32, 32, 8, 13e9, _MIXTRAL_8X7B),
        "mistral-8x22b": _named(56, 48, 8, 39e9, _MIXTRAL_8X22B),
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
    nearest = difflib.get_close_matches(name, MODELS, n=1, cutoff=0.0)[0]
    raise ValueError(f"model is {name!r}; expected one of {', '.join(MODELS)} (nearest: {nearest})")


def cost_model_of(name: str) -> CostModel:
    """The cost model of a named model; ValueError for a name that is none."""
    return model_of(name).cost_model()
