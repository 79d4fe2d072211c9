"""How many layers each virtual stage holds, as Megatron's flags for uneven stages say."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_hdp.options import OptionError
from megatron_hdp.planner.stages.layout import parts_of

_FIRST, _LAST = "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"
_EMBEDDING, _LOSS = (
    "--account-for-embedding-in-pipeline-split",
    "--account-for-loss-in-pipeline-split",
)
_LAYOUT = "--pipeline-model-parallel-layout"


@dataclass(frozen=True)
class StageSplit:
    """Layers of a model on the stages of a pipeline, and on the model chunks of each."""

    layers: tuple[int, ...]
    """Of every virtual stage in the model's order: entry ``c P + s`` is chunk `c` of stage `s`."""
    num_stages: int = 1
    """Pipeline stages, `P`."""

    @classmethod
    def of(
        cls,
        num_layers: int,
        num_stages: int,
        num_chunks: int = 1,
        *,
        first: int | None = None,
        last: int | None = None,
        embedding: bool = False,
        loss: bool = False,
        layout: str | None = None,
    ) -> StageSplit:
        """The split that Megatron's flags describe.

        Args:
            num_layers: of the model.
            num_stages: pipeline stages.
            num_chunks: virtual stages on a rank; of a layout they follow from its parts.
            first: ``--decoder-first-pipeline-num-layers``, layers of the first stage.
            last: ``--decoder-last-pipeline-num-layers``.
            embedding: ``--account-for-embedding-in-pipeline-split``: it counts as a layer.
            loss: ``--account-for-loss-in-pipeline-split``, likewise.
            layout: ``--pipeline-model-parallel-layout``.

        Raises:
            OptionError: the layers cannot be cut so, or the flags do not go together.
        """
        _refuse_mixed(first, last, embedding, loss, layout)
        if layout is not None:
            return cls(_of_layout(layout, num_layers, num_stages), num_stages)
        ends = {_FIRST: first, _LAST: last}
        given = {flag: number for flag, number in ends.items() if number is not None}
        if given:
            return cls(_of_ends(num_layers, num_stages, num_chunks, given), num_stages)
        return cls(_counted(num_layers, num_stages, num_chunks, embedding, loss), num_stages)

    @property
    def is_even(self) -> bool:
        """Whether all virtual stages hold equally many layers."""
        return len(set(self.layers)) == 1

    @property
    def fewest(self) -> int:
        """Layers of the pipeline stage that has the fewest, all chunks together."""
        return min(self.of_stages)

    @property
    def most(self) -> int:
        """Layers of the pipeline stage that has the most."""
        return max(self.of_stages)

    @property
    def of_stages(self) -> tuple[int, ...]:
        """Layers of each pipeline stage, all chunks together."""
        return tuple(sum(self.of_chunks(stage)) for stage in range(self.num_stages))

    def of_chunks(self, stage: int) -> tuple[int, ...]:
        """Layers of each model chunk of a stage."""
        return self.layers[stage :: self.num_stages]


def _refuse_mixed(
    first: int | None, last: int | None, embedding: bool, loss: bool, layout: str | None
) -> None:
    """Each of three ways to cut a model excludes the others, in Megatron as here."""
    ends = {_FIRST: first is not None, _LAST: last is not None}
    counted = {_EMBEDDING: embedding, _LOSS: loss}
    ways = ({_LAYOUT: layout is not None}, ends, counted)
    given = [[flag for flag, is_given in way.items() if is_given] for way in ways]
    given = [flags for flags in given if flags]
    if len(given) > 1:
        raise OptionError(
            f"found {' and '.join(flags[0] for flags in given)}, expected one way to cut the "
            f"model: {_LAYOUT}, or layers of the first and last stage, or embedding and loss that "
            "count as layers"
        )


def _of_layout(layout: str, num_layers: int, num_stages: int) -> tuple[int, ...]:
    layers = parts_of(layout)
    if len(layers) % num_stages:
        raise OptionError(
            f"{_LAYOUT} {layout}: found {len(layers)} parts, expected a multiple of "
            f"--pipeline-model-parallel-size {num_stages}: add or remove a |"
        )
    if sum(layers) != num_layers:
        raise OptionError(
            f"{_LAYOUT} {layout}: found {sum(layers)} layers (t), expected --num-layers "
            f"{num_layers}: change one of them"
        )
    return layers


