"""One transformer layer: the sizes of its parts, and how many parameters each of them has.

Two counts are kept apart. `Weights` is everything that is stored, biases and norms included, by who
holds it. *Matrices* are the parameters that multiply a token; norms and biases are no products.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from megatron_hdp.planner.shape.tensors import (
    EACH_EXPERT,
    EXPERTS,
    SPLIT,
    WHOLE,
    Adapters,
    Tensor,
    Weights,
    matrix,
    norm,
    products,
    stored,
    vector,
)


def seen_in_window(tokens: float, window: int | None) -> float:
    """Twice the pairs of query and key in a causal sequence, halves of the diagonal left out.

    The square of its tokens; with a window less: a query sees so many, itself included.
    """
    inside = tokens if window is None else min(tokens, window)
    return inside * (2 * tokens - inside)


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Self-attention of one layer."""

    num_heads: int
    """Of queries."""
    num_groups: int
    """Heads of keys and values."""
    qk_channels: int
    """Size of a head's queries and keys."""
    v_channels: int
    """Size of a head's values."""
    rotary_channels: int = 0
    """Of a head's queries and keys, those that are rotated."""
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    """Queries and keys are normalised, head by head; of multi-latent attention the latents."""
    norm_bias: bool = False
    """Of these norms."""
    kv_rank: int = 0
    """Size of the latent that keys and values are made of (multi-latent attention); 0: none."""
    q_rank: int = 0
    """Size of the latent that its queries are made of; 0: none."""
    shared_channels: int = 0
    """Of its keys' heads, the last channels, which are not made of the latent and one for all."""
    window: int | None = None
    """Tokens that a query sees, itself included; None: all before it."""
    has_sink: bool = False
    """Each head learns the score of a sink."""

    @property
    def query_size(self) -> int:
        """Channels of all heads' queries."""
        return self.num_heads * self.qk_channels

    @property
    def key_size(self) -> int:
        """Channels of all groups' keys."""
        return self.num_groups * self.qk_channels

    @property
    def value_size(self) -> int:
        """Channels of all groups' values."""
        return self.num_groups * self.v_channels

    @property
    def output_size(self) -> int:
        """Channels of all heads' outputs."""
        return self.num_heads * self.v_channels

    @property
    def travelling_size(self) -> int:
        """Values of a token that go around a ring in a forward pass: its keys and values."""
        return self.key_size + self.value_size

    @property
    def latent_size(self) -> int:
        """Values of a token that may travel in place of its keys and values; 0: none may."""
        return self.kv_rank + self.shared_channels if self.kv_rank else 0

    @property
    def made_size(self) -> int:
        """Values of a token that are made of its latent; 0: none are."""
        if not self.kv_rank:
            return 0
        return self.num_heads * (self.qk_channels - self.shared_channels + self.v_channels)

    @property
    def latent_matrices(self) -> int:
        """Parameters that make keys and values of the latent."""
        return self.kv_rank * self.made_size

    @property
    def halo_size(self) -> int:
        """Values that a member of a ring sends forward in a window, at most; 0 without one.

        Keys and values before the chunks of two neighbours, whatever the tokens.
        """
        return 0 if self.window is None else 2 * (self.window - 1) * self.travelling_size

    def seen(self, tokens: float) -> float:
        """See `seen_in_window`."""
        return seen_in_window(tokens, self.window)

    @property
    def width(self) -> float:
        """Channels of a query-key pair's two products, halved: 4 x this is its FLOP, forward."""
        return (self.query_size + self.output_size) / 2

    def tensors(self, hidden_size: int) -> Iterator[Tensor]:
        """All parameters."""
        into = self.query_size + self.key_size + self.value_size
        if self.kv_rank:
            yield from self._tensors_of_latents(hidden_size)
        else:
            yield from matrix("linear_qkv", into, hidden_size)
            bias = self.qkv_bias
            yield from vector("linear_qkv.bias", into, held=SPLIT, exists=bias)
            for name in ("q_layernorm", "k_layernorm"):
                channels = self.qk_channels
                yield from norm(name, channels, bias=self.norm_bias, exists=self.qk_norm)
        yield from matrix("linear_proj", hidden_size, self.output_size)
        yield from vector("linear_proj.bias", hidden_size, exists=self.output_bias)
        sink = "core_attention.softmax_offset"
        yield from vector(sink, self.num_heads, held=SPLIT, exists=self.has_sink)

    def _tensors_of_latents(self, hidden_size: int) -> Iterator[Tensor]:
        if self.q_rank:
            yield from matrix("linear_q_down_proj", self.q_rank, hidden_size)
            yield from matrix("linear_q_up_proj", self.query_size, self.q_rank)
        else:
            yield from matrix("linear_q_proj", self.query_size, hidden_size)
        yield from matrix("linear_kv_down_proj", self.latent_size, hidden_size)
        made = self.latent_matrices // self.kv_rank
        yield from matrix("linear_kv_up_proj", made, self.kv_rank)
        for name, size in (("q_layernorm", self.q_rank), ("kv_layernorm", self.kv_rank)):
            yield from norm(name, size, bias=self.norm_bias, exists=self.qk_norm)

    def matrices(self, hidden_size: int) -> int:
        """Parameters that multiply a token."""
        return products(self.tensors(hidden_size))

    def weights(self, hidden_size: int) -> Weights:
        """All parameters."""
        return stored(self.tensors(hidden_size))


