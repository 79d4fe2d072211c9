"""Where the tokens of one rank's part of a micro-batch lie, and which of them meet in the ring."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

import torch

from megatron_hdp.runtime.host_to_device import to_device
from megatron_hdp.runtime.kernels import Segments

# Rows of a packed tensor: a slice where they are contiguous (a view), else an index tensor.
Rows: TypeAlias = slice | torch.Tensor


@dataclass(frozen=True, eq=False)
class TokenLayout:
    """The packed tokens ``[t]`` of one rank: ring slices first, then whole local sequences.

    A ring slice is the head chunk ``j`` followed by the tail chunk ``2D-1-j`` of a sequence cut
    into ``2D`` equal chunks: halves of the same length, and the whole slice is causal in itself.
    """

    ring: tuple[int, ...]
    """HDP ranks of the ring, in ring order; a single rank means there is none."""
    index: int
    """This rank's place in the ring."""
    ring_slices: tuple[int, ...]
    """Tokens of each ring sequence's slice on this rank, padding included; even numbers."""
    local_lengths: tuple[int, ...]
    """Tokens of each whole sequence on this rank, padding included."""
    device: torch.device = torch.device("cpu")

    segments: tuple[int, ...] = field(init=False)
    """Lengths of all causal segments: ring slices, then local sequences."""
    half_slices: tuple[int, ...] = field(init=False)
    """Tokens of each ring slice's head chunk (and tail chunk)."""
    ring_tokens: int = field(init=False)
    """Tokens at the front that belong to ring slices."""
    halos: dict[int, object] = field(init=False, default_factory=dict)
    """What attention with a window has worked out for this layout, by window."""

    def __post_init__(self) -> None:
        if any(tokens % 2 for tokens in self.ring_slices):
            raise ValueError(
                f"ring slices hold {self.ring_slices} tokens; each must be even (two chunks)"
            )
        if self.ring_slices and len(self.ring) < 2:
            raise ValueError(f"ring slices {self.ring_slices} on a ring of {len(self.ring)} rank")
        halves = tuple(tokens // 2 for tokens in self.ring_slices)
        derived = {
            "segments": self.ring_slices + self.local_lengths,
            "half_slices": halves,
            "ring_tokens": sum(self.ring_slices),
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    @property
    def heads(self) -> Rows:
        """Rows of the head chunks among the ring tokens."""
        return self._half_rows[0]

    @property
    def tails(self) -> Rows:
        """Rows of the tail chunks among the ring tokens."""
        return self._half_rows[1]

    @cached_property
    def _half_rows(self) -> tuple[Rows, Rows]:
        """Heads and tails, made on the host and sent in one copy where a ring asks for them."""
        if len(self.half_slices) <= 1:
            half = sum(self.half_slices)
            return slice(0, half), slice(half, 2 * half)
        chunks = torch.arange(self.ring_tokens).split(
            [half for half in self.half_slices for _ in range(2)]
        )
        rows = to_device(torch.cat(chunks[::2] + chunks[1::2]), self.device)
        heads, tails = rows.chunk(2)
        return heads, tails

    @cached_property
    def causal_segments(self) -> Segments:
        """All segments: ring slices, then local sequences; each is causal in itself."""
        return Segments.of(self.segments, self.device)

    @cached_property
    def slice_segments(self) -> Segments:
        """The ring slices."""
        return Segments.of(self.ring_slices, self.device)

    @cached_property
    def half_segments(self) -> Segments:
        """The head chunks of the ring slices, or their tail chunks."""
        return Segments.of(self.half_slices, self.device)

    @cached_property
    def local_segments(self) -> Segments:
        """The whole local sequences."""
        return Segments.of(self.local_lengths, self.device)

    @cached_property
    def whole_segments(self) -> Segments:
        """The ring's sequences as they are over all its members."""
        return Segments.of(tuple(n * self.degree for n in self.ring_slices), self.device)

    @property
    def ring_lengths(self) -> tuple[int, ...]:
        """Tokens of each of the ring's sequences, over all its members and parts."""
        return self.lengths_around

    @property
    def lengths_around(self) -> tuple[int, ...]:
        """Tokens of each that the members hold here; in parts, of this one."""
        return tuple(tokens * self.degree for tokens in self.ring_slices)

    @property
    def earlier_in_ring(self) -> int:
        """Tokens of the first of them that earlier parts hold, over all members."""
        return 0

    @property
    def longest_in_ring(self) -> int:
        """Tokens of the longest of them; 0 where there is no ring."""
        return max(self.ring_lengths, default=0)

    @property
    def longest(self) -> int:
        """Tokens of the longest whole sequence on this rank alone; 0 where there is none."""
        return max(self.local_lengths, default=0)

    @property
    def degree(self) -> int:
        """Ranks that share the ring slices; 1 where there are none."""
        return len(self.ring) if self.ring_slices else 1

    @property
    def num_tokens(self) -> int:
        """Packed tokens on this rank, padding included."""
        return sum(self.segments)
