"""Which layers have experts, a window or no positions: flags as Megatron reads them."""

import pytest
from megatron.core.transformer.utils import is_layer_window_attention

from megatron_hdp.megatron.options import (
    expert_layers,
    expert_layers_of_chunk,
    layer_windows,
    layers_without_positions,
    parse_arguments,
    pattern_of,
    window_settings,
)
from megatron_hdp.options import OptionError
from tests.megatron.options.test_refusals import HDP, REQUIRED

WINDOW, SKIP = ["--window-size", "127,0"], "--window-attn-skip-freq"
MOE = ["--num-experts", "8", "--disable-bias-linear"]


@pytest.mark.parametrize(
    ("flags", "full"),
    [
        (WINDOW, ()),
        (["--window-size", "(127, 0)"], ()),
        ([*WINDOW, SKIP, "2"], (2, 4, 6)),
        ([*WINDOW, SKIP, "1"], (1, 2, 3, 4, 5, 6)),
        ([*WINDOW, SKIP, "9"], ()),
        ([*WINDOW, SKIP, "([1]*2+[0])*2"], (3, 6)),
        ([], (1, 2, 3, 4, 5, 6)),
    ],
)
def test_layers_with_a_window_are_those_of_megatron(flags, full):
    arguments = parse_arguments([*REQUIRED, "--num-layers", "6", *flags])
    found = layer_windows(arguments)
    assert found == tuple(None if number in full else 128 for number in range(1, 7))
    settings = {"window_size": None, "window_attn_skip_freq": None} | window_settings(arguments)
    theirs = [is_layer_window_attention(**settings, layer_number=n) for n in range(1, 7)]
    assert [window is not None for window in found] == theirs


@pytest.mark.parametrize(
    ("written", "layers"),
    [
        ("4", (0, 0, 0, 1)),
        ("2", (0, 1, 0, 1)),
        ("1", (1, 1, 1, 1)),
        ("[1,0,0,1]", (1, 0, 0, 1)),
        ("([0]+[1])*2", (0, 1, 0, 1)),
        ("2*[0] + [1]*2", (0, 0, 1, 1)),
    ],
)
def test_layers_without_positions(written, layers):
    flags = ["--num-layers", "4", "--no-rope-freq", written]
    assert layers_without_positions(parse_arguments([*REQUIRED, *flags])) == layers


@pytest.mark.parametrize(
    ("text", "layers", "expected"),
    [
        ("1", 3, [1, 1, 1]),
        ("2", 5, [1, 0, 1, 0, 1]),
        ("[0]*1+[1]*3", 4, [0, 1, 1, 1]),
        ("([1]*2+[0])*2", 6, [1, 1, 0, 1, 1, 0]),
        ("[0, 1]", 2, [0, 1]),
    ],
)
def test_layers_with_experts(text, layers, expected):
    flags = ["--num-layers", str(layers), "--moe-layer-freq", text]
    assert expert_layers(parse_arguments([*REQUIRED, *MOE, *flags])) == tuple(map(bool, expected))
    assert expert_layers(parse_arguments([*REQUIRED, *flags[:2]])) == (False,) * layers


def test_layers_with_experts_of_a_model_chunk():
    flags = ["--num-layers", "5", "--moe-layer-freq", "[0]*2+[1]*3"]
    layout = ["--pipeline-model-parallel-layout", "Et|t|tt|tL", "--pipeline-model-parallel-size"]
    args = parse_arguments([*REQUIRED, *MOE, *HDP, *flags, *layout, "2"])
    chunks = [expert_layers_of_chunk(args, stage, chunk) for chunk in (0, 1) for stage in (0, 1)]
    assert chunks == [(False,), (False,), (True, True), (True,)]


def test_a_pattern_in_yaml(tmp_path):
    for text, expected in (("2", (True, False)), ("'[0]+[1]'", (False, True))):
        (tmp_path / "model.yaml").write_text(f"moe-layer-freq: {text}\n")
        args = parse_arguments([*REQUIRED, *MOE, "--config", str(tmp_path / "model.yaml")])
        assert expert_layers(args) == expected


@pytest.mark.parametrize(
    "text", ["", "[", "[[1]]", "1+1", "[1]*[1]", "[True]", "[1]**9", "[1]*99999999999", "x", "'1'"]
)
def test_other_expressions_are_refused(text):
    with pytest.raises(OptionError, match="expected a number, or a list"):
        pattern_of("--flag", text)
