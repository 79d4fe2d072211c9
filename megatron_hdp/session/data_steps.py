"""Steps of a file of ``--hdp-data`` as batches, with the pictures of their sequences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from megatron_hdp.data.mixture import (
    BatchSize,
    Corpus,
    Opening,
    Position,
    Step,
    open_corpus,
    read_data_file,
)
from megatron_hdp.megatron.media import items_of
from megatron_hdp.session.batch import TokenBatch


class DataSteps:
    """Draws the steps of a run, the same on every rank and for any number of them.

    A picture is a `StoredPicture`: the rank that encodes it reads and decodes it then, and no other
    one does.

    Attributes:
        position: what has been drawn.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        max_length: int,
        batch: BatchSize,
        seed: int = 1234,
        tokenizer: str | None = None,
        cache_folder: Path | None = None,
        record: Mapping[str, Any] | None = None,
        **how: Any,
    ) -> None:
        """Open the sources; what is not tokenised is, first, by one process a node.

        Args:
            path: a file as of ``--hdp-data``.
            max_length: tokens of a sequence, rows of pictures included: ``--seq-length``.
            batch: the size of a step.
            seed: of the order.
            tokenizer: for sources that name none.
            cache_folder: as ``--data-cache-path``; if not given, beside the file.
            record: of `record`, where a run resumes.
            how: more of `data.mixture.Opening`.

        Raises:
            ValueError: a source cannot be opened; the run that resumes had other sources, another
                order of them, or another size of pictures.
        """
        how = {"long_sequence": "truncate", **how}
        opening = Opening(
            max_length=max_length, tokenizer=tokenizer, cache_folder=cache_folder, **how
        )
        self.corpus: Corpus = open_corpus(read_data_file(path).training, opening)
        orders = self.corpus.orders()
        self._orders = {name: asdict(order) for name, order in orders.items()}
        self._mixture = self.corpus.mixture(orders, batch, seed)
        self._seed = seed
        self.position = Position()
        if record is not None:
            self._require_same(record)
            self.position = Position.from_record(record["position"])

    def __iter__(self) -> Iterator[TokenBatch]:
        """Yield steps until the sources end, if they do."""
        while not self._mixture.is_over(self.position):
            yield self.step()

    def step(self) -> TokenBatch:
        """Return the next step, and move on behind it."""
        drawn = self._mixture.step(self.position)
        self.position = drawn.after
        return batch_of(self.corpus, drawn)

    def record(self) -> dict[str, Any]:
        """Return plain values for a checkpoint: where the data are, and in which order."""
        return {
            "position": self.position.to_record(),
            "orders": self._orders,
            "seed": self._seed,
        }

    def _require_same(self, record: Mapping[str, Any]) -> None:
        if record["seed"] != self._seed:
            raise ValueError(
                f"found the seed {self._seed}, expected {record['seed']} as in the run that "
                "resumes: take that"
            )
        for name, order in self._orders.items():
            before = record["orders"].get(name, order)
            if before != order:
                raise ValueError(
                    f"found another order of source '{name}' than in the run that resumes, "
                    "expected the same: its files, tokenizer, media and their settings, and "
                    "max_length must stay"
                )


def batch_of(corpus: Corpus, step: Step) -> TokenBatch:
    """Return the sequences of a step as arrays, with their pictures."""
    tokens, masks = [], []
    columns = (step.sources, step.rows, step.starts, step.lengths, step.num_labels)
    for one in zip(*(column.tolist() for column in columns), strict=True):
        number, row, start, length, labels = one
        source = corpus.sources[number]
        tokens.append(source.tokens(row, start, length))
        mask = np.zeros(length, dtype=np.bool_)
        # a token's label is the next one; here each says of itself whether it is trained
        labels = min(labels, length - 1)
        mask[1 : labels + 1] = source.is_trained(row, start, start + labels)
        masks.append(mask)
    return TokenBatch(tokens, loss_mask=masks, media=items_of(corpus, step))
