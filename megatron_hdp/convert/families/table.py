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

from megatron_hdp.convert.families.layouts import Layout, Sizes, shape_of

Config = Mapping[str, Any]
_ENTRY = "[e]"


@dataclass(frozen=True)
class Row:
    """One of Megatron's tensors."""

    megatron: str
    hugging_face: Mapping[str, str]
    """Names and shapes, each a line of words of `Sizes`, without the experts' dimension."""
    layout: Layout = Layout()
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
    is_vocabulary: bool = False
    """Whether training may have added rows below it."""

    @property
    def region(self) -> tuple[int, ...]:
        """The shape of the region without the dimensions of layers and experts."""
        return self.lengths[-len(self.entries[0].part_shape) :]


def pieces(family: Family, config: Config, *, stacked: bool) -> list[Piece]:
    """All pieces of a model, in the order of its layers.

    Megatron keeps all layers in one tensor (``stacked``), or each in its own.
    """
    sizes = family.sizes(config)
    rows: list[tuple[Row, int | None]] = [(_EMBEDDING, None)]
    for layer in range(sizes["layers"]):
        groups = [group.rows for group in family.layers if group.holds(config, layer)]
        rows += [(row, layer) for group in groups for row in group]
    rows += [(_LAST_NORM, None), (_OUTPUT_LAYER, None)]
    return [piece for row, layer in rows for piece in _of_row(row, config, sizes, layer, stacked)]


def by_file(
    plan: Sequence[Piece], num_bytes: Callable[[Piece], int], most: int, *, whole: bool = False
) -> list[list[Piece]]:
    """The pieces of each file, of at most so many bytes unless one piece has more.

    With ``whole`` no tensor of Hugging Face lies in two files, however large it is.
    """
    found: list[list[Piece]] = [[]]
    held = 0
    for piece in plan:
        size = num_bytes(piece)
        last = {entry.name for one in found[-1][-1:] for entry in one.entries}
        is_cut = whole and any(entry.name in last for entry in piece.entries)
        if found[-1] and held + size > most and not is_cut:
            found.append([])
            held = 0
        found[-1].append(piece)
        held += size
    return found


def is_tied(config: Config) -> bool:
    """Whether the output layer has the embedding's weights."""
    return bool(config.get("tie_word_embeddings", False))


_EMBEDDING = Row(
    "embedding.word_embeddings.weight", {"model.embed_tokens.weight": "vocabulary hidden"}
)
_LAST_NORM = Row("decoder.final_layernorm.weight", {"model.norm.weight": "hidden"})
_OUTPUT_LAYER = Row(
    "output_layer.weight",
    {"lm_head.weight": "vocabulary hidden"},
    when=lambda config: not is_tied(config),
)


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
                is_vocabulary=row in (_EMBEDDING, _OUTPUT_LAYER),
            )


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
