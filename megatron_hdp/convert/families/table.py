"""A family of models as a table: which tensors of Hugging Face make which one of Megatron's.

    Row("self_attention.linear_qkv.weight",
        {"self_attn.q_proj.weight": "query hidden", ...: "key hidden", ...}, BY_GROUP)

Names of a layer are relative to it; ``{e}`` stands for an expert, ``[e]`` for its entry in a tensor
that holds those of all experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_hdp.convert.families.layouts import BELOW, Layout, Sizes, shape_of

Config = Mapping[str, Any]
_ENTRY = "[e]"


@dataclass(frozen=True)
class Row:
    """One of Megatron's tensors."""

    megatron: str
    hugging_face: Mapping[str, str]
    """Names and shapes, each a line of words of `Sizes`, without the experts' dimension."""
    layout: Layout = BELOW
    when: Callable[[Config], bool] = lambda config: True
    """Which models have it."""
    also: tuple[str, ...] = ()
    """Other keys under which Megatron looks for it, by specification."""

    def only_if(self, when: Callable[[Config], bool]) -> Row:
        """The same row of fewer models."""
        return replace(self, when=when)

    @property
    def of_experts(self) -> bool:
        """Whether there is one for each expert."""
        return any("{e}" in name or name.endswith(_ENTRY) for name in self.hugging_face)


@dataclass(frozen=True)
class Layers:
    """Rows of some of the layers."""

    rows: Sequence[Row]
    holds: Callable[[Config, int], bool] = lambda config, layer: True
    """Which layers have them."""


@dataclass(frozen=True)
class Family:
    """Models of one architecture."""

    name: str
    architectures: tuple[str, ...]
    sizes: Callable[[Config], dict[str, int]]
    flags: Callable[[Config], dict[str, Any]]
    """The flags of a configuration, by their names in Megatron."""
    outer: Sequence[Row]
    """Embedding, last norm, output layer."""
    layers: Sequence[Layers]
    expected: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Keys of a configuration, as far as it has them, and the values that the table is for."""
    derived: tuple[str, ...] = ()
    """Patterns of tensors that follow from others."""
    left_out: Callable[[Config], tuple[str, ...]] = lambda config: ()
    """Patterns of tensors that are not converted, and that the model works without."""


@dataclass(frozen=True)
class Entry:
    """A tensor of Hugging Face, or one entry of its first dimension."""

    name: str
    shape: tuple[int, ...]
    """Of the tensor as it is stored."""
    part: int | None = None

    @property
    def part_shape(self) -> tuple[int, ...]:
        """What is read or written at once."""
        return self.shape if self.part is None else self.shape[1:]


@dataclass(frozen=True)
class Piece:
    """What is converted at once: entries on one side, a region of a tensor on the other."""

    entries: tuple[Entry, ...]
    layout: Layout
    key: str
    """Of Megatron's tensor."""
    also: tuple[str, ...]
    shape: tuple[int, ...]
    """Of Megatron's whole tensor."""
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    layer: int | None
    """Whose it is, where Megatron's tensor is a layer's and not that of all of them."""
    is_vocabulary: bool = False
    """Whether training may have added rows below it."""

    @property
    def region(self) -> tuple[int, ...]:
        """The shape of the region without the dimensions of layers and experts."""
        return self.lengths[-len(self.entries[0].part_shape) :]


def pieces(family: Family, config: Config, *, stacked: bool) -> list[Piece]:
    """All pieces of a model, in the order of its layers.

    Args:
        family: of the model.
        config: of the model, as Hugging Face writes it.
        stacked: whether Megatron keeps all layers in one tensor, or each in its own.
    """
    sizes = family.sizes(config)
    first = [row for row in family.outer if not row.megatron.startswith(_AT_THE_END)]
    last = [row for row in family.outer if row.megatron.startswith(_AT_THE_END)]
    found = [piece for row in first for piece in _of_row(row, config, sizes, None, stacked)]
    for layer in range(sizes["layers"]):
        for group in family.layers:
            if group.holds(config, layer):
                for row in group.rows:
                    found += _of_row(row, config, sizes, layer, stacked)
    return found + [piece for row in last for piece in _of_row(row, config, sizes, None, stacked)]


_AT_THE_END = ("decoder.final_layernorm", "output_layer")


def _of_row(
    row: Row, config: Config, sizes: Sizes, layer: int | None, stacked: bool
) -> Iterator[Piece]:
    if not row.when(config):
        return
    shapes = [shape_of(text, sizes) for text in row.hugging_face.values()]
    parts = row.layout.parts(shapes, sizes)
    rows = max(part.first + part.shape[0] for part in parts)
    whole, prefix = (rows, *parts[0].shape[1:]), ""
    fronts: list[tuple[int, int]] = []  # index and size of each leading dimension
    if layer is not None:
        prefix = "decoder.layers." if stacked else f"decoder.layers.{layer}."
        fronts = [(layer, sizes["layers"])] if stacked else []
    for expert in range(sizes["experts"]) if row.of_experts else (None,):
        at = fronts if expert is None else [*fronts, (expert, sizes["experts"])]
        entries = _entries(row, shapes, sizes, layer, expert)
        for part in parts:
            yield Piece(
                entries=tuple(entries[i] for i in part.sources),
                layout=row.layout,
                key=prefix + row.megatron,
                also=tuple(prefix + other for other in row.also),
                shape=(*(size for _, size in at), *whole),
                offsets=(*(index for index, _ in at), part.first, *[0] * (len(whole) - 1)),
                lengths=(*[1] * len(at), *part.shape),
                layer=None if stacked else layer,
                is_vocabulary=_is_vocabulary(row),
            )


def _is_vocabulary(row: Row) -> bool:
    return all(text.startswith("vocabulary") for text in row.hugging_face.values())


def _entries(
    row: Row,
    shapes: Sequence[tuple[int, ...]],
    sizes: Sizes,
    layer: int | None,
    expert: int | None,
) -> list[Entry]:
    found = []
    for pattern, shape in zip(row.hugging_face, shapes, strict=True):
        name = pattern if layer is None else f"model.layers.{layer}.{pattern}"
        if name.endswith(_ENTRY):
            name = name.removesuffix(_ENTRY)
            found.append(Entry(name, (sizes["experts"], *shape), expert))
        else:
            found.append(Entry(name.replace("{e}", str(expert)), shape))
    return found
