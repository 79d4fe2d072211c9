"""A loader of several sources answers for each as one that has it alone."""

import numpy as np
import orjson
import pytest

from megatron_hdp.data.spec import LoadersSpec
from megatron_hdp.data_plane.records import to_plain
from megatron_hdp.data_plane.roles import Wanted
from tests.support.thread_plane import loading_of, setup_of, write_pairs

actors = pytest.importorskip(
    "megatron_hdp.data_plane.actors", reason="no Ray: pip install 'megatron-hdp[ray]'"
)


@pytest.fixture
def setup(tmp_path):
    return setup_of(write_pairs(tmp_path))


def wanted(*rows):
    ones = np.ones(len(rows), dtype=np.int64)
    return Wanted(np.array(rows), 0 * ones, 3 * ones, 2 * ones)


def test_each_source_is_read_and_counted_for_itself(setup):
    loader = actors.Loader(orjson.dumps(to_plain(setup)), ("web", "chat"))
    alone = loading_of(setup)
    for source, rows in (("web", (0, 2)), ("chat", (1, 0, 3))):
        found, expected = (
            one(wanted(*rows))
            for one in (lambda asked, source=source: loader.load(source, asked), alone[source].load)
        )
        np.testing.assert_array_equal(found.tokens, expected.tokens)
        np.testing.assert_array_equal(found.trained, expected.trained)
    first, other = (loader.load(name, wanted(0)).tokens for name in ("web", "chat"))
    assert first.tolist() != other.tolist()  # so that one mistaken for another is seen
    done = loader.figures()["sources"]
    assert {name: one["tokens"] for name, one in done.items()} == {"web": 9, "chat": 12}
    with pytest.raises(KeyError, match="code"):
        loader.load("code", wanted(0))


def test_a_spare_opens_all_or_says_which_it_cannot(setup, tmp_path):
    loader, plain = actors.Loader(), orjson.dumps(to_plain(setup))
    assert loader.figures() is None
    with pytest.raises(actors.NotOpenError):
        loader.load("web", wanted(0))
    path = tmp_path / "chat" / "corpus.idx"
    whole = path.read_bytes()
    path.unlink()
    for ask in (lambda: loader.open(plain, ("web", "chat")), lambda: loader.load("web", wanted(0))):
        with pytest.raises(ValueError, match="chat"):
            ask()
    assert loader.figures() is None
    path.write_bytes(whole)
    loader.open(plain, ("web", "chat"))
    assert len(loader.load("web", wanted(0)).tokens) == 3


@pytest.mark.parametrize(
    ("together", "crews"),
    [
        (1, [("web",), ("chat",), ("code",)]),
        (2, [("web", "code"), ("chat",)]),
        (99, [("web", "code"), ("chat",)]),
    ],
)
def test_sources_share_in_the_order_of_the_file_but_for_those_that_may_fail(
    tmp_path, together, crews
):
    path = write_pairs(tmp_path, keys={"chat": "on-failure: go-on-without"})
    spec = setup_of(path).spec
    found = LoadersSpec(sources_per_loader=together).crews(spec.sources)
    assert sorted(found) == sorted(crews)
    assert found[0][0] == "web"
