"""A run goes on only in the order, and on the tokens, that its checkpoint was saved with."""

from dataclasses import replace

import pytest

from megatron_hdp.data import LATEST_ORDER, DataOrder, SourceOrder

WEB = SourceOrder(num_sequences=5, corpus=2, contents=3, long_sequence="error")
CODE = SourceOrder(num_sequences=7, corpus=4, contents=5, long_sequence="split", key=9)
BEFORE_MIXTURES = {  # what older releases save
    "hybrid_data_parallel": True,
    "seed": 1,
    "seq_length": 8,
    "long_sequence": "error",
    "num_sequences": 5,
    "corpus": 2,
    "contents": 3,
}


def order(**sources):
    return DataOrder(hybrid_data_parallel=True, seed=1, seq_length=8, sources=sources)


ONE, TWO = order(web=WEB), order(web=WEB, code=CODE)


def continued(mine, saved):
    """As from a checkpoint."""
    return mine.continuing(DataOrder.from_record(saved.to_record()), "here")


@pytest.mark.parametrize("change", [{"seed": 2}, {"seq_length": 9}, {"weight_unit": "sequences"}])
def test_another_order_is_refused(change):
    ((name, value),) = change.items()
    with pytest.raises(ValueError, match=f"found {value}, expected {getattr(TWO, name)}"):
        continued(replace(TWO, **change), TWO)


@pytest.mark.parametrize(
    "change",
    [{"num_sequences": 6}, {"corpus": 9}, {"contents": 9}, {"long_sequence": "truncate"}],
)
@pytest.mark.parametrize("saved", [ONE, TWO])
def test_another_source_under_the_same_name_is_refused(change, saved):
    ((name, value),) = change.items()
    mine = replace(saved, sources={**saved.sources, "web": replace(WEB, **change)})
    message = f"source 'web', .*: found {value}, expected {getattr(WEB, name)}"
    with pytest.raises(ValueError, match=message):
        continued(mine, saved)


def test_a_checkpoint_that_knows_no_contents_goes_on():
    unknown = order(web=replace(WEB, contents=None))
    assert continued(ONE, unknown).order == ONE
    assert continued(unknown, ONE).order == unknown


def test_nothing_is_said_where_all_is_as_before():
    found = continued(TWO, TWO)
    assert (found.order, found.announcements(), found.names_before) == (TWO, [], {})


def test_sources_come_and_go():
    found = continued(TWO, ONE)
    assert found.order == TWO
    assert found.announcements() == ["sources that are new to this run: 'code'"]
    left = continued(ONE, TWO)
    assert left.order == replace(ONE, absent={"code": CODE})
    assert "no longer draws from: 'code'; their positions are kept" in left.announcements()[0]
    # one that comes back goes on in its order, whatever key it would get as a new one
    new = replace(CODE, key=77)
    back = continued(order(web=WEB, code=new), left.order)
    assert back.order == TWO and back.added == ()


def test_a_source_under_another_name_is_known_by_what_it_holds():
    found = continued(order(web=WEB, python=replace(CODE, key=1)), TWO)
    assert found.names_before == {"python": "code"} and found.removed == ()
    assert found.order.sources["python"] == CODE


def test_other_data_altogether_are_refused():
    other = order(a=CODE, b=replace(CODE, corpus=8))
    with pytest.raises(ValueError, match="found 'a', 'b', expected at least one of 'web'"):
        continued(other, ONE)
    with pytest.raises(
        ValueError, match="source 'books', fingerprint of its lengths or files: found 4"
    ):
        continued(order(books=CODE), ONE)  # one source alone: said in what it differs


def test_a_run_of_a_release_before_mixtures_goes_on_in_its_order():
    saved = DataOrder.from_record(BEFORE_MIXTURES)
    found = ONE.continuing(saved, "here")
    assert found.names_before == {"web": ""}
    assert found.order.sources["web"] == replace(WEB, version=1, key=0)
    assert "began with version 1 of the order of the data" in found.announcements()[0]
    more = TWO.continuing(saved, "here")
    assert more.names_before == {"web": ""} and more.added == ("code",)
    with pytest.raises(ValueError, match="--seed: found 1, expected 5"):
        ONE.continuing(DataOrder.from_record({**BEFORE_MIXTURES, "seed": 5}), "here")


@pytest.mark.parametrize("version", [0, LATEST_ORDER + 1])
def test_an_unknown_version_is_refused(version):
    with pytest.raises(ValueError, match=f"here has version {version} of the order of the data"):
        continued(ONE, order(web=replace(WEB, version=version)))
