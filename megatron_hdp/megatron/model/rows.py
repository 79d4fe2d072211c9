"""Rows of items, as an encoder of images makes them, in the place of embeddings of tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.utils import get_attr_wrapped_model

from megatron_hdp.megatron.parallel import RankPlace

FIRST_MARK = 1 << 40
"""A token from here on stands for a row; no vocabulary is so large. So each knows its row wherever
it runs: in parts, in streams, again in backward."""


@contextmanager
def rows_for_marks(
    chunk: Any, rows: torch.Tensor, sharded: RankPlace | None = None
) -> Iterator[None]:
    """Within it the embedding of a marked token is the row that it names.

    Args:
        chunk: of the first stage, in whatever wraps it.
        rows: ``[rows, hidden]``; gradients arrive there.
        sharded: of sequence parallelism, this rank's place: each tensor rank has its share of a
            micro-batch's embeddings, and rows for it alone.
    """
    embedding = get_attr_wrapped_model(chunk, "embedding")
    marks: list[torch.Tensor] = []

    def before(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        ids = kwargs["input_ids"]
        marks[:] = [ids[0] - FIRST_MARK]
        return args, kwargs | {"input_ids": ids.where(ids < FIRST_MARK, 0)}

    def behind(module: Any, args: Any, kwargs: Any, embedded: torch.Tensor) -> torch.Tensor:
        places = marks[0]
        if sharded is not None:
            places = places.chunk(sharded.num_tensor_ranks)[sharded.tensor_rank]
        (at,) = torch.where(places >= 0)
        return embedded.index_copy(0, at, rows[places[at]].to(embedded.dtype)[:, None])

    with (
        embedding.register_forward_pre_hook(before, with_kwargs=True),
        embedding.register_forward_hook(behind, with_kwargs=True),
    ):
        yield
