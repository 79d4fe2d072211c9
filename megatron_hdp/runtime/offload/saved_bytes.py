"""Counts what autograd keeps of each layer: the activations of the memory model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class SavedBytes:
    """What autograd saved of an example."""

    layers: list[int]
    """Bytes of each layer, in the order in which they run."""
    largest: int
    """Of one storage."""


def saved_bytes(
    layers: Sequence[torch.nn.Module],
    parameters: Iterable[torch.Tensor],
    forward: Callable[[], object],
) -> SavedBytes:
    """Bytes that autograd saves in each layer while `forward` runs, once each.

    Args:
        layers: in the order in which they run.
        parameters: what is there anyway and does not count, nor do views of it.
        forward: runs them; its graph must be alive when it returns, that is, in what it returns.
    """
    seen = {tensor.untyped_storage().data_ptr() for tensor in parameters}
    totals = [0] * len(layers)
    largest = 0
    current: list[int] = []  # the layer that was entered last, if one was

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal largest
        storage = tensor.untyped_storage()
        if current and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            totals[current[0]] += storage.nbytes()
            largest = max(largest, storage.nbytes())
        return tensor

    with ExitStack() as hooks:
        for number, layer in enumerate(layers):
            handle = layer.register_forward_pre_hook(
                lambda _layer, _args, number=number: current.__setitem__(slice(None), [number])
            )
            hooks.callback(handle.remove)
        hooks.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x))
        alive = forward()
        del alive
    return SavedBytes(totals, largest)
