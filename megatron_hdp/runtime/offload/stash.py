"""What autograd saves of one micro-batch's layers: which of it goes to the host, and its way back.

Forward: a storage that is chosen starts its way to the host when autograd first saves it, and its
device memory is let go two layers later, so that two layers' worth is resident besides what stays
(ByteScale, equation 3). Backward: when it reaches a layer, the layer before it starts its way back.

A storage is known by itself: its address may be another's as soon as its memory is freed. One whose
maker will empty it and fill it again stays (`MicroBatchStash.keep`).
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable, Set
from dataclasses import dataclass

import torch

from megatron_hdp.runtime.offload.copies import Copy, CopyEngine
from megatron_hdp.runtime.offload.host_pool import HostPool

RESIDENT_LAYERS = 2
"""The layer that computes and the one that is being copied."""


@dataclass(frozen=True)
class StashRules:
    """What the stashes of all micro-batches share."""

    num_layers: int
    device: torch.device
    pool: HostPool
    copies: CopyEngine


class OffloadedStorage:
    """A storage of the device that lives on the host between forward and backward.

    It dies with the last tensor that autograd saved of it; its host memory then goes back.
    """

    def __init__(self, storage: torch.UntypedStorage, rules: StashRules) -> None:
        self._rules = rules
        self._num_bytes = storage.nbytes()
        self._on_device: torch.UntypedStorage | None = storage
        self._on_host = rules.pool.take(self._num_bytes)
        self._leaving: Copy | None = rules.copies.to_host(
            self._on_host.tensor, _bytes_of(storage, rules.device)
        )
        self._returning: Copy | None = None

    def let_go(self) -> None:
        """Forgets the device's copy; compute waits until the host has it."""
        if self._leaving is not None:
            self._leaving()
            self._leaving = None
            assert self._on_device is not None
            left = self._on_device.nbytes()
            if left != self._num_bytes:
                raise RuntimeError(
                    f"a saved activation of {self._num_bytes:,} bytes has {left:,} while it is "
                    "copied to the host: the layer that made it emptied it, and --hdp-offload does "
                    "not know of that: train with --hdp-offload off"
                )
            self._on_device = None

    def fetch(self) -> None:
        """Starts the way back, unless it has begun or the device's copy is still there."""
        if self._on_device is not None:
            return
        # from the memory of the stream that computes: what ran there before is done with it,
        # because the copy starts after it
        memory = torch.empty(self._num_bytes, dtype=torch.uint8, device=self._rules.device)
        self._returning = self._rules.copies.to_device(memory, self._on_host.tensor)
        self._on_device = memory.untyped_storage()

    def restored(self) -> torch.UntypedStorage:
        """The storage on the device; compute waits until it is there."""
        self.fetch()
        if self._returning is not None:
            self._returning()
            self._returning = None
        assert self._on_device is not None
        return self._on_device

    def __del__(self) -> None:
        # the next user of the host memory is ordered after what compute has waited for
        for copy in (getattr(self, "_leaving", None), getattr(self, "_returning", None)):
            if copy is not None:
                copy()
        if hasattr(self, "_on_host"):
            self._rules.pool.give_back(self._on_host)


@dataclass(frozen=True)
class _Saved:
    """What autograd keeps instead of a tensor."""

    layer: int
    tensor: torch.Tensor | None
    """The tensor itself where it stays."""
    storage: OffloadedStorage | None = None
    dtype: torch.dtype | None = None
    size: torch.Size | None = None
    stride: tuple[int, ...] | None = None
    offset: int = 0


