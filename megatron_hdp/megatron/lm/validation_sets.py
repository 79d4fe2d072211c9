"""The loss of each validation set, in the words and under the names of stock Megatron-LM.

Stock Megatron evaluates the sets of ``--multiple-validation-sets`` one after the other. Under HDP
there is one evaluation, whose loss is known by source; the sources are the sets.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

from megatron_hdp.megatron.step import EvaluationLoss


class ValidationSets:
    """The validation sets of a run, as a log names them."""

    def __init__(self, sources: Sequence[str], names: Sequence[str] | None) -> None:
        """Names the sets by ``--validation-set-names``, without it by their numbers from 0.

        Raises:
            ValueError: there are not as many names as sources.
        """
        labels = names or [str(number) for number in range(len(sources))]
        if len(labels) != len(sources):
            raise ValueError(
                f"--validation-set-names: found {len(labels)} names ({', '.join(labels)}), "
                f"expected {len(sources)}, one for each validation set: {', '.join(sources)}"
            )
        self._labels = dict(zip(sources, labels, strict=True))

    def lines(self, found: EvaluationLoss, prefix: str) -> list[str]:
        """A line for each set in Megatron's words, which say by `prefix` when it was."""
        lines = []
        for source, label in self._labels.items():
            loss = found.sources.get(source)
            figures = "none of its sequences was drawn by --eval-iters batches | "
            if loss is not None:
                figures = f"lm loss value: {loss:.6E} | lm loss PPL: {_perplexity(loss):.6E} | "
            lines.append(f" validation-{label} loss at {prefix} | {figures}source: {source} | ")
        return lines

    def losses(self, found: EvaluationLoss) -> dict[str, float]:
        """The losses by Megatron's names of scalars, of the sets that have one."""
        return {
            f"lm loss validation-{label}": found.sources[source]
            for source, label in self._labels.items()
            if source in found.sources
        }

    def scalars(
        self, found: EvaluationLoss, iteration: int, args: argparse.Namespace
    ) -> list[tuple[str, float, int]]:
        """What Megatron writes to TensorBoard: name, value and place on the horizontal axis."""
        scalars = []
        for name, loss in self.losses(found).items():
            values = {name: loss}
            if args.log_validation_ppl_to_tensorboard:
                values[f"{name} ppl"] = _perplexity(loss)
            for one, value in values.items():
                scalars += [(one, value, iteration)]
                scalars += [(f"{one} vs samples", value, args.consumed_train_samples)]
        return scalars


def _perplexity(loss: float) -> float:
    return math.exp(min(20, loss))  # Megatron's limit
