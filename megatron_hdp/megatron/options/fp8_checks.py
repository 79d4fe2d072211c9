"""Checks FP8 with HDP, in Megatron's arguments or a built model's configuration: `OptionError`.

What TransformerEngine scales by the micro-batch at hand alone goes with HDP; what it reduces over
ranks would wait for ranks that run fewer micro-batches.
"""

from typing import Any

from megatron_hdp.options import HdpOptions, OptionError

_RECIPES = {
    "tensorwise": None,
    "blockwise": None,
    "delayed": "its scales are reduced over all ranks in every micro-batch, of which ranks run "
    "different numbers",
    "mxfp8": "it needs a GPU of the Blackwell generation, for which HDP has not read it",
}
_OF_PRODUCTS = 16
"""Tokens of an FP8 product come in multiples of this: rows of its transpose are so aligned."""
_OF_BLOCKS = 128
"""Tensor ranks gather whole blocks in FP8; other tokens TransformerEngine 2.8 to 2.13 refuses and
the rest gathers in BF16."""


def token_multiple(of: Any) -> int:
    """A rank's micro-batch is padded to a multiple of this many tokens.

    So that tensor ranks can share them, and each one's share suits FP8.

    Args:
        of: arguments, ours or Megatron's, or a model's configuration.
    """
    shares = of.tensor_model_parallel_size if of.sequence_parallel else 1
    if not getattr(of, "fp8", None):
        return int(shares)
    gathers_blocks = shares > 1 and of.fp8_recipe == "blockwise"
    return shares * (_OF_BLOCKS if gathers_blocks else _OF_PRODUCTS)


def check_fp8(of: Any, options: HdpOptions) -> None:
    """Checks it with HDP's options; nothing without FP8."""
    if not getattr(of, "fp8", None):
        return
    recipe = getattr(of.fp8_recipe, "value", of.fp8_recipe)
    if (why := _RECIPES.get(recipe, "HDP does not know it")) is not None:
        raise OptionError(
            f"--fp8-recipe {recipe} does not go with --hybrid-data-parallel, which needs "
            f"tensorwise or blockwise: {why}"
        )
    if getattr(of, "transformer_impl", "transformer_engine") != "transformer_engine":
        raise OptionError(
            f"--fp8-format with --transformer-impl {of.transformer_impl}: expected "
            "transformer_engine, because Megatron's local layers compute in BF16 all the same"
        )
    if getattr(of, "fp8_param_gather", False) or getattr(of, "fp8_param", False):
        raise OptionError(
            "--fp8-param-gather does not go with --hybrid-data-parallel, whose rings read weights "
            "in BF16: leave it out"
        )
    if options.hdp_offload != "off":
        raise OptionError(
            f"--hdp-offload {options.hdp_offload} with --fp8-format: expected off, because a layer "
            "saves its quantised weights with its activations, and both would go to the host"
        )
    capacity, multiple = options.hdp_tokens_per_rank, token_multiple(of)
    if capacity is not None and capacity % multiple:
        raise OptionError(
            f"--hdp-tokens-per-rank {capacity} is not a multiple of {multiple}, to which FP8 pads "
            f"each rank's tokens: give {capacity // multiple * multiple or multiple}"
        )
