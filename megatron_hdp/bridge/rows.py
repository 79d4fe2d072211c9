"""Micro-batches of Megatron-Bridge as whole sequences, gathered from all data-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist

from megatron_hdp.arrays import BoolArray, Int64Array

_BOUNDS = ("cu_seqlens_q_padded", "cu_seqlens_q", "cu_seqlens")
"""Where a row has several sequences, their bounds; the first that is there counts."""


@dataclass(frozen=True)
class Rows:
    """Sequences, and which of their tokens are trained, as `TokenBatch` takes them."""

    tokens: list[Int64Array]
    trained: list[BoolArray]

    @classmethod
    def of(cls, micro_batches: Sequence[Mapping[str, Any]]) -> Self:
        """Of a rank's micro-batches, cut after each sequence's last trained token.

        Nothing looks at a token behind it, so padding is gone. Sequences of which nothing is
        trained are left out.

        Args:
            micro_batches: ``tokens``, ``labels``, ``loss_mask`` and ``position_ids``, each
                ``[rows, length]``, and of packed rows the bounds of sequences.

        Raises:
            ValueError: what HDP does not know.
        """
        rows = cls([], [])
        for batch in micro_batches:
            if batch.get("attention_mask") is not None:
                raise ValueError(
                    "found an attention_mask in a batch, expected none, because HDP's attention is "
                    "causal within each sequence: set skip_getting_attention_mask_from_dataset, or "
                    "get_attention_mask_from_fusion"
                )
            for sequence in _sequences(batch):
                rows._add(*sequence)
        return rows

    def lengths(self) -> Int64Array:
        """Tokens of each sequence, ``[n]``."""
        return np.array([len(one) for one in self.tokens], dtype=np.int64)

    def gathered(self, group: dist.ProcessGroup, device: Any) -> Rows:
        """Those of all ranks of a group, rank by rank; every rank must call this."""
        lengths = self.lengths()
        words = [2 * one + mask for one, mask in zip(self.tokens, self.trained, strict=True)]
        mine = np.concatenate([[len(lengths)], lengths, *words]).astype(np.int64)
        found = Rows([], [])
        for theirs in _of_all(torch.from_numpy(mine).to(device), group):
            num = int(theirs[0])
            ends = np.cumsum(theirs[1 : num + 1])
            for one in np.split(theirs[num + 1 :], ends)[:-1]:
                found.tokens.append(one >> 1)
                found.trained.append((one & 1).astype(np.bool_))
        return found

    def _add(
        self, tokens: Int64Array, labels: Int64Array, mask: Any, positions: Int64Array
    ) -> None:
        trained = np.flatnonzero(mask)
        if not len(trained):
            return
        num = int(trained[-1]) + 1
        if not np.isin(mask, (0, 1)).all():
            raise ValueError(
                f"found a loss_mask of {mask[(mask != 0) & (mask != 1)][0]:g}, expected 0 and 1"
            )
        inside = trained[trained < num - 1]
        if (labels[inside] != tokens[inside + 1]).any():
            raise ValueError(
                "found labels that are not the next tokens, expected next-token prediction: HDP "
                "reads what is predicted from the tokens"
            )
        if (positions[:num] != np.arange(num)).any():
            raise ValueError(
                "found position_ids that are not 0, 1, 2 ... within a sequence: switch off "
                "reset_position_ids and reset_attention_mask, or pack sequences as Bridge does"
            )
        self.tokens.append(np.append(tokens[:num], labels[num - 1]))
        self.trained.append(np.append(False, mask[:num] != 0))


def _sequences(batch: Mapping[str, Any]) -> Iterator[list[Any]]:
    """Of each sequence tokens, labels, mask and positions, ``[length]`` each."""
    names = ("tokens", "labels", "loss_mask", "position_ids")
    if missing := [one for one in names if batch.get(one) is None]:
        raise ValueError(
            f"found no {', '.join(missing)} in a batch, expected those of Bridge's GPT data sets"
        )
    arrays = [batch[one].cpu().numpy() for one in names]
    bounds = next((batch[one] for one in _BOUNDS if batch.get(one) is not None), None)
    if bounds is None:
        for row in range(len(arrays[0])):
            yield [one[row] for one in arrays]
        return
    of_rows = bounds.cpu().numpy().reshape(len(arrays[0]), -1)
    for row, given in enumerate(of_rows):
        cuts = given[: np.flatnonzero(given < 0)[0]] if (given < 0).any() else given
        if arrays[2][row, cuts[-1] :].any() or cuts[0] != 0 or (np.diff(cuts) < 0).any():
            raise ValueError(
                f"found bounds of packed sequences from {cuts[0]} to {cuts[-1]}, expected them to "
                "ascend from 0, and nothing trained behind them"
            )
        for start, stop in zip(cuts[:-1], cuts[1:], strict=True):
            yield [one[row, start:stop] for one in arrays]


def _of_all(mine: torch.Tensor, group: dist.ProcessGroup) -> list[Int64Array]:
    """Vectors of any length, of all ranks of a group."""
    num_ranks = dist.get_world_size(group)
    counts = [torch.zeros_like(mine[:1]) for _ in range(num_ranks)]
    dist.all_gather(counts, torch.full_like(mine[:1], len(mine)), group=group)
    numbers = [int(one) for one in counts]
    padded = mine.new_zeros(max(numbers))
    padded[: len(mine)] = mine
    parts = [torch.empty_like(padded) for _ in range(num_ranks)]
    dist.all_gather(parts, padded, group=group)
    return [one[:num].cpu().numpy() for one, num in zip(parts, numbers, strict=True)]
