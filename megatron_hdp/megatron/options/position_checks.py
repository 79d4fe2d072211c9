"""Checks the options of rotary positions (`OptionError`), and finds the layers without them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from megatron_hdp.megatron.options.arguments import TrainingArguments
from megatron_hdp.megatron.options.layer_patterns import pattern_of, zeros_and_ones
from megatron_hdp.megatron.options.model_options import PositionOptions
from megatron_hdp.options import OptionError, flag_of, no_effect

_YARN = {
    *("rotary_scaling_factor", "yarn_original_max_position_embeddings", "yarn_beta_fast"),
    *("yarn_beta_slow", "yarn_correction_range_round_to_int", "mscale", "mscale_all_dim"),
}
_ROPE = {
    *("rotary_percent", "rotary_interleaved", "rotary_seq_len_interpolation_factor"),
    *("use_rope_scaling", "rope_scaling_factor"),
}
_ANY = {"rotary_base", "no_rope_freq"}
_EFFECTIVE = {"rope": _ROPE | _ANY, "yarn": _YARN | _ANY, "none": set[str]()}
_EFFECTIVE_IN_MLA = {  # whose embedding Megatron gives no other options
    "rope": {"rotary_base", "rotary_percent"},
    "yarn": {"rotary_base"} | _YARN - {"yarn_correction_range_round_to_int"},
}


def check_positions(args: TrainingArguments) -> None:
    """Checks these options together, derived defaults filled in."""
    kind, flag = args.position_embedding_type, "--position-embedding-type"
    effective, head = _EFFECTIVE[kind], args.kv_channels or 0
    if args.multi_latent_attention:
        if kind != "rope":
            raise OptionError(
                f"--position-embedding-type {kind} does not work with --multi-latent-attention: "
                "leave it out and use --rope-type"
            )
        kind, flag = args.rope_type or "yarn", "--multi-latent-attention and --rope-type"
        effective, head = _EFFECTIVE_IN_MLA[kind], args.qk_pos_emb_head_dim
    for item in fields(PositionOptions):
        name, found = item.name, getattr(args, item.name)
        if name == "position_embedding_type" or found == item.default:
            continue
        if name not in effective:
            raise OptionError(
                f"{flag_of(name)} (found {found}) has no effect with {flag} {kind}: leave it out, "
                "or choose another type"
            )
    if args.rope_scaling_factor != 8.0 and not args.use_rope_scaling:
        raise no_effect("--rope-scaling-factor", "--use-rope-scaling")
    channels = int(head * args.rotary_percent)
    if kind != "none" and (channels < 2 or channels % 2):
        raise OptionError(
            f"--rotary-percent {args.rotary_percent} of {head} channels of a head are {channels}, "
            "expected an even number of at least 2, as channels rotate in pairs: change it or "
            f"{'--qk-pos-emb-head-dim' if args.multi_latent_attention else '--kv-channels'}"
        )
    layers_without_positions(args)


def layers_without_positions(args: TrainingArguments) -> tuple[int, ...] | None:
    """1 for each layer of the model whose queries and keys are not rotated, 0 for the others.

    None where ``--no-rope-freq`` is not given.
    """
    if args.no_rope_freq is None:
        return None
    layers, given = args.num_layers or 1, args.no_rope_freq
    # Megatron's own parser makes numbers of it
    pattern = pattern_of("--no-rope-freq", given) if isinstance(given, str) else given
    if not isinstance(pattern, int):
        return zeros_and_ones("--no-rope-freq", tuple(pattern), layers)
    if pattern < 1 or layers % pattern:
        raise OptionError(
            f"--no-rope-freq: found {pattern}, expected a number that divides the {layers} of "
            "--num-layers, or a list of 0 and 1"
        )
    return tuple(int(layer % pattern == pattern - 1) for layer in range(layers))


def position_record(args: TrainingArguments) -> dict[str, Any]:
    """What a checkpoint says of its model's positions, by fields' names."""
    record = {item.name: getattr(args, item.name) for item in fields(PositionOptions)}
    return record | {"no_rope_freq": layers_without_positions(args)}


def other_positions(args: TrainingArguments, saved: Mapping[str, Any]) -> list[str]:
    """A line about what the model of a checkpoint had otherwise, none where all is the same.

    A context is made longer by such a change, so it is allowed.
    """
    differences = [
        f"{flag_of(name)} {found} instead of {saved[name]}"
        for name, found in position_record(args).items()
        if name in saved and saved[name] != found
    ]
    found = f"positions differ from those of the checkpoint: {', '.join(differences)}"
    return [found] if differences else []
