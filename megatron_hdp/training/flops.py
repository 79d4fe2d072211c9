"""Floating-point operations of the model: what a batch needs, however it is run.

Counted are the matrix products: 2 m n k each, forward once and backward twice. A sequence of L
tokens attends causally, so its products of queries with keys and of scores with values fill half of
the square, L^2 / 2. Neither padding nor recomputation counts, so runs of one model compare.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from megatron_hdp.megatron.options import TrainingArguments

_PASSES = 3  # forward; backward with respect to inputs and to weights


@dataclass(frozen=True)
class ModelFlops:
    """Operations of forward and backward of one model."""

    per_token: float
    """For each token: all products with the weights that it meets."""
    per_squared_token: float
    """For each unit of a sequence's squared length: attention."""

    @classmethod
    def of_model(cls, arguments: TrainingArguments, vocab_size: int) -> Self:
        """Returns the operations of a model.

        Args:
            arguments: its shape.
            vocab_size: entries of the tokenizer; what they are padded to does not count.
        """
        hidden_size = arguments.hidden_size
        query_size = arguments.num_attention_heads * arguments.kv_channels
        kv_size = 2 * arguments.num_query_groups * arguments.kv_channels
        attention_weights = hidden_size * (query_size + kv_size) + query_size * hidden_size
        layer_weights = attention_weights + _mlp_weights(arguments)
        weights = arguments.num_layers * layer_weights + hidden_size * vocab_size
        scores_and_values = 2 * query_size / 2  # two products, half of the square each
        return cls(
            per_token=_PASSES * 2.0 * weights,
            per_squared_token=_PASSES * 2.0 * arguments.num_layers * scores_and_values,
        )

    def of_batch(self, tokens: int, squared_tokens: int) -> float:
        """Returns the operations of a batch.

        Args:
            tokens: sum of its sequences' lengths.
            squared_tokens: sum of their squares.
        """
        return self.per_token * tokens + self.per_squared_token * squared_tokens


def _mlp_weights(arguments: TrainingArguments) -> int:
    """Weights of one layer's MLP that a token meets; of experts those it goes to, and the router.

    A gated MLP has two inner matrices.
    """
    weights_a_unit = (3 if arguments.swiglu else 2) * arguments.hidden_size
    if arguments.num_experts is None:
        return weights_a_unit * arguments.ffn_hidden_size
    expert_size = arguments.moe_ffn_hidden_size or arguments.ffn_hidden_size
    router_weights = arguments.hidden_size * arguments.num_experts
    return arguments.moe_router_topk * weights_a_unit * expert_size + router_weights
