"""Which layers have a window: flags as Megatron reads them, and its own answer beside ours."""

import pytest
from megatron.core.transformer.utils import is_layer_window_attention

from megatron_hdp.megatron.options import layer_windows, parse_arguments, window_settings
from megatron_hdp.options import OptionError

ENOUGH = """--num-layers 6 --hidden-size 32 --num-attention-heads 4 --seq-length 128
--micro-batch-size 1 --global-batch-size 2 --train-iters 3 --lr 1e-3 --data-path corpus
--tokenizer-type byte"""
WINDOW = ["--window-size", "127,0"]


def parsed(*flags):
    return parse_arguments([*ENOUGH.split(), *flags])


@pytest.mark.parametrize(
    ("flags", "full"),
    [
        (WINDOW, ()),
        (["--window-size", "(127, 0)"], ()),
        ([*WINDOW, "--window-attn-skip-freq", "2"], (2, 4, 6)),
        ([*WINDOW, "--window-attn-skip-freq", "1"], (1, 2, 3, 4, 5, 6)),
        ([*WINDOW, "--window-attn-skip-freq", "9"], ()),
        ([*WINDOW, "--window-attn-skip-freq", "([1]*2+[0])*2"], (3, 6)),
        ([], (1, 2, 3, 4, 5, 6)),
    ],
)
def test_layers_are_those_of_megatron(flags, full):
    arguments = parsed(*flags)
    found = layer_windows(arguments)
    assert found == tuple(None if number in full else 128 for number in range(1, 7))
    settings = {"window_size": None, "window_attn_skip_freq": None} | window_settings(arguments)
    theirs = [is_layer_window_attention(**settings, layer_number=n) for n in range(1, 7)]
    assert [window is not None for window in found] == theirs


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--window-size", "127"], "--window-size: found '127', expected N,0"),
        (["--window-size", "127,1"], "expected N,0"),
        (["--window-size", "(-1, 0)"], "expected N,0"),
        (["--window-attn-skip-freq", "2"], "no effect without --window-size"),
        ([*WINDOW, "--window-attn-skip-freq", "0"], "found 0, expected at least 1"),
        ([*WINDOW, "--window-attn-skip-freq", "[1,0]"], "expected 6 numbers that are 0 or 1"),
        ([*WINDOW, "--window-attn-skip-freq", "two"], "found 'two', expected a number, or a list"),
    ],
)
def test_what_makes_no_sense_is_refused(flags, message):
    with pytest.raises(OptionError, match=message):
        parsed(*flags)
