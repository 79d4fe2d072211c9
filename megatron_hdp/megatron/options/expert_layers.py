"""Which layers hold experts, as ``--moe-layer-freq`` says it; the others hold one plain MLP."""

from __future__ import annotations

from megatron_hdp.megatron.options.arguments import TrainingArguments, stage_split
from megatron_hdp.megatron.options.patterns import pattern_of, zeros_and_ones
from megatron_hdp.options import OptionError

_FLAG = "--moe-layer-freq"


def expert_layers(args: TrainingArguments) -> tuple[bool, ...]:
    """Of each layer in the model's order, whether it holds experts.

    Raises:
        OptionError: ``--moe-layer-freq`` does not describe the model's layers.
    """
    number = args.num_layers or 1
    if args.num_experts is None:
        return (False,) * number
    found = layer_frequency(args.moe_layer_freq)
    if isinstance(found, int):
        return tuple(layer % found == 0 for layer in range(number))
    return tuple(one == 1 for one in zeros_and_ones(_FLAG, tuple(found), number))


def expert_layers_of_chunk(args: TrainingArguments, stage: int, chunk: int) -> tuple[bool, ...]:
    """The same of the layers of one model chunk of a pipeline stage."""
    split = stage_split(args)
    place = chunk * split.num_stages + stage
    first = sum(split.layers[:place])
    return expert_layers(args)[first : first + split.layers[place]]


def layer_frequency(text: str) -> int | list[int]:
    """What Megatron's ``moe_layer_freq`` is for the flag's text.

    Raises:
        OptionError: it is neither a number of at least 1 nor a list.
    """
    found = pattern_of(_FLAG, text)
    if not isinstance(found, int):
        return list(found)
    if found < 1:
        raise OptionError(f"{_FLAG}: found {found}, expected at least 1, or a list of 0 and 1")
    return found
