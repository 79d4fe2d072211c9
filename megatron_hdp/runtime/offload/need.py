"""How much host memory the micro-batches of a step will want at their fullest moment.

From what a layer saves of a token, counted on an example before the first step, and more where a
micro-batch was seen to save more.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_hdp.runtime.offload.saved_bytes import SavedBytes
from megatron_hdp.runtime.offload.stash import RESIDENT_LAYERS, MicroBatchStash

_MARGIN = 1 / 8  # for gaps between pieces of many sizes


class HostNeed:
    """What is known of a stack of layers.

    Args:
        num_layers: of the stack; all but the last two may leave.
        num_parts: in which a micro-batch runs through the stack, each a forward of its own.
    """

    def __init__(self, num_layers: int, num_parts: int = 1) -> None:
        self._num_parts = num_parts
        self._num_leaving = max(0, num_layers - RESIDENT_LAYERS)
        self._layer_bytes = 0.0  # of one token
        self._storage_bytes = 0.0  # the largest storage's, of one token

    def expect(self, saved: SavedBytes, num_tokens: int) -> None:
        """Takes what an example of so many tokens saved."""
        self._raise_to(max(saved.layers, default=0) / num_tokens, saved.largest / num_tokens)

    def learn(self, stash: MicroBatchStash, num_tokens: int) -> None:
        """Takes what a micro-batch saved, or saved in one part, of which few layers may stay."""
        if num_tokens and self._num_leaving:
            layer_bytes = stash.seen_bytes / max(1, stash.seen_layers)
            self._raise_to(layer_bytes / num_tokens, stash.largest_bytes / num_tokens)

    def _raise_to(self, layer_bytes: float, storage_bytes: float) -> None:
        self._layer_bytes = max(self._layer_bytes, layer_bytes)
        self._storage_bytes = max(self._storage_bytes, storage_bytes)

    def of(
        self,
        loads: Sequence[tuple[int, float]],
        most_alive: int,
        streams: Sequence[tuple[int, int]] = (),
    ) -> tuple[int, int]:
        """Bytes at the fullest moment, a margin included, and the largest piece's.

        Args:
            loads: tokens and offload ratio of each micro-batch, in order.
            most_alive: micro-batches that may be between forward and backward at a time; they
                follow each other.
            streams: of each micro-batch the bytes, and those of the largest piece, that it keeps on
                the host as a stream; empty: none is one.
        """
        of_streams = streams or [(0, 0)] * len(loads)
        wanted = [
            self._of_one(tokens, ratio) + kept
            for (tokens, ratio), (kept, _) in zip(loads, of_streams, strict=True)
        ]
        moments = range(max(1, len(wanted) - most_alive + 1))
        fullest = max(sum(wanted[one : one + most_alive]) for one in moments)
        most_tokens = max((tokens for tokens, ratio in loads if ratio), default=0)
        largest = max((piece for _, piece in of_streams), default=0)
        return int(fullest * (1 + _MARGIN)), max(int(self._storage_bytes * most_tokens), largest)

    def _of_one(self, tokens: int, ratio: float) -> float:
        """At most one storage more than the ratio's share leaves, of each part."""
        if not ratio or not self._num_leaving:
            return 0.0
        more = self._num_parts * self._storage_bytes
        return tokens * (ratio * self._num_leaving * self._layer_bytes + more)
