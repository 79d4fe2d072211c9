"""Rows of items, as an encoder of images makes them, in the place of embeddings of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
from megatron.core.utils import get_attr_wrapped_model

from megatron_hdp.arrays import Int64Array
from megatron_hdp.megatron.parallel import RankPlace
from megatron_hdp.runtime.host_to_device import to_device

FIRST_MARK = 1 << 40
"""A token from here on stands for a row; no vocabulary is so large. So each knows its row wherever
it runs: in parts, in streams, again in backward."""


class Rows(Protocol):
    """Rows of items, of one or more levels."""

    levels: int
    """Of each row: the first is an embedding, the next one is added behind the first decoder layer,
    and so on (deepstack)."""

    def take(self, places: Int64Array, level: int) -> torch.Tensor:
        """Rows at places, ``[places, hidden]``; a gradient that they get is noted."""
        ...


@contextmanager
def rows_for_marks(chunk: Any, rows: Rows, sharded: RankPlace | None = None) -> Iterator[None]:
    """Within it the embedding of a marked token is the row that it names.

    A pass takes the rows of its own tokens, and those of a level when it gets there.

    Args:
        chunk: of the first stage, in whatever wraps it.
        rows: that marks name.
        sharded: of sequence parallelism, this rank's place: each tensor rank has its share of a
            micro-batch's embeddings, and rows for it alone.
    """
    model = get_attr_wrapped_model(chunk, "embedding", return_model_obj=True)
    tokens_of_pass: list[Int64Array] = []

    def marked(tokens: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Where this rank's marked tokens are, and the rows that they name."""
        places = tokens - FIRST_MARK
        if sharded is not None:
            size = len(places) // sharded.num_tensor_ranks
            places = places[sharded.tensor_rank * size :][:size]
        (at,) = (places >= 0).nonzero()
        return at, places[at]

    def begin(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        tokens_of_pass[:] = [kwargs["packed_seq_params"].tokens]

    def before(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        ids = kwargs["input_ids"]
        return args, kwargs | {"input_ids": ids.where(ids < FIRST_MARK, 0)}

    def behind(module: Any, args: Any, kwargs: Any, embedded: torch.Tensor) -> torch.Tensor:
        at, places = marked(tokens_of_pass[0])
        if not len(at):
            return embedded
        taken = rows.take(places, 0).to(embedded.dtype)[:, None]
        return embedded.index_copy(0, to_device(torch.from_numpy(at), embedded.device), taken)

    def adding(level: int) -> Callable[..., Any]:
        def behind_layer(module: Any, args: Any, kwargs: dict[str, Any], found: Any) -> Any:
            # of the micro-batch's own: recomputation runs a layer when others have been here
            at, places = marked(kwargs["packed_seq_params"].tokens)
            if not len(at):
                return found
            hidden, *others = found
            taken = rows.take(places, level).to(hidden.dtype)[:, None]
            there = to_device(torch.from_numpy(at), hidden.device)
            return (hidden.index_add(0, there, taken), *others)

        return behind_layer

    with ExitStack() as hooks:
        for hook in (
            model.register_forward_pre_hook(begin, with_kwargs=True),
            model.embedding.register_forward_pre_hook(before, with_kwargs=True),
            model.embedding.register_forward_hook(behind, with_kwargs=True),
        ):
            hooks.enter_context(hook)
        if rows.levels > 1:
            layers = get_attr_wrapped_model(chunk, "decoder").layers
            for level, layer in zip(range(1, rows.levels), layers, strict=False):
                hook = layer.register_forward_hook(adding(level), with_kwargs=True)
                hooks.enter_context(hook)
        yield


def require_layers(chunk: Any, num: int) -> None:
    """Refuses further levels of rows that the first part of the model has no layers for.

    Raises:
        ValueError: it has fewer than `num` decoder layers.
    """
    found = len(get_attr_wrapped_model(chunk, "decoder").layers) if num else 0
    if found < num:
        raise ValueError(
            f"found {found} layers on the first pipeline stage, or in its first part with virtual "
            f"stages, expected {num} or more: the encoder adds rows behind so many (deepstack). "
            "Take fewer stages, or put more layers on the first"
        )
