"""A run goes on only in the order, and on the tokens, that its checkpoint was saved with."""

from dataclasses import asdict, replace

import pytest

from megatron_hdp.data import LATEST_ORDER, DataOrder

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


def test_a_run_goes_on_in_the_version_that_it_began_with():
    mine = replace(ORDER, version=LATEST_ORDER)
    assert mine.continuing(mine, "here") == mine
    first = {name: value for name, value in asdict(ORDER).items() if name != "version"}
    before = DataOrder(**first)  # as a checkpoint of the release that had no other
    assert mine.continuing(before, "here") == replace(mine, version=1)
    assert "version 1" in mine.continuing(before, "here").announcement
    with pytest.raises(ValueError, match="--seed: found 1, expected 5"):
        mine.continuing(replace(before, seed=5), "here")


@pytest.mark.parametrize("version", [0, LATEST_ORDER + 1])
def test_an_unknown_version_is_refused(version):
    with pytest.raises(ValueError, match=f"here has version {version} of the order of the data"):
        ORDER.continuing(replace(ORDER, version=version), "here")
