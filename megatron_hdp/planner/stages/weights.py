"""Relative time of virtual stages: their layers, and on the last one output layer and loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from megatron_hdp.planner.shape import Layer, ModelShape
from megatron_hdp.planner.stages.split import StageSplit

_PER_PARAMETER = 6.0  # FLOP of a token, forward and backward
_PER_PAIR = 6.0  # of a channel of attention, causal: half of all pairs, two products
_AGAIN = 1 / 3  # a forward's share of forward and backward, of what is trained
_SAVED = 1 / 3  # of a frozen parameter's FLOP: it has no gradient


@dataclass(frozen=True)
class LayerCosts:
    """FLOP of a token, forward and backward, on one HDP rank."""

    layers: tuple[float, ...]
    """Of each layer, in the model's order."""
    output: float
    """Of output layer and loss."""
    further: float = 0.0
    """Of layers that predict further tokens, on the last stage, their output and loss included."""

    @classmethod
    def of_shape(
        cls,
        shape: ModelShape,
        tokens: int,
        recompute: str | None = None,
        modules: Sequence[str] = ("core_attn",),
    ) -> LayerCosts:
        """Those of a model whose sequences have `tokens` tokens each.

        The output layer is ``6 hidden vocabulary`` FLOP a token, a layer 6 for each parameter that
        a token meets (4 for a frozen one) and ``6 attention-channels tokens`` for causal attention,
        in a window less.
        With recomputation the forward of what is recomputed counts twice: attention and MLP among
        the modules of ``selective``, the layer of ``full`` (in method ``block``, too, whose layers
        at the end of a stage are not recomputed).

        Args:
            shape: its vocabulary is padded.
            tokens: of a sequence on one rank.
            recompute: None, "selective" or "full".
            modules: of "selective", by Megatron's names.
        """
        modules = modules if recompute == "selective" else ()
        linear = 1 + _AGAIN if recompute == "full" else 1
        attention = 1 + _AGAIN if recompute == "full" or "core_attn" in modules else 1

        def of(layer: Layer) -> float:
            again = _AGAIN * layer.recomputed_matrices(modules)
            saved = _SAVED * (layer.frozen_dense_matrices + layer.frozen_expert_matrices)
            products = _PER_PARAMETER * (linear * layer.matrices + again - saved)
            seen = layer.attention.seen(tokens) / tokens
            return products + attention * _PER_PAIR * layer.attention.width * seen

        output = _PER_PARAMETER * shape.embedding * (1 if shape.trains_output else 1 - _SAVED)
        beside = _PER_PARAMETER * linear * shape.projection + output
        return cls(
            tuple(map(of, shape.layers)),
            output,
            sum(of(layer) + beside for layer in shape.further),
        )


def stage_weights(split: StageSplit, costs: LayerCosts) -> tuple[float, ...] | None:
    """Relative time of each virtual stage, in the model's order; they add up to 1.

    None for an even split of layers that are all alike, none of further tokens: its stages are
    planned as alike, whatever the last one does more.
    Looking a token up in the embedding is no product and counts as nothing.

    One number a stage is an approximation. Attention grows with the length of a sequence while
    output layer and loss do not, so the last stage's share falls as sequences grow. `costs` are
    therefore best taken at a rank's capacity: sequences packed into a micro-batch are shorter than
    that, and a ring's have more attention a token; a rank's longest whole sequence lies between.

    Args:
        split: the layers of each.
        costs: of each layer, and of output layer and loss.
    """
    if split.is_even and len(set(costs.layers)) == 1 and not costs.further:
        return None
    layers = iter(costs.layers)
    seconds = [sum(islice(layers, number)) for number in split.layers]
    seconds[-1] += costs.output + costs.further
    total = sum(seconds)
    return tuple(one / total for one in seconds)
