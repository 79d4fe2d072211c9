"""Rows of items, as an encoder of images makes them, in the place of embeddings of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from megatron.core.utils import get_attr_wrapped_model

from megatron_hdp.megatron.parallel import RankPlace

FIRST_MARK = 1 << 40
"""A token from here on stands for a row; no vocabulary is so large. So each knows its row wherever
it runs: in parts, in streams, again in backward."""


@contextmanager
def rows_for_marks(
    chunk: Any, levels: Sequence[torch.Tensor], sharded: RankPlace | None = None
) -> Iterator[None]:
    """Within it the embedding of a marked token is the row that it names.

    Args:
        chunk: of the first stage, in whatever wraps it.
        levels: ``[rows, hidden]`` each; gradients arrive there. Rows of the first one are
            embeddings; those of the next ones are added to what the first decoder layer, the
            second and so on give for the same tokens (deepstack).
        sharded: of sequence parallelism, this rank's place: each tensor rank has its share of a
            micro-batch's embeddings, and rows for it alone.
    """
    embeddings, *further = levels
    embedding = get_attr_wrapped_model(chunk, "embedding")
    ids_of_pass: list[torch.Tensor] = []

    def marked(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Where this rank's marked tokens are, and the rows that they name."""
        places = ids - FIRST_MARK
        if sharded is not None:
            places = places.chunk(sharded.num_tensor_ranks)[sharded.tensor_rank]
        (at,) = torch.where(places >= 0)
        return at, places[at]

    def before(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        ids = kwargs["input_ids"]
        ids_of_pass[:] = [ids[0]]
        return args, kwargs | {"input_ids": ids.where(ids < FIRST_MARK, 0)}

    def behind(module: Any, args: Any, kwargs: Any, embedded: torch.Tensor) -> torch.Tensor:
        at, rows = marked(ids_of_pass[0])
        return embedded.index_copy(0, at, embeddings[rows].to(embedded.dtype)[:, None])

    def adding(level: torch.Tensor) -> Callable[..., Any]:
        def behind_layer(module: Any, args: Any, kwargs: dict[str, Any], found: Any) -> Any:
            # of the micro-batch's own: recomputation runs a layer when others have been here
            at, rows = marked(kwargs["packed_seq_params"].tokens)
            hidden, *others = found
            added = level[rows].to(hidden.dtype)[:, None]
            return (hidden.index_add(0, at, added), *others)

        return behind_layer

    with ExitStack() as hooks:
        for hook in (
            embedding.register_forward_pre_hook(before, with_kwargs=True),
            embedding.register_forward_hook(behind, with_kwargs=True),
        ):
            hooks.enter_context(hook)
        if further:
            layers = get_attr_wrapped_model(chunk, "decoder").layers
            for layer, level in zip(layers, further, strict=False):
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
