"""A model: its layers in their order, and the embedding and output layer around them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from megatron_hdp.arrays import Int64Array
from megatron_hdp.planner.query_ratio import query_ratio_of
from megatron_hdp.planner.shape.layers import Attention, Layer, Mlp
from megatron_hdp.planner.shape.tensors import (
    Adapters,
    Tensor,
    Weights,
    matched,
    matrix,
    norm,
    stored,
)

_EMBEDDING, _OUTPUT = "embedding.word_embeddings", "output_layer"
_LAST_NORM = "decoder.final_layernorm"
_INSIDE = ("transformer_layer.", "mtp_model_layer.")  # of MTP's layers, as releases call them
_SAVED = 1 / 3  # of a product's FLOP, by a weight without a gradient


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The shape of a GPT."""

    layers: tuple[Layer, ...]
    """In the model's order."""
    hidden_size: int
    vocab_size: int
    """Rows of the embedding, padded where memory is counted; 0 for none and no output layer."""
    tied_embeddings: bool = False
    """The output layer is the embedding."""
    norm_bias: bool = False
    """Of the last norm."""
    further: tuple[Layer, ...] = ()
    """Layers that predict tokens behind the next one, on the last stage. Each has a projection
    ``[2 h, h]`` and three norms besides, and takes the embedding and the output layer once more."""
    frozen: frozenset[str] = frozenset()
    """Names of tensors outside of layers that are not trained."""

    @classmethod
    def uniform(
        cls,
        *,
        num_layers: int,
        hidden_size: int,
        num_attention_heads: int,
        num_query_groups: int,
        kv_channels: int,
        ffn_hidden_size: int,
        gated: bool,
        rotary_percent: float = 1.0,
        num_experts: int = 0,
        experts_per_token: int = 1,
        vocab_size: int = 0,
        tied_embeddings: bool = False,
    ) -> Self:
        """A model whose layers are all alike, without biases; names as of Megatron's flags."""
        attention = Attention(
            num_heads=num_attention_heads,
            num_groups=num_query_groups,
            qk_channels=kv_channels,
            v_channels=kv_channels,
            rotary_channels=int(kv_channels * rotary_percent),
        )
        mlp = Mlp(
            ffn_hidden_size=ffn_hidden_size,
            gated=gated,
            num_experts=num_experts,
            experts_per_token=experts_per_token,
        )
        layer = Layer(hidden_size=hidden_size, attention=attention, mlp=mlp)
        return cls(
            layers=(layer,) * num_layers,
            hidden_size=hidden_size,
            vocab_size=vocab_size,
            tied_embeddings=tied_embeddings,
        )

    def training(self, frozen: Sequence[str], adapters: Adapters | None = None) -> Self:
        """The model of which some weights are frozen, or all but adapters.

        Args:
            frozen: patterns of the weights' names, as a shell's; layers are numbered from 0.
            adapters: what is trained alone, if given.
        """
        patterns = ("*",) if adapters is not None else tuple(frozen)
        if not patterns:
            return self

        def of(layer: Layer, prefixes: Sequence[str]) -> Layer:
            shares = {one.name: matched(one, prefixes, patterns) for one in layer.tensors}
            some = frozenset((name, share) for name, share in shares.items() if share)
            return replace(layer, frozen=some, adapters=adapters)

        return replace(
            self,
            layers=tuple(of(one, (f"decoder.layers.{i}.",)) for i, one in enumerate(self.layers)),
            further=tuple(
                of(one, [_beside(i) + name for name in _INSIDE])
                for i, one in enumerate(self.further)
            ),
            frozen=frozenset(one.name for one in self._outside if matched(one, ("",), patterns)),
        )

    @property
    def _outside(self) -> tuple[Tensor, ...]:
        """Parameters of no layer; a tied output layer is the embedding."""
        h, biased = self.hidden_size, self.norm_bias
        found = [*matrix(_EMBEDDING, self.vocab_size, h)]
        if not self.tied_embeddings:
            found += matrix(_OUTPUT, self.vocab_size, h)
        found += norm(_LAST_NORM, h, bias=biased)
        return (*found, *(one for i in range(len(self.further)) for one in self._projecting(i)))

    def _projecting(self, depth: int) -> tuple[Tensor, ...]:
        """What a layer of further tokens has beside the layer."""
        h, stem = self.hidden_size, _beside(depth)
        names = ("enorm", "hnorm", "final_layernorm")
        norms = (one for name in names for one in norm(stem + name, h, bias=self.norm_bias))
        return (*matrix(f"{stem}eh_proj", h, 2 * h), *norms)

    def trained(self, tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
        """Of tensors outside of layers, those that are trained."""
        return tuple(one for one in tensors if one.name not in self.frozen)

    @property
    def trained_last_norm(self) -> Weights:
        """Of `last_norm`, what is trained."""
        return stored(self.trained(norm(_LAST_NORM, self.hidden_size, bias=self.norm_bias)))

    @property
    def trains_embedding(self) -> bool:
        """Whether the embedding is trained."""
        return f"{_EMBEDDING}.weight" not in self.frozen

    @property
    def trains_output(self) -> bool:
        """Whether the output layer is trained."""
        name = _EMBEDDING if self.tied_embeddings else _OUTPUT
        return f"{name}.weight" not in self.frozen

    @property
    def trains_all(self) -> bool:
        """Whether no weight is frozen."""
        return not self.frozen and not any(layer.frozen for layer in self.all_layers)

    @property
    def num_layers(self) -> int:
        """Transformer layers."""
        return len(self.layers)

    @property
    def all_layers(self) -> tuple[Layer, ...]:
        """The layers, and those of further tokens."""
        return (*self.layers, *self.further)

    @property
    def has_experts(self) -> bool:
        """Whether any layer is a mixture of experts."""
        return any(layer.mlp.num_experts for layer in self.all_layers)

    @property
    def embedding(self) -> int:
        """Parameters of the embedding, or of the output layer."""
        return self.hidden_size * self.vocab_size

    @property
    def last_norm(self) -> int:
        """Parameters of the norm behind the layers."""
        return self.hidden_size * (1 + self.norm_bias)

    @property
    def parameters(self) -> float:
        """All parameters, each once."""
        layers = (layer.weights for layer in self.all_layers)
        return sum(layers, stored(self._outside)).total

    @property
    def active_parameters(self) -> int:
        """Parameters that multiply a token in a forward pass.

        Those of the layers, of the experts that the token visits only, and of the output layer. An
        embedding is looked up and not multiplied.
        """
        projections = len(self.further) * self.projection
        layers = sum(layer.matrices for layer in self.all_layers)
        return layers + projections + self.output_parameters

    @property
    def worked_parameters(self) -> float:
        """As many trained ones as cost what those do: each 6 FLOP a token, forward and backward.

        A frozen one costs 4: its own gradient is not made. What goes into a layer has a gradient,
        also where nothing before it is trained.
        """
        frozen = sum(one.frozen_dense_matrices for one in self.all_layers)
        if not self.trains_output:
            frozen += self.output_parameters
        beside = (one for i in range(len(self.further)) for one in self._projecting(i))
        frozen += sum(one.products for one in beside if one.name in self.frozen)
        return self.active_parameters - _SAVED * frozen - self._saved_by_experts

    @property
    def linear_share(self) -> float:
        """FLOP of a token's products, per those of the model with all its weights trained."""
        whole = replace(
            self,
            layers=tuple(replace(one, adapters=None) for one in self.layers),
            further=tuple(replace(one, adapters=None) for one in self.further),
        )
        return self.worked_parameters / whole.active_parameters

    @property
    def worked_expert_parameters(self) -> float:
        """Those of them that are experts'."""
        return self.expert_parameters - self._saved_by_experts

    @property
    def _saved_by_experts(self) -> float:
        return _SAVED * sum(one.frozen_expert_matrices for one in self.all_layers)

    @property
    def output_parameters(self) -> int:
        """Those of them in the output layer, which further tokens meet once more each."""
        return self.embedding * (1 + len(self.further))

    @property
    def projection(self) -> int:
        """Parameters that make one of two hidden states, in each layer of further tokens."""
        return 2 * self.hidden_size**2

    @property
    def further_weights(self) -> Weights:
        """Parameters of the layers of further tokens."""
        each = (one for i in range(len(self.further)) for one in self._projecting(i))
        return sum((layer.weights for layer in self.further), stored(each))

    @property
    def trained_further_weights(self) -> Weights:
        """Those of them that are trained."""
        each = (one for i in range(len(self.further)) for one in self._projecting(i))
        layers = (layer.trained_weights for layer in self.further)
        return sum(layers, stored(self.trained(each)))

    @property
    def trained_parameters(self) -> float:
        """All parameters that are trained, each once."""
        layers = sum((layer.trained_weights for layer in self.layers), Weights())
        further = sum((layer.trained_weights for layer in self.further), Weights())
        return (layers + further + stored(self.trained(self._outside))).total

    @property
    def expert_parameters(self) -> int:
        """Those of them that are experts'."""
        return sum(layer.expert_matrices for layer in self.all_layers)

    @property
    def attention_width(self) -> float:
        """Sum over layers of `Attention.width`: 6 x this x length^2 is attention's FLOP."""
        return sum(layer.attention.width for layer in self.all_layers)

    @property
    def window(self) -> int | None:
        """Tokens that a query sees in the layers with a window; None: no layer has one."""
        return next((one.attention.window for one in self.layers if one.attention.window), None)

    @property
    def window_share(self) -> float:
        """Share of `attention_width` that belongs to layers with a window."""
        layers = [layer.attention for layer in self.layers]
        return sum(one.width for one in layers if one.window) / (self.attention_width or 1.0)

    def flops(self, lengths: Int64Array) -> float:
        """FLOP of the matrix products of sequences of these lengths, forward and backward.

        Each product of m, n and k is 2 m n k, forward once and backward twice. Attention is causal.
        Neither padding nor recomputation counts, so runs of one model compare.
        """
        tokens = lengths.astype(np.float64)
        inside = np.minimum(tokens, self.window or np.inf)
        seen = (inside * (2 * tokens - inside)).sum()
        return self.flops_of_sums(float(tokens.sum()), float((tokens**2).sum()), float(seen))

    def flops_of_sums(
        self, tokens: float, squared_tokens: float, seen_in_window: float | None = None
    ) -> float:
        """The same of sequences of which sums are known.

        Args:
            tokens: sum of their lengths.
            squared_tokens: sum of the lengths' squares.
            seen_in_window: twice the pairs of query and key in layers with a window; as many as
                without one unless given.
        """
        seen = squared_tokens if seen_in_window is None else seen_in_window
        share = self.window_share
        attention = (1 - share) * squared_tokens + share * seen
        return 6.0 * (self.worked_parameters * tokens + self.attention_width * attention)

    @property
    def travelling_size(self) -> int:
        """Values of a token that go around a ring in a forward pass, in layers without a window."""
        layers = [layer.attention for layer in self.all_layers]
        return sum(one.travelling_size for one in layers if one.window is None)

    @property
    def halo_size(self) -> int:
        """Values that a member of a ring sends forward in layers with a window, at most."""
        return sum(layer.attention.halo_size for layer in self.layers)

    def ring_costs(self, value_bytes: int) -> dict[str, Any]:
        """What `CostModel` is told of attention beside its width."""
        return {
            "kv_bytes_per_token": self.travelling_size * value_bytes,
            "halo_bytes": 3 * self.halo_size * value_bytes,
            "query_ratio": self._query_ratio(value_bytes),
            "window_tokens": self.window or 0,
            "window_share": self.window_share,
        }

    def _query_ratio(self, value_bytes: int) -> float:
        """See `CostModel.query_ratio`; in layers without a window."""
        layers = [one.attention for one in self.all_layers if one.attention.window is None]
        return query_ratio_of(
            self.travelling_size,
            sum(layer.query_size for layer in layers),
            sum(layer.output_size for layer in layers),
            sum(layer.num_heads for layer in layers),
            value_bytes,
        )

    @property
    def made_size(self) -> int:
        """Values of a token that are made of its latent, in all layers."""
        return sum(layer.attention.made_size for layer in self.all_layers)

    @property
    def latent_size(self) -> int:
        """Values of a token that may travel in place of them, in all layers."""
        return sum(layer.attention.latent_size for layer in self.all_layers)

    @property
    def latent_matrices(self) -> int:
        """Parameters that make keys and values of latents, in all layers."""
        return sum(layer.attention.latent_matrices for layer in self.all_layers)

    @property
    def sent_to_experts(self) -> int:
        """Values of a token that go to its experts in a forward pass, in all layers."""
        return sum(layer.sent_to_experts for layer in self.all_layers)


def _beside(depth: int) -> str:
    """Before names of what a layer of further tokens holds."""
    return f"mtp.layers.{depth}."
