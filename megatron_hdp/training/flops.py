"""Floating-point operations of the model: what a batch needs, however it is run.

Counted are the matrix products: 2 m n k each, forward once and backward twice. A sequence of L
tokens attends causally, so its products of queries with keys and of scores with values fill half of
the square, L^2 / 2. Neither padding nor recomputation counts, so runs of one model compare.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from megatron_hdp.megatron.options import TrainingArguments, model_shape

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
        shape = model_shape(arguments, vocab_size)
        scores_and_values = 2 * shape.attention_width / 2  # two products, half of the square each
        return cls(
            per_token=_PASSES * 2.0 * shape.active_parameters,
            per_squared_token=_PASSES * 2.0 * scores_and_values,
        )

    def of_batch(self, tokens: int, squared_tokens: int) -> float:
        """Returns the operations of a batch.

        Args:
            tokens: sum of its sequences' lengths.
            squared_tokens: sum of their squares.
        """
        return self.per_token * tokens + self.per_squared_token * squared_tokens