class MicroBatchStash:
    """Saved tensors of one micro-batch; `pack` and `unpack` are hooks of autograd.

    Args:
        ratio: share of the bytes that may leave which does; at any moment of the forward at least
            this share of what was seen has left, and at most one storage more.
        rules: shared by all micro-batches.
        kept: storages that are never offloaded: those of the model's parameters.

    Attributes:
        offloaded_bytes: what went to the host.
        seen_bytes: what might have gone: storages worth a copy in all but the last two layers.
        seen_layers: of those, the ones that this forward ran through.
        largest_bytes: the largest of those storages.
    """

    def __init__(self, ratio: float, rules: StashRules, kept: Set[torch.UntypedStorage]) -> None:
        if not 0 < ratio <= 1:
            raise ValueError(f"the offload ratio is {ratio}; expected 0 < ratio <= 1")
        self.ratio = ratio
        self.offloaded_bytes = 0
        self.seen_bytes = 0
        self.seen_layers = 0
        self.largest_bytes = 0
        self._rules = rules
        self._kept = kept
        self._layer = -1  # before the first
        self._reached = rules.num_layers  # the earliest layer whose backward has begun
        self._leaving: dict[torch.UntypedStorage, OffloadedStorage] = {}  # still on the device
        self._staying: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self._chosen: defaultdict[int, list[torch.UntypedStorage]] = defaultdict(list)
        self._by_layer: defaultdict[int, list[weakref.ref[OffloadedStorage]]] = defaultdict(list)

    def enter_layer(self, layer: int, shared: tuple[torch.Tensor, ...] = ()) -> None:
        """The forward of `layer` begins; tensors of `shared` are every layer's, and stay."""
        self._layer = layer
        self.seen_layers += layer < self._rules.num_layers - RESIDENT_LAYERS
        self._let_go(layer - RESIDENT_LAYERS)
        self.keep(shared)

    def keep(self, tensors: Iterable[torch.Tensor]) -> None:
        """These stay, and do not count: every layer has them, or they are emptied in forward."""
        self._staying.update(tensor.untyped_storage() for tensor in tensors)

    def end_forward(self) -> None:
        """The forward is over."""
        for layer in list(self._chosen):
            self._let_go(layer)
        self._staying.clear()

    def pack(self, tensor: torch.Tensor) -> _Saved:
        """Hook: autograd saves `tensor`."""
        if not self._may_leave(tensor):
            return _Saved(self._layer, tensor)
        storage = tensor.untyped_storage()
        offloaded = self._leaving.get(storage) or self._choose(storage)
        if offloaded is None:
            return _Saved(self._layer, tensor)
        return _Saved(
            self._layer,
            None,
            offloaded,
            tensor.dtype,
            tensor.size(),
            tensor.stride(),
            tensor.storage_offset(),
        )

    def unpack(self, saved: _Saved) -> torch.Tensor:
        """Hook: autograd wants the tensor back."""
        if saved.layer < self._reached:
            self._reached = saved.layer
            self._fetch(saved.layer)
            self._fetch(saved.layer - 1)
        if saved.storage is None:
            assert saved.tensor is not None
            return saved.tensor
        assert saved.dtype is not None and saved.size is not None
        tensor = torch.empty(0, dtype=saved.dtype, device=self._rules.device)
        return tensor.set_(saved.storage.restored(), saved.offset, saved.size, saved.stride)

    def _may_leave(self, tensor: torch.Tensor) -> bool:
        rules = self._rules
        return (
            0 <= self._layer < rules.num_layers - RESIDENT_LAYERS
            and tensor.device == rules.device
            and tensor.layout == torch.strided
            and type(tensor) in (torch.Tensor, torch.nn.Parameter)
            and tensor.untyped_storage().nbytes() >= rules.copies.least_bytes
            and tensor.untyped_storage() not in self._kept
        )

    def _choose(self, storage: torch.UntypedStorage) -> OffloadedStorage | None:
        """Sends a storage to the host if its share is not there yet; None if it stays."""
        if storage in self._staying:
            return None
        self.seen_bytes += storage.nbytes()
        self.largest_bytes = max(self.largest_bytes, storage.nbytes())
        if self.offloaded_bytes >= self.ratio * self.seen_bytes:
            self._staying.add(storage)
            return None
        self.offloaded_bytes += storage.nbytes()
        offloaded = OffloadedStorage(storage, self._rules)
        self._leaving[storage] = offloaded
        self._chosen[self._layer].append(storage)
        self._by_layer[self._layer].append(weakref.ref(offloaded))
        return offloaded

    def _let_go(self, layer: int) -> None:
        for storage in self._chosen.pop(layer, ()):
            self._leaving.pop(storage).let_go()

    def _fetch(self, layer: int) -> None:
        for reference in self._by_layer.pop(layer, ()):
            storage = reference()
            if storage is not None:
                storage.fetch()


def _bytes_of(storage: torch.UntypedStorage, device: torch.device) -> torch.Tensor:
    """The storage as a tensor ``uint8 [n]``."""
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