@dataclass(frozen=True, kw_only=True)
class Router:
    """How experts are scored and chosen; only memory depends on it."""

    sigmoid: bool = False
    """Scores are sigmoids, else a softmax."""
    bias: bool = False
    """A bias balances the choice, which is not that of the greatest scores then."""
    groups: bool = False
    """Groups of experts are chosen first."""
    float32: bool = False
    """Logits and weights are float32, else of the model's type."""


@dataclass(frozen=True, kw_only=True)
class Mlp:
    """The MLP of one layer, or its mixture of experts."""

    ffn_hidden_size: int
    """Of the MLP, or of one expert."""
    gated: bool
    bias: bool = False
    num_experts: int = 0
    """0: a plain MLP."""
    experts_per_token: int = 1
    router: Router = Router()
    shared_ffn_hidden_size: int = 0
    """Of the experts that every token meets, all together."""
    shared_gate: bool = False
    """What they give is weighed by a number of its own."""

    @property
    def inner_matrices(self) -> int:
        """Matrices into the MLP; one leads out of it."""
        return 2 if self.gated else 1

    def tensors(self, hidden_size: int) -> Iterator[Tensor]:
        """All parameters."""
        inner = self.inner_matrices * self.ffn_hidden_size
        if not self.num_experts:
            yield from matrix("linear_fc1", inner, hidden_size)
            yield from vector("linear_fc1.bias", inner, held=SPLIT, exists=self.bias)
            yield from matrix("linear_fc2", hidden_size, self.ffn_hidden_size)
            yield from vector("linear_fc2.bias", hidden_size, exists=self.bias)
            return
        sizes = {"rows": self.num_experts, "columns": hidden_size}
        yield Tensor(name="router.weight", **sizes, held=WHOLE, always=True)
        yield from vector("router.bias", self.num_experts, exists=self.bias)
        for name, rows, columns in (
            ("linear_fc1", inner, hidden_size),
            ("linear_fc2", hidden_size, self.ffn_hidden_size),
        ):
            yield self._of_experts(f"{name}.weight", rows, columns, self.experts_per_token)
            if self.bias:
                yield self._of_experts(f"{name}.bias", rows, 1, 0)
        shared = self.shared_ffn_hidden_size
        yield from matrix("shared_experts.linear_fc1", self.inner_matrices * shared, hidden_size)
        yield from matrix("shared_experts.linear_fc2", hidden_size, shared)
        if self.shared_gate:
            yield Tensor(name="shared_experts.gate_weight", rows=1, columns=hidden_size, held=WHOLE)

    def _of_experts(self, name: str, rows: int, columns: int, met: int) -> Tensor:
        copies = self.num_experts
        return Tensor(
            name=f"experts{EACH_EXPERT}{name}",
            rows=rows,
            columns=columns,
            held=EXPERTS,
            copies=copies,
            met=met,
        )

    def dense_matrices(self, hidden_size: int) -> int:
        """Parameters that multiply every token where it is: not those of experts it is sent to."""
        return products(one for one in self.tensors(hidden_size) if one.held != EXPERTS)

    def expert_matrices(self, hidden_size: int) -> int:
        """Parameters that multiply a token in the experts that it visits."""
        return products(one for one in self.tensors(hidden_size) if one.held == EXPERTS)

    def weights(self, hidden_size: int) -> Weights:
        """All parameters."""
        return stored(self.tensors(hidden_size))


