"""Floating-point operations of the model: what a batch needs, however it is run.

Counted are the matrix products: 2 m n k each, forward once and backward twice. A sequence of L
tokens attends causally, so its products of queries with keys and of scores with values fill half of
the square, L^2 / 2; in a window of w tokens w (L - w / 2), where L is more. Neither padding nor
recomputation counts, so runs of one model compare.
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
    """For each unit of a sequence's squared length: attention of layers without a window."""
    per_seen_in_window: float = 0.0
    """For each unit of twice the pairs of query and key in the window: of layers with one."""

    @classmethod
    def of_model(cls, arguments: TrainingArguments, vocab_size: int) -> Self:
        """Returns the operations of a model.

        Args:
            arguments: its shape.
            vocab_size: entries of the tokenizer; what they are padded to does not count.
        """
        shape = model_shape(arguments, vocab_size)
        scores_and_values = 2 * shape.attention_width / 2  # two products, half of the square each
        attention = _PASSES * 2.0 * scores_and_values
        return cls(
            per_token=_PASSES * 2.0 * shape.active_parameters,
            per_squared_token=attention * (1 - shape.window_share),
            per_seen_in_window=attention * shape.window_share,
        )

    def of_batch(
        self, tokens: int, squared_tokens: int, seen_in_window: int | None = None
    ) -> float:
        """Returns the operations of a batch.

        Args:
            tokens: sum of its sequences' lengths.
            squared_tokens: sum of their squares.
            seen_in_window: twice the pairs of query and key in layers with a window; as many as
                without one unless given.
        """
        seen = squared_tokens if seen_in_window is None else seen_in_window
        attention = self.per_squared_token * squared_tokens + self.per_seen_in_window * seen
        return self.per_token * tokens + attention
