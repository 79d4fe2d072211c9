"""What travels as plain values comes back as it was, and as nothing else."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hdp.data.mixture import BatchSize, MixtureSpec, Phase, Schedule
from megatron_hdp.data.spec import MediaSpec, SourceSpec
from megatron_hdp.data.steps import Reader
from megatron_hdp.data_plane.records import from_plain, to_plain
from megatron_hdp.data_plane.roles import LoaderFigures
from megatron_hdp.data_plane.setup import SplitSetup
from tests.support.thread_plane import plan_settings

examples = settings(max_examples=50)


def back(kind, value):
    """Through JSON, as on the socket and in the plane's folder."""
    return from_plain(kind, orjson.loads(orjson.dumps(to_plain(value))))


def rich(setup):
    """A setup in which every optional field says something."""
    sources = (
        SourceSpec(name="böcker", path="a b/*.txt", glob="*.txt", max_epochs=3, bad_limit=0.1),
        SourceSpec(name="chat", path="chat", format="chat", tokenizer="hf:x", append_eod=False),
        SourceSpec(name="seen", path="x", media=MediaSpec(encoder="qwen3-vl", most_pixels=9)),
    )
    phases = (
        Phase(weights={"böcker": 0.1 + 0.2, "chat": 1.0}),
        Phase(begin=10, end=20, max_length=64),
    )
    spec = MixtureSpec(
        sources=sources,
        origin="data.yaml",
        schedule=Schedule("tokens", phases),
        held_out={"chat": 7},
    )
    return replace(
        setup,
        spec=spec,
        tokenizer="byte",
        cache_folder="/cache",
        settings=plan_settings(
            batch=BatchSize(tokens=2**40),
            seed=2**31 - 1,
            num_stages=2,
            stage_weights=(0.25, 0.75),
        ),
    )


def test_a_setup_comes_back(setup):
    orders = {name: replace(one, corpus=2**64 - 1) for name, one in setup.orders.items()}
    for one in (setup, rich(setup), replace(setup, orders=orders)):
        assert back(SplitSetup, one) == one
        assert to_plain(back(SplitSetup, one)) == to_plain(one)


@examples
@given(
    st.builds(Reader, hdp_rank=st.integers(0, 2**40), vocab_size=st.integers(1, 2**63 - 1)),
    st.builds(LoaderFigures, busy_s=st.floats(0, 1e300)),
)
def test_numbers_come_back_to_the_bit(reader, figures):
    assert back(Reader, reader) == reader
    assert back(LoaderFigures, figures) == figures


@dataclass(frozen=True)
class Tree:
    path: Path
    pair: tuple[int, str] = (1, "a")
    many: tuple[float, ...] = ()
    either: int | str | None = None
    by_name: Mapping[str, "list[Reader]"] | None = None


def test_a_tree_comes_back():
    one = Tree(Path("/a"), (2, "b"), (1.0, 2.5), "x", {"r": [Reader(1, 2)]})
    assert back(Tree, one) == one
    assert back(Tree, Tree(Path("b"))) == Tree(Path("b"))
    assert back(Tree, replace(one, many=(3,))).many == (3.0,)


PLAIN = {"path": "/a", "pair": [1, "a"], "many": [], "either": None, "by_name": None}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"path": 3}, "found 3, expected .*Path"),
        ({"pair": [1]}, "found 1 values, expected 2"),
        ({"pair": [1, "a", 2]}, "found 3 values, expected 2"),
        ({"pair": ["1", "a"]}, "found '1', expected .*int"),
        ({"pair": [True, "a"]}, "found True, expected .*int"),
        ({"many": [True]}, "found True, expected .*float"),
        ({"many": "ab"}, "found 'ab', expected tuple"),
        ({"either": 1.5}, "found 1.5, expected one of"),
        ({"by_name": {"r": [{"hdp_rank": 1}]}}, "found .*, expected one of"),
        ({"by_name": {"r": 3}}, "expected one of"),
        ({"more": 1}, r"found the fields \['more'\] in a Tree"),
    ],
)
def test_other_values_are_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        from_plain(Tree, PLAIN | changes)


@pytest.mark.parametrize(
    ("plain", "words"),
    [
        *((plain, "expected the fields of Reader") for plain in (None, [], "x", 3)),
        ({"hdp_rank": 1}, r"found no field \['vocab_size'\] in a Reader"),
    ],
)
def test_what_lacks_fields_is_refused(plain, words):
    with pytest.raises(ValueError, match=words):
        from_plain(Reader, plain)


def test_other_values_deep_in_a_setup_are_refused(setup):
    for change in ({"files": ["/etc/passwd"]}, {"split": ["train"]}, {"spec": "/etc/passwd"}):
        with pytest.raises(ValueError, match="found "):
            from_plain(SplitSetup, to_plain(setup) | change)
    plain = to_plain(setup)
    plain["settings"]["cost_model"]["a"] = "1e-9"
    with pytest.raises(ValueError, match="found '1e-9', expected .*float"):
        from_plain(SplitSetup, plain)
    plain = to_plain(setup)
    plain["spec"]["sources"][0]["__class__"] = "os.system"
    with pytest.raises(ValueError, match=r"found the fields \['__class__'\]"):
        from_plain(SplitSetup, plain)


@pytest.mark.parametrize("value", [{1, 2}, b"x", object(), Reader])
def test_what_is_not_plain_does_not_travel(value):
    with pytest.raises(TypeError, match="expected a dataclass or a plain value"):
        to_plain({"a": [value]})
