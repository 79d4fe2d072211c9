"""Counts what autograd keeps of each layer: the activations of the memory model."""

from __future__ import annotations

import weakref
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
    """Of one storage, also of one that autograd soon dropped."""


def saved_bytes(
    layers: Sequence[torch.nn.Module],
    parameters: Iterable[torch.Tensor],
    forward: Callable[[], object],
) -> SavedBytes:
    """Bytes that autograd still keeps of each layer when `forward` has run, once each.

    What it saved for a result that nobody used is gone by then.

    Args:
        layers: in the order in which they run.
        parameters: what is there anyway and does not count, nor do views of it.
        forward: runs them; its graph must be alive when it returns, that is, in what it returns.
    """
    parameter_storages = {tensor.untyped_storage().data_ptr() for tensor in parameters}
    entered: list[int] = []  # the layer that was entered last, if one was
    saved: list[tuple[int, weakref.ref[_Saved]]] = []
    largest = 0

    def pack(tensor: torch.Tensor) -> _Saved:
        nonlocal largest
        one, storage = _Saved(tensor), tensor.untyped_storage()
        if entered and storage.data_ptr() not in parameter_storages:
            saved.append((entered[0], weakref.ref(one)))
            largest = max(largest, storage.nbytes())
        return one

    with ExitStack() as hooks:
        for number, layer in enumerate(layers):
            handle = layer.register_forward_pre_hook(
                lambda _layer, _args, number=number: entered.__setitem__(slice(None), [number])
            )
            hooks.callback(handle.remove)
        hooks.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one.tensor))
        alive = forward()
        totals = _added_up(saved, len(layers))
        del alive
    return SavedBytes(totals, largest)


class _Saved:
    """What autograd keeps of a tensor; gone with the part of the graph that it was saved for."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def _added_up(saved: list[tuple[int, weakref.ref[_Saved]]], num_layers: int) -> list[int]:
    """Bytes of the storages that are still there, each in the layer that saved it first."""
    totals, counted = [0] * num_layers, set[int]()
    for layer, reference in saved:
        one = reference()
        if one is None:
            continue
        storage = one.tensor.untyped_storage()
        if storage.data_ptr() not in counted:
            counted.add(storage.data_ptr())
            totals[layer] += storage.nbytes()
    return totals
