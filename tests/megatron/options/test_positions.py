"""What the built model has of the flags of positions."""

import math

import pytest

from megatron_hdp.megatron import parallel
from megatron_hdp.megatron.model import build_gpt
from tests.support.gradients import tiny_arguments, write_corpus


def built(cases):
    """Body of a rank: what each model turns by."""
    found = []
    for arguments in cases:
        parallel.initialise(arguments)
        model = build_gpt(arguments, 257).module
        positions = model.rotary_pos_emb
        found.append(
            (
                positions.inv_freq.tolist(),
                getattr(positions, "concentration", 1.0),
                positions.seq_len_interpolation_factor,
                model.config.no_rope_freq,
            )
        )
        parallel.finish()
    return found


def test_the_built_model_has_what_the_flags_say(run_ranks, tmp_path):
    prefix = write_corpus(tmp_path, [9])
    yarn = {"position_embedding_type": "yarn", "rotary_scaling_factor": 16.0}
    cases = [
        {"kv_channels": 8},
        {"kv_channels": 8, "use_rope_scaling": True, "rope_scaling_factor": 32.0},
        {"kv_channels": 8, "rotary_base": 500, "rotary_seq_len_interpolation_factor": 2},
        yarn | {"kv_channels": 8, "no_rope_freq": "2"},
        yarn | {"kv_channels": 8, "mscale": 2.0, "mscale_all_dim": 1.0, "yarn_beta_slow": 0.01},
    ]
    plain, llama, other, yarn, scaled = run_ranks(
        1, built, [tiny_arguments(prefix, **case) for case in cases]
    )[0]
    base = [10_000 ** (-i / 4) for i in range(4)]
    assert plain == (pytest.approx(base, rel=1e-6), 1.0, None, None)
    # wavelengths of 6, 63, 628 and 6283: only the last is longer than 2048
    smooth = (8192 / (2 * math.pi * 1000) - 1) / 3
    assert llama[0] == pytest.approx([*base[:3], ((1 - smooth) / 32 + smooth) / 1000], rel=1e-5)
    assert other[0] == pytest.approx([500 ** (-i / 4) for i in range(4)], rel=1e-6)
    assert other[2] == 2
    # turns over 4096 positions: 652, 65, 6.5, 0.65; channels 1 to 4 lie between 32 and 1 turns
    ramp = [0, 0, 1 / 2, 1]
    assert yarn[0] == pytest.approx(
        [value * ((1 - part) + part / 16) for value, part in zip(base, ramp, strict=True)], rel=1e-5
    )
    assert yarn[1] == pytest.approx(0.1 * math.log(16) + 1) and yarn[3] == [0, 1]
    assert scaled[1] == pytest.approx((0.2 * math.log(16) + 1) / (0.1 * math.log(16) + 1))
    assert scaled[0] != yarn[0]
