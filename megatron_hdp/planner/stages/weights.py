"""Relative time of virtual stages: their layers, and on the last one output layer and loss."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_hdp.planner.models import active_parameters
from megatron_hdp.planner.stages.split import StageSplit

_PER_PARAMETER = 6.0  # FLOP of a token, forward and backward
_PER_PAIR = 6.0  # of a channel of attention, causal: half of all pairs, two products
_AGAIN = 1 / 3  # a forward's share of forward and backward


@dataclass(frozen=True)
class LayerCosts:
    """FLOP of a token, forward and backward, on one HDP rank."""

    layer: float
    """Of one layer."""
    output: float
    """Of output layer and loss."""

    @classmethod
    def of_shape(
        cls,
        *,
        hidden_size: int,
        num_attention_heads: int,
        num_query_groups: int,
        kv_channels: int,
        ffn_hidden_size: int,
        gated: bool,
        experts_per_token: int = 1,
        num_experts: int = 0,
        vocab_size: int,
        tokens: int,
        recompute: str | None = None,
    ) -> LayerCosts:
        """Those of a model whose sequences have `tokens` tokens each.

        The output layer is ``6 hidden vocabulary`` FLOP a token, a layer 6 for each parameter that
        a token meets and ``6 attention-channels tokens`` for causal attention. With recomputation
        the forward of what is recomputed counts twice: the attention of ``selective``, the layer of
        ``full`` (in method ``block``, too, whose layers at the end of a stage are not recomputed).

        Args:
            hidden_size: h.
            num_attention_heads: of queries.
            num_query_groups: of keys and values.
            kv_channels: size of a head.
            ffn_hidden_size: of the MLP, or of one expert.
            gated: whether the MLP has a gate.
            experts_per_token: that a token visits.
            num_experts: 0: a plain MLP.
            vocab_size: padded.
            tokens: of a sequence on one rank.
            recompute: None, "selective" or "full".
        """
        linear = _PER_PARAMETER * active_parameters(
            num_layers=1,
            hidden_size=hidden_size,
            num_attention_heads=num_attention_heads,
            num_query_groups=num_query_groups,
            kv_channels=kv_channels,
            ffn_hidden_size=ffn_hidden_size,
            gated=gated,
            experts_per_token=experts_per_token,
            num_experts=num_experts,
        )
        attention = _PER_PAIR * num_attention_heads * kv_channels * tokens
        if recompute is not None:
            attention *= 1 + _AGAIN
        if recompute == "full":
            linear *= 1 + _AGAIN
        return cls(linear + attention, _PER_PARAMETER * hidden_size * vocab_size)


def stage_weights(split: StageSplit, costs: LayerCosts) -> tuple[float, ...] | None:
    """Relative time of each virtual stage, in the model's order; they add up to 1.

    None for an even split: its stages are planned as all alike, whatever the last one does more.
    Looking a token up in the embedding is no product and counts as nothing.

    One number a stage is an approximation. Attention grows with the length of a sequence while
    output layer and loss do not, so the last stage's share falls as sequences grow. `costs` are
    therefore best taken at a rank's capacity: sequences packed into a micro-batch are shorter than
    that, and a ring's have more attention a token; a rank's longest whole sequence lies between.

    Args:
        split: the layers of each.
        costs: of a layer, and of output layer and loss.
    """
    if split.is_even:
        return None
    seconds = [layers * costs.layer for layers in split.layers]
    seconds[-1] += costs.output
    total = sum(seconds)
    return tuple(one / total for one in seconds)
