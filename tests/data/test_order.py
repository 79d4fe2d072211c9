"""A run goes on only in the order, and on the tokens, that its checkpoint was saved with."""

from dataclasses import replace

import pytest

from megatron_hdp.data import DataOrder

ORDER = DataOrder(
    hybrid_data_parallel=True,
    seed=1,
    seq_length=8,
    long_sequence="error",
    num_sequences=5,
    corpus=2,
    contents=3,
)


@pytest.mark.parametrize(
    "change",
    [{"seed": 2}, {"seq_length": 9}, {"num_sequences": 6}, {"corpus": 9}, {"contents": 9}],
)
def test_another_order_is_refused(change):
    ((name, value),) = change.items()
    with pytest.raises(ValueError, match=f"found {value}, expected {getattr(ORDER, name)}"):
        replace(ORDER, **change).require_same(ORDER, "here")


def test_a_checkpoint_that_knows_no_contents_goes_on():
    ORDER.require_same(ORDER, "here")
    ORDER.require_same(replace(ORDER, contents=None), "an older release's")
    replace(ORDER, contents=None).require_same(ORDER, "here")
