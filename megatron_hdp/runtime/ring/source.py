"""What a ring's keys and values are made of: themselves, or what travels in their place."""

from __future__ import annotations

from typing import Protocol, TypeAlias

import torch

Keys: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""Keys and values, or what they are made of, ``[t, ...]`` each."""


class Maker(Protocol):
    """Makes keys and values of two tensors, and takes their gradients back."""

    def keys_and_values(
        self, first: torch.Tensor, second: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``[t, kv_heads, ...]`` each."""
        ...

    def gradients(
        self, dk: torch.Tensor, dv: torch.Tensor, first: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Of what `keys_and_values` took; `first` is the first of that."""
        ...


class Source(Maker, Protocol):
    """What a rank's own keys and values are made of, and how they travel."""

    is_plain: bool
    """Whether nothing must be made."""
    num_made: int
    """Heads whose keys and values are made by their owner and travel beside the rest."""

    @property
    def passing(self) -> Maker:
        """How they are made of what `sent` gives."""
        ...

    def sent(self, keys: Keys, made: Keys) -> Keys:
        """What travels of these; `made` is what `keys_and_values` made of them."""
        ...

    def returned(self, found: Keys) -> tuple[Keys, tuple[torch.Tensor, ...]]:
        """Gradients of what `sent` gave, apart: of `keys`, and of what of `made` it held."""
        ...

    def value_dim(self, keys: Keys) -> int:
        """Size of a value's head."""
        ...


class PlainKeys:
    """Keys and values themselves."""

    is_plain = True
    num_made = 0

    @property
    def passing(self) -> Maker:
        """See `Source`."""
        return self

    def sent(self, keys: Keys, made: Keys) -> Keys:
        """See `Source`."""
        return keys

    def returned(self, found: Keys) -> tuple[Keys, tuple[torch.Tensor, ...]]:
        """See `Source`."""
        return found, ()

    def value_dim(self, keys: Keys) -> int:
        """See `Source`."""
        return int(keys[1].shape[-1])

    def keys_and_values(
        self, first: torch.Tensor, second: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Source`."""
        return first, second

    def gradients(
        self, dk: torch.Tensor, dv: torch.Tensor, first: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Source`."""
        return dk, dv