NO_ATTENTION = Attention(num_heads=0, num_groups=0, qk_channels=0, v_channels=0)
"""Of a layer that is an MLP alone."""
NO_MLP = Mlp(ffn_hidden_size=0, gated=False)
"""Of a layer that is attention alone."""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A transformer layer: a norm and attention, a norm and an MLP; of a hybrid one of the two."""

    hidden_size: int
    attention: Attention
    mlp: Mlp
    norm_bias: bool = False
    num_norms: int = 2
    frozen: frozenset[tuple[str, float]] = frozenset()
    """Names of tensors that are not trained, and the share of each that is not: 1, or of experts
    less."""
    adapters: Adapters | None = None
    """Of its linear layers."""

    @cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        """All parameters, adapters' behind those of the layer that they stand beside."""
        found = [*_within("self_attention", self.attention.tensors(self.hidden_size))]
        found += _within("mlp", self.mlp.tensors(self.hidden_size))
        names = ["input_layernorm", "pre_mlp_layernorm"]
        if self.num_norms < len(names):
            del names[0 if self.mlp.ffn_hidden_size else 1]
        for name in names:
            found += norm(name, self.hidden_size, bias=self.norm_bias)
        if self.adapters is None:
            return tuple(found)
        return tuple(part for one in found for part in (one, *self.adapters.of(one)))

    @property
    def linears(self) -> set[str]:
        """Names of its linear layers, without what they are inside of."""
        names = (one.name.removesuffix(".weight").rpartition(".")[-1] for one in self.tensors)
        return {name for name in names if name.startswith("linear_")}

    @cached_property
    def _frozen(self) -> dict[str, float]:
        return dict(self.frozen)

    def trained(self, tensor: Tensor) -> float:
        """The share of a tensor of the layer that is trained."""
        return 1 - self._frozen.get(tensor.name, 0.0)

    def needs_input(self, *names: str) -> float:
        """The share of a linear layer's tokens that backward needs: 1 where any of these does.

        A linear layer needs what went in for the gradient of its weight, or of its adapter.

        Args:
            names: of linear layers, all with the same input, or parameters without a layer.
        """
        asking = [one for one in self.tensors if one.met and one.name.startswith(names)]
        return max((self._gradient_of(one) for one in asking), default=0.0)

    def _gradient_of(self, tensor: Tensor) -> float:
        """The share of a tensor whose gradient is made."""
        return 1.0 if tensor.always else self.trained(tensor)

    @property
    def weights(self) -> Weights:
        """All parameters."""
        return stored(self.tensors)

    @property
    def trained_weights(self) -> Weights:
        """Those that are trained."""
        shares = ((one, self.trained(one)) for one in self.tensors)
        return sum((_share(stored([one]), share) for one, share in shares if share), Weights())

    @property
    def dense_matrices(self) -> int:
        """Parameters that multiply a token, but for experts'."""
        return products(one for one in self.tensors if one.held != EXPERTS)

    @property
    def expert_matrices(self) -> int:
        """Parameters that multiply a token in the experts that it visits."""
        return products(one for one in self.tensors if one.held == EXPERTS)

    @property
    def matrices(self) -> int:
        """Parameters that multiply a token."""
        return self.dense_matrices + self.expert_matrices

    @property
    def frozen_dense_matrices(self) -> float:
        """Of `dense_matrices`, those whose gradient is not made."""
        return self._frozen_products(of_experts=False)

    @property
    def frozen_expert_matrices(self) -> float:
        """Of `expert_matrices`, those whose gradient is not made."""
        return self._frozen_products(of_experts=True)

    def _frozen_products(self, *, of_experts: bool) -> float:
        if not self.frozen:
            return 0
        tensors = (one for one in self.tensors if (one.held == EXPERTS) is of_experts)
        return sum(one.products * (1 - self._gradient_of(one)) for one in tensors)

    def recomputed_matrices(self, modules: Sequence[str]) -> int:
        """Of `dense_matrices`, those in modules that run once more in backward.

        Args:
            modules: Megatron's names; attention is not looked for.
        """
        of = "mlp" if not self.mlp.num_experts else "shared_experts"
        within = "mlp.linear_" if of == "mlp" else "mlp.shared_experts.linear_"
        if of not in modules:
            return 0
        return products(one for one in self.tensors if one.name.startswith(within))

    @property
    def sent_to_experts(self) -> int:
        """Values of a token that go to its experts in a forward pass; as many come back."""
        return self.hidden_size * self.mlp.experts_per_token if self.mlp.num_experts else 0


def _within(module: str, tensors: Iterator[Tensor]) -> list[Tensor]:
    return [replace(one, name=f"{module}.{one.name}") for one in tensors]


def _share(weights: Weights, share: float) -> Weights:
    if share == 1:
        return weights
    return Weights(weights.split * share, weights.whole * share, weights.experts * share)
