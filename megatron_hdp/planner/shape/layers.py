"""One transformer layer: the sizes of its parts, and how many parameters each of them has.

Two counts are kept apart. `Weights` is everything that is stored, biases and norms included, by who
holds it. *Matrices* are the parameters that multiply a token, each at 2 FLOP forward and 4 in
backward; norms and biases are no products.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


def seen_in_window(tokens: float, window: int | None) -> float:
    """Twice the pairs of query and key in a causal sequence, halves of the diagonal left out.

    The square of its tokens; with a window less: a query sees so many, itself included.
    """
    inside = tokens if window is None else min(tokens, window)
    return inside * (2 * tokens - inside)


@dataclass(frozen=True)
class Weights:
    """Parameters, by how the ranks that train a model hold them."""

    split: int = 0
    """Tensor-parallel ranks share them."""
    whole: int = 0
    """Every tensor-parallel rank has them all."""
    experts: int = 0
    """Expert-parallel ranks, and expert tensor ranks, share them."""

    def __add__(self, other: Weights) -> Weights:
        return Weights(
            self.split + other.split, self.whole + other.whole, self.experts + other.experts
        )

    @property
    def total(self) -> int:
        """All of them, each once."""
        return self.split + self.whole + self.experts


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
    def latent_matrices(self) -> int:
        """Parameters that make keys and values of the latent."""
        made = self.num_heads * (self.qk_channels - self.shared_channels + self.v_channels)
        return self.kv_rank * made

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

    def matrices(self, hidden_size: int) -> int:
        """Parameters that multiply a token."""
        if self.kv_rank:
            queries = self.q_rank * (hidden_size + self.query_size)
            into = hidden_size * (self.latent_size + (0 if self.q_rank else self.query_size))
            return queries + into + self.latent_matrices + hidden_size * self.output_size
        into = self.query_size + self.key_size + self.value_size
        return hidden_size * (into + self.output_size)

    def weights(self, hidden_size: int) -> Weights:
        """All parameters."""
        bias = self.query_size + self.key_size + self.value_size if self.qkv_bias else 0
        normed = self.kv_rank + self.q_rank if self.kv_rank else 2 * self.qk_channels
        norms = normed * (1 + self.norm_bias) if self.qk_norm else 0
        sinks = self.num_heads if self.has_sink else 0
        return Weights(
            split=self.matrices(hidden_size) + bias + sinks,
            whole=norms + (hidden_size if self.output_bias else 0),
        )


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

    def dense_matrices(self, hidden_size: int) -> int:
        """Parameters that multiply every token where it is: not those of experts it is sent to."""
        if not self.num_experts:
            return self._matrices(hidden_size)
        of_all = hidden_size * (self.num_experts + self.shared_gate)
        return of_all + self._shared_matrices(hidden_size)

    def recomputed_matrices(self, hidden_size: int, modules: Sequence[str]) -> int:
        """Of those, the ones of modules that run once more in backward, by Megatron's names."""
        if not self.num_experts:
            return self._matrices(hidden_size) if "mlp" in modules else 0
        return self._shared_matrices(hidden_size) if "shared_experts" in modules else 0

    def expert_matrices(self, hidden_size: int) -> int:
        """Parameters that multiply a token in the experts that it visits."""
        return self.experts_per_token * self._matrices(hidden_size) if self.num_experts else 0

    def weights(self, hidden_size: int) -> Weights:
        """All parameters."""
        inner = self.inner_matrices * self.ffn_hidden_size if self.bias else 0
        outer = hidden_size if self.bias else 0
        if self.num_experts:
            expert = self._matrices(hidden_size) + inner + outer
            shared = self._shared_matrices(hidden_size)
            router_bias = self.num_experts if self.bias else 0
            return Weights(
                split=shared,
                whole=self.dense_matrices(hidden_size) - shared + router_bias,
                experts=self.num_experts * expert,
            )
        return Weights(split=self._matrices(hidden_size) + inner, whole=outer)

    def _matrices(self, hidden_size: int) -> int:
        """Of the MLP, or of one expert."""
        return (self.inner_matrices + 1) * hidden_size * self.ffn_hidden_size

    def _shared_matrices(self, hidden_size: int) -> int:
        """Of the shared experts."""
        return (self.inner_matrices + 1) * hidden_size * self.shared_ffn_hidden_size


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

    @property
    def weights(self) -> Weights:
        """All parameters."""
        norms = Weights(whole=self.num_norms * self.hidden_size * (1 + self.norm_bias))
        h = self.hidden_size
        return self.attention.weights(h) + self.mlp.weights(h) + norms

    @property
    def dense_matrices(self) -> int:
        """Parameters that multiply a token, but for experts'."""
        h = self.hidden_size
        return self.attention.matrices(h) + self.mlp.dense_matrices(h)

    @property
    def expert_matrices(self) -> int:
        """Parameters that multiply a token in the experts that it visits."""
        return self.mlp.expert_matrices(self.hidden_size)

    @property
    def matrices(self) -> int:
        """Parameters that multiply a token."""
        return self.dense_matrices + self.expert_matrices

    @property
    def sent_to_experts(self) -> int:
        """Values of a token that go to its experts in a forward pass; as many come back."""
        return self.hidden_size * self.mlp.experts_per_token if self.mlp.num_experts else 0
