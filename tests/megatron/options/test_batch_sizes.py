"""Flags of a step's size: what they say, and what does not go together."""

import pytest

from megatron_hdp.megatron.options import batch_size_of, parse_arguments
from megatron_hdp.options import OptionError

ENOUGH = """--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 128
--train-iters 3 --lr 1e-3 --data-path corpus --tokenizer-type byte --attention-dropout 0
--hybrid-data-parallel --hdp-tokens-per-rank 128"""
STEPS = ["--step-batch-size-schedule", "0:4 1K:8, 0.01M:16"]
RAMP = ["--rampup-batch-size", "2", "3", "12"]
EIGHT = ["--global-batch-size", "8"]


def parsed(*flags):
    return parse_arguments([*ENOUGH.split(), *flags])


def test_sizes_grow():
    size = batch_size_of(parsed(*STEPS))
    assert size.growth == ((0, 4), (1000 // 128, 8), (10_000 // 128, 16)) and size.sequences == 16
    size = batch_size_of(parsed(*EIGHT, *RAMP))
    assert size.growth == ((0, 2), (6, 5), (12, 8))


def test_evaluation_has_the_last_size_or_its_own():
    for flags in (STEPS, [*EIGHT, *RAMP], EIGHT):
        arguments = parsed(*flags)
        last = batch_size_of(arguments, "valid")
        assert last.at(0) == batch_size_of(arguments).at(10**9) and not last.growth
        own = parsed(*flags, "--eval-global-batch-size", "3")
        assert batch_size_of(own, "valid").at(0) == 3
        assert batch_size_of(own) == batch_size_of(arguments)
    tokens = parsed("--hdp-global-batch-tokens", "500")
    assert batch_size_of(tokens, "valid").tokens == 500


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([*EIGHT, *STEPS], "found both --step-batch-size-schedule and --global-batch-size"),
        ([*EIGHT, *RAMP[:3]], "expected three numbers"),
        ([*EIGHT, "--rampup-batch-size", "2", "4", "8"], "found no way by steps of 4 from 2"),
        ([*RAMP, "--hdp-global-batch-tokens", "500"], "found --rampup-batch-size and --hdp-global"),
        ([*STEPS, *RAMP], "found --rampup-batch-size and --step-batch-size-schedule, expected one"),
        ([STEPS[0], "640:4"], r"found \[5\], expected 0 and then ever more"),
        ([STEPS[0], "0:4 9"], "found '9', expected FROM:SIZE"),
        ([STEPS[0], " "], "found nothing, expected FROM:SIZE"),
        ([*EIGHT, *RAMP, "--no-hybrid-data-parallel"], "no effect without --hybrid|goes with"),
    ],
)
def test_what_does_not_go_together_is_refused(flags, message):
    with pytest.raises(OptionError, match=message):
        parsed(*flags)
