"""The parameters of a model by name: who holds each, how many multiply a token, which are trained.

Names are those of Megatron's own layers. A matrix that multiplies a token costs 2 FLOP a parameter
forward and 4 backward, half of them for its own gradient, which a frozen one has not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

SPLIT, WHOLE, EXPERTS = "split", "whole", "experts"
"""Who holds a tensor: see `Weights`."""

EACH_EXPERT = ".local_experts.*."
"""In the name of a tensor that each expert has one of."""

_SHARED_BY_COLUMNS = ("linear_proj.weight", "linear_fc2.weight")


@dataclass(frozen=True)
class Weights:
    """Parameters, by how the ranks that train a model hold them."""

    split: float = 0
    """Tensor-parallel ranks share them."""
    whole: float = 0
    """Every tensor-parallel rank has them all."""
    experts: float = 0
    """Expert-parallel ranks, and expert tensor ranks, share them."""

    def __add__(self, other: Weights) -> Weights:
        return Weights(
            self.split + other.split, self.whole + other.whole, self.experts + other.experts
        )

    @property
    def total(self) -> float:
        """All of them, each once."""
        return self.split + self.whole + self.experts


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """A parameter, or the same one of all experts."""

    name: str
    """As Megatron's own layers have it."""
    rows: int
    columns: int = 1
    """1 of a vector."""
    held: str = SPLIT
    copies: int = 1
    """Experts, each of which has one."""
    met: int = 1
    """Of these, how many multiply a token; 0 of what is no matrix."""
    always: bool = False
    """Its gradient is made whether it is trained or not, as Megatron's router does."""

    @property
    def size(self) -> int:
        """Parameters of all copies."""
        return self.rows * self.columns * self.copies

    @property
    def products(self) -> int:
        """Parameters that multiply a token."""
        return self.rows * self.columns * self.met

    def is_of(self, targets: Iterable[str]) -> bool:
        """Whether it is the weight of a linear layer of one of these names."""
        return self.name.endswith(tuple(f"{one}.weight" for one in targets))


@dataclass(frozen=True)
class Adapters:
    """Low-rank adapters of linear layers."""

    rank: int
    targets: tuple[str, ...]
    """Names of the layers, without what they are inside of."""

    def of(self, linear: Tensor) -> tuple[Tensor, ...]:
        """A and B of a layer's weight: none of another layer.

        Tensor-parallel ranks share one of both as they share the weight.
        """
        if not linear.is_of(self.targets):
            return ()
        stem = linear.name.removesuffix("weight")
        of_a, of_b = WHOLE, SPLIT
        if linear.held == EXPERTS:
            of_a = of_b = EXPERTS
        elif linear.is_of(one.removesuffix(".weight") for one in _SHARED_BY_COLUMNS):
            of_a, of_b = SPLIT, WHOLE
        copies, met = linear.copies, linear.met
        return (
            Tensor(
                name=f"{stem}lora_a",
                rows=self.rank,
                columns=linear.columns,
                held=of_a,
                copies=copies,
                met=met,
            ),
            Tensor(
                name=f"{stem}lora_b",
                rows=linear.rows,
                columns=self.rank,
                held=of_b,
                copies=copies,
                met=met,
            ),
        )


def matrix(name: str, rows: int, columns: int) -> Iterator[Tensor]:
    """The weight of a linear layer; nothing if the layer is not there."""
    if rows and columns:
        yield Tensor(name=f"{name}.weight", rows=rows, columns=columns)


def vector(name: str, size: int, *, held: str = WHOLE, exists: bool = True) -> Iterator[Tensor]:
    """A parameter that is no matrix; nothing if it is not there."""
    if size and exists:
        yield Tensor(name=name, rows=size, held=held, met=0)


def norm(name: str, size: int, *, bias: bool, exists: bool = True) -> Iterator[Tensor]:
    """A norm's gain, and its bias."""
    yield from vector(f"{name}.weight", size, exists=exists)
    yield from vector(f"{name}.bias", size, exists=exists and bias)


def stored(tensors: Iterable[Tensor]) -> Weights:
    """All parameters of these."""
    sizes = {SPLIT: 0, WHOLE: 0, EXPERTS: 0}
    for one in tensors:
        sizes[one.held] += one.size
    return Weights(**sizes)


def products(tensors: Iterable[Tensor]) -> int:
    """Parameters of these that multiply a token."""
    return sum(one.products for one in tensors)


def matched(tensor: Tensor, prefixes: Sequence[str], patterns: Sequence[str]) -> float:
    """The share of a tensor's copies whose name, behind any of the prefixes, matches a pattern."""
    if not patterns:
        return 0.0
    experts = range(tensor.copies) if EACH_EXPERT in tensor.name else range(1)
    found = 0
    for number in experts:
        name = tensor.name.replace(EACH_EXPERT, f".local_experts.{number}.")
        names = [prefix + name for prefix in prefixes]
        found += any(fnmatchcase(one, pattern) for one in names for pattern in patterns)
    return found / len(experts)
