"""Whether a run may go on from Megatron-LM's checkpoint: only in the order that it began with."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from megatron_hdp.megatron.lm import checkpoint
from tests.support.gradients import tiny_arguments, write_corpus


@pytest.fixture
def arguments(tmp_path):
    return tiny_arguments(write_corpus(tmp_path, [3, 50, 20, 7, 9, 30, 11, 2, 40, 5]))


def saved_by(arguments):
    args = SimpleNamespace()
    checkpoint.remember(checkpoint.data_order(arguments), args)
    return args


HERE = SimpleNamespace(load="checkpoints")


def test_the_same_order_goes_on_whatever_the_plan(arguments):
    other_plan = replace(arguments, hdp_strategy="static", hdp_tokens_per_rank=64)
    checkpoint.require_same_order(HERE, other_plan, saved_by(arguments))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"seed": 99}, "--seed: found 99, expected"),
        ({"split": "50,50,0"}, "--data-path and --split"),
        ({"hdp_long_sequence": "split"}, "--hdp-long-sequence: found split, expected"),
    ],
)
def test_another_order_is_refused(arguments, changed, message):
    with pytest.raises(ValueError, match=message) as info:
        checkpoint.require_same_order(HERE, replace(arguments, **changed), saved_by(arguments))
    assert "--load checkpoints" in str(info.value) and "--finetune" in str(info.value)


def test_with_and_without_hdp_are_two_orders(arguments):
    stock = SimpleNamespace()
    checkpoint.require_same_order(HERE, None, stock)
    with pytest.raises(ValueError, match="found a run with --hybrid-data-parallel, expected one w"):
        checkpoint.require_same_order(HERE, arguments, stock)
    with pytest.raises(ValueError, match="found a run without --hybrid-data-parallel, expected"):
        checkpoint.require_same_order(HERE, None, saved_by(arguments))


def test_tokens_are_counted_on():
    first, second = SimpleNamespace(), SimpleNamespace()
    assert [checkpoint.count_tokens(first, 5), checkpoint.count_tokens(first, 6)] == [5, 11]
    checkpoint.restore_tokens(second, first)
    assert checkpoint.count_tokens(second, 1) == 12
