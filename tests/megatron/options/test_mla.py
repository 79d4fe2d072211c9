"""Options of multi-latent attention that do not go together are refused with the remedy."""

import pytest

from megatron_hdp.megatron.options import head_sizes, parse_arguments
from megatron_hdp.options import OptionError
from tests.megatron.options.test_arguments import HDP, REQUIRED

MLA = [*HDP, "--attention-dropout", "0", "--multi-latent-attention"]


def test_defaults_follow_megatron() -> None:
    args = parse_arguments([*REQUIRED, *MLA])
    assert (args.q_lora_rank, args.kv_lora_rank, args.rope_type) == (None, 32, None)
    assert (args.qk_head_dim, args.qk_pos_emb_head_dim, args.v_head_dim) == (128, 64, 128)
    assert (args.rotary_scaling_factor, args.mscale, args.mscale_all_dim) == (1.0, 1.0, 0.0)
    assert head_sizes(args) == (192, 128)
    plain = parse_arguments(REQUIRED)
    assert head_sizes(plain) == (plain.kv_channels, plain.kv_channels)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--no-hybrid-data-parallel", "goes with --hybrid-data-parallel in this command"),
        ("--num-query-groups 2", "leave them out"),
        ("--group-query-attention", "leave them out"),
        ("--add-qkv-bias", "--add-qkv-bias has no effect with --multi-latent-attention"),
        ("--softmax-type learnable", "--softmax-type learnable"),
        ("--qk-pos-emb-head-dim 3", "1.0 of 3 channels of a head are 3, expected an even number"),
        (
            "--rotary-percent 0.5",
            "no effect with --multi-latent-attention and --rope-type yarn",
        ),
        ("--rope-type rope --mscale 0.5", "--mscale (found 0.5) has no effect with --multi-latent"),
        ("--rope-type rope --yarn-beta-fast 1", "--yarn-beta-fast (found 1.0) has no effect with"),
        ("--position-embedding-type yarn", "use --rope-type"),
        (
            "--no-rope-freq 2",
            "--no-rope-freq (found 2) has no effect with --multi-latent",
        ),
        (
            "--kv-lora-rank 33 --tensor-model-parallel-size 2",
            "= 97 is not a multiple of --tensor-model-parallel-size 2",
        ),
        (
            "--q-lora-rank 33 --tensor-model-parallel-size 2",
            "--q-lora-rank 33 is not a multiple of --tensor-model-parallel-size 2",
        ),
        (
            "--q-lora-rank 32 --qk-layernorm --tensor-model-parallel-size 2",
            "needs --sequence-parallel",
        ),
    ],
)
def test_a_bad_combination_is_refused(argv: str, message: str) -> None:
    flags = [*REQUIRED, *MLA, *argv.split()]
    if "--no-hybrid-data-parallel" in argv:
        flags = [*REQUIRED, "--multi-latent-attention"]
    with pytest.raises(OptionError) as error:
        parse_arguments(flags)
    assert message in str(error.value)


@pytest.mark.parametrize("argv", ["--kv-lora-rank 64", "--rope-type yarn"])
def test_without_latent_attention_an_option_of_its_is_refused(argv: str) -> None:
    with pytest.raises(OptionError, match="no effect without --multi-latent-attention"):
        parse_arguments([*REQUIRED, *argv.split()])
