"""The options that say how tokens learn where they stand, under Megatron's names and defaults."""

from dataclasses import dataclass

from megatron_hdp.options import option


@dataclass(frozen=True, kw_only=True)
class PositionOptions:
    """Positions."""

    position_embedding_type: str = option(
        "rope",
        choices=("rope", "yarn", "none"),
        help="Rotary positions, the same with frequencies scaled by YaRN, or none in any layer.",
    )
    rotary_base: int = option(
        10000, minimum=1, maximum=2**53, help="Base of the rotary frequencies."
    )
    rotary_percent: float = option(
        1.0, minimum=0.0, maximum=1.0, help="Share of a head's channels that is rotated."
    )
    rotary_interleaved: bool = option(
        False, help="Rotate neighbouring channels together instead of the two halves of a head."
    )
    rotary_seq_len_interpolation_factor: int | None = option(
        None, minimum=1, help="Divide positions by this, to reach a longer context."
    )
    use_rope_scaling: bool = option(False, help="Scale the rotary frequencies as Llama 3.1 does.")
    rope_scaling_factor: float = option(
        8.0,
        minimum=1.0,
        help="By how much, with --use-rope-scaling (Megatron-LM's script reads the flag and takes "
        "8 all the same).",
    )
    no_rope_freq: str | None = option(
        None,
        metavar="N|LIST",
        help="Layers without positions: every N-th, or 1 for each of them in a list like "
        "([0]*3+[1])*2.",
    )
    rotary_scaling_factor: float = option(
        1.0, minimum=1.0, help="By how much YaRN makes the context longer."
    )
    yarn_original_max_position_embeddings: int = option(
        4096, minimum=1, help="Context length that the frequencies were trained with, for YaRN."
    )
    yarn_beta_fast: float = option(
        32.0, minimum=0.0, help="Turns over that length from which YaRN leaves a frequency alone."
    )
    yarn_beta_slow: float = option(
        1.0, minimum=0.0, help="Turns up to which YaRN divides a frequency by the whole factor."
    )
    yarn_correction_range_round_to_int: bool = option(
        True, help="Do not round YaRN's range of frequencies outwards to whole channels."
    )
    mscale: float = option(
        1.0, minimum=0.0, help="How much YaRN enlarges queries and keys with its factor."
    )
    mscale_all_dim: float = option(
        0.0, minimum=0.0, help="The same for what it is divided by; with MLA for all channels."
    )
