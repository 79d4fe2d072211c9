"""Selective activation offload: each micro-batch keeps its own share of activations on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from megatron_hdp.runtime.offload.copies import select_copy_engine
from megatron_hdp.runtime.offload.host_pool import HostPool
from megatron_hdp.runtime.offload.need import HostNeed
from megatron_hdp.runtime.offload.stash import MicroBatchStash, StashRules
from megatron_hdp.runtime.timeline import Timeline


class ActivationOffload:
    """Sends what autograd saves in a stack of layers to the host (ByteScale, section 5.2).

    Around a micro-batch's forward, `micro_batch` puts hooks on the tensors that autograd saves.
    All but the last two layers take part. Backward needs nothing: tensors come back by themselves,
    a layer ahead. A micro-batch may run through the layers in parts (virtual stages), each of which
    sends its share. Several micro-batches may be between forward and backward (pipelines), and what
    recomputation saves inside of backward is none of its business; of a checkpointed part its
    input is what goes to the host.

    Results are the same bits as without it: a tensor comes back as it was.

    Args:
        layers: the layers in the order in which they run.
        device: where they run.
        parameters: gives the tensors that stay: views of them are saved, too.
        pool: host memory; by default its own, pinned for a GPU.
        timeline: where copies are noted.
        num_parts: forwards of one micro-batch, each through its part of the layers.

    Attributes:
        pool: the host memory.
        copies: what goes there and back.
        need: what is known of the host memory that micro-batches want.
        offloaded_bytes: what went to the host; whoever reads it may set it to 0.
    """

    def __init__(
        self,
        layers: Sequence[torch.nn.Module],
        device: torch.device,
        parameters: Callable[[], Iterator[torch.Tensor]],
        pool: HostPool | None = None,
        timeline: Timeline | None = None,
        num_parts: int = 1,
    ) -> None:
        device = torch.empty(0, device=device).device  # "cuda" with its index, as tensors have it
        self.pool = pool or HostPool(pin=device.type == "cuda")
        self.need = HostNeed(len(layers), num_parts)
        self.copies = select_copy_engine(device, timeline or Timeline())
        self.offloaded_bytes = 0
        self._layers = layers
        self._parameters = parameters
        self._rules = StashRules(
            num_layers=len(layers),
            device=device,
            pool=self.pool,
            copies=self.copies,
        )

    def reserve(
        self,
        loads: Sequence[tuple[int, float]],
        most_alive: int = 1,
        streams: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Gets the host memory of a step before its first forward, where asking for it is harmless.

        The arguments are those of `HostNeed.of`.
        """
        self.pool.reserve(*self.need.of(loads, most_alive, streams))

    @contextmanager
    def micro_batch(self, ratio: float, num_tokens: int = 0) -> Iterator[MicroBatchStash | None]:
        """The forward of a micro-batch, share `ratio` of whose activations goes to the host.

        Or the forward of one of its parts. With ratio 0 it does nothing at all and gives None.

        Args:
            ratio: see above.
            num_tokens: of the micro-batch here; what it saves is remembered, where they are known.

        Raises:
            ValueError: the ratio is not in [0, 1].
        """
        if ratio == 0:
            yield None
            return
        kept = frozenset(one.untyped_storage() for one in self._parameters())
        stash = MicroBatchStash(ratio, self._rules, kept)
        with ExitStack() as hooks:
            for number, layer in enumerate(self._layers):
                handle = layer.register_forward_pre_hook(_entering(stash, number), with_kwargs=True)
                hooks.callback(handle.remove)
            hooks.enter_context(torch.autograd.graph.saved_tensors_hooks(stash.pack, stash.unpack))
            yield stash
        stash.end_forward()
        self.offloaded_bytes += stash.offloaded_bytes
        self.need.learn(stash, num_tokens)


def _entering(stash: MicroBatchStash, number: int) -> Callable[..., None]:
    def hook(layer: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        shared = (value for key, value in kwargs.items() if key != "hidden_states")
        stash.enter_layer(number, tuple(x for x in shared if isinstance(x, torch.Tensor)))

    return hook