def _of_ends(
    num_layers: int, num_stages: int, num_chunks: int, given: dict[str, int]
) -> tuple[int, ...]:
    """A split by the layers of the first and of the last stage, by the flag that gives them."""
    middle = _middle_layers(num_layers, num_stages, given)
    first, last = given.get(_FIRST, middle), given.get(_LAST, middle)
    of_stages = [num_layers]
    if num_stages > 1:
        of_stages = [first, *[middle] * (num_stages - 2), last]
    if not middle and num_chunks > 1:
        raise OptionError(
            f"found {_FIRST} {first} and {_LAST} {last} with {num_chunks} virtual stages "
            f"on a rank and no stage between, which Megatron cannot number: leave {_LAST} out, "
            f"or cut the model by {_LAYOUT}"
        )
    for name, layers in {**given, "each other stage": middle}.items():
        if layers % num_chunks:
            raise OptionError(
                f"found {layers} layers of {name}, expected a multiple of {num_chunks}, the "
                "virtual stages on a rank: change one of the numbers"
            )
    return tuple(layers // num_chunks for layers in of_stages) * num_chunks


def _middle_layers(num_layers: int, num_stages: int, given: dict[str, int]) -> int:
    """Of each stage whose layers no flag gives; 0 if there is none."""
    stages, layers = num_stages - len(given), num_layers - sum(given.values())
    said = " and ".join(f"{flag} {number}" for flag, number in given.items())
    if stages < 0 or layers < 0 or bool(layers) != bool(stages):
        raise OptionError(
            f"{said} leave {layers} of --num-layers {num_layers} to {stages} of "
            f"--pipeline-model-parallel-size {num_stages} stages, expected none to none "
            "or at least one each: change one of the numbers"
        )
    if stages and layers % stages:
        raise OptionError(
            f"{said} leave {layers} of --num-layers {num_layers} to the other {stages} "
            f"stages, expected a multiple of {stages}: change one of the numbers"
        )
    return layers // stages if stages else 0


def _counted(
    num_layers: int, num_stages: int, num_chunks: int, embedding: bool, loss: bool
) -> tuple[int, ...]:
    """Equal parts, of which embedding and loss take a layer's place where they count as one."""
    counted = num_layers + embedding + loss
    found = f"--num-layers {num_layers}"
    if counted > num_layers:
        names = [name for name, counts in (("embedding", embedding), ("loss", loss)) if counts]
        found += f" + {len(names)} ({' and '.join(names)}) = {counted}"
    if counted % num_stages:
        raise OptionError(
            f"{found} is not a multiple of --pipeline-model-parallel-size {num_stages}: change one "
            f"of them, or cut the model unevenly by {_FIRST} and {_LAST}, {_EMBEDDING} and {_LOSS},"
            f" or {_LAYOUT}"
        )
    of_stage = counted // num_stages
    if of_stage % num_chunks:
        raise OptionError(
            f"{num_chunks} virtual stages on a rank do not divide the {of_stage} layers of a "
            f"pipeline stage ({found} / --pipeline-model-parallel-size {num_stages}): change one "
            f"of the numbers, or cut the model by {_LAYOUT}"
        )
    layers = [of_stage // num_chunks] * (num_stages * num_chunks)
    layers[0] -= embedding
    layers[-1] -= loss
    if min(layers) < 0:
        raise OptionError(
            f"{found} over {len(layers)} stages: found fewer than the embedding and the loss to "
            "take the place of, expected at least one each: use fewer stages"
        )
    return tuple(layers)


def waiting_passes(stage: int, num_stages: int, num_chunks: int = 1) -> int:
    """Passes through a model chunk of a stage whose backward is to come, at most."""
    behind = num_stages - 1 - stage
    if num_chunks == 1:
        return behind + 1
    return 2 * behind + (num_chunks - 1) * num_stages + 1
