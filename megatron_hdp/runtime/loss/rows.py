"""The elementwise work of losses that make their logits chunk by chunk."""

from __future__ import annotations

import torch


class TorchRows:
    """The work on a chunk's logits ``[c, V]``; one row is one token. In plain PyTorch.

    For any device and precision: the reference of what replaces it. `columns` ``[c]`` int64 is
    where a token's label stands in this rank's part of the vocabulary, below 0 or from V on where
    it does not. Figures of rows have at least float32.
    """

    def statistics(
        self, logits: torch.Tensor, columns: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(scores, figures): what `gradient` works on, here ``exp(logit - largest)``; ``[3, c]``.

        The figures are the largest logit, the sum of ``exp(logit - largest)``, and the label's
        logit, 0 where it is not here. `logits` may be overwritten.
        """
        scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
        column, here = inside(columns, scores.shape[1])
        targets = scores.gather(1, column[:, None])[:, 0] * here
        largest = scores.amax(1)
        scores.sub_(largest[:, None]).exp_()
        return scores, torch.stack((largest, scores.sum(1), targets))

    def gradient(
        self,
        scores: torch.Tensor,
        figures: torch.Tensor,
        columns: torch.Tensor,
        log_sums: torch.Tensor,
        weights: torch.Tensor,
    ) -> None:
        """Makes `scores`, in place, the gradient of ``sum(weights * loss)`` by the logits.

        `log_sums` ``[c]`` are over the whole vocabulary, `weights` ``[c]`` the tokens'.
        """
        column, here = inside(columns, scores.shape[1])
        scores.mul_((weights * (figures[0] - log_sums).exp())[:, None])
        scores.scatter_add_(1, column[:, None], -(weights * here)[:, None])


def inside(columns: torch.Tensor, num_columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(a column that exists, whether it is the one asked for)."""
    here = (columns >= 0) & (columns < num_columns)
    return columns.clamp(0, num_columns - 1), here
