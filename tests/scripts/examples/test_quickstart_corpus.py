"""The quickstart's corpus: what of the standard library it holds, and that it has a long tail."""

import json
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from megatron_hdp.data.mixture import BatchSize, Position
from megatron_hdp.planner import plan
from tests.support import costs
from tests.support.mixtures import mixture

ROOT = Path(__file__).parents[3]
sys.path.append(str(ROOT / "scripts" / "examples" / "quickstart"))
import corpus  # noqa: E402

CONTEXT, CAPACITY, BATCH_TOKENS = 8192, 2048, 65536  # of configs/tiny-cpu.yaml
FILE = '''"""A module."""
import os
CONSTANT = {place}
@decorated
def first_{place}():
    def inner():
        pass
class Class{place}:
    field = 1
    async def method(self):
        """Waits."""
    class Inner:
        def deep(self): pass
'''


@pytest.fixture(scope="module")
def whole_corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    corpus.main(str(path))
    return path


@pytest.fixture(scope="module")
def lengths(whole_corpus):
    """Of the sequences of the whole corpus, in bytes with the end-of-document token."""
    lines = whole_corpus.read_text().splitlines()
    return np.array([len(json.loads(line)["text"].encode()) + 1 for line in lines])


def planned_traffic(lengths):
    """What HDP's plans of a few steps send around rings, of what the static mesh sends."""
    lengths = np.minimum(lengths, CONTEXT)
    drawing = mixture({"corpus": lengths}, batch=BatchSize(tokens=BATCH_TOKENS), seed=1234)
    position, sent = Position(), {"static": 0, "auto": 0}
    for _ in range(5):
        step = drawing.step(position)
        position = step.after
        for strategy in sent:
            made = plan(
                step.lengths,
                ranks=4,
                tokens_per_rank=CAPACITY,
                strategy=strategy,
                max_length=CONTEXT,
                cost_model=costs.CPU,
            )
            sent[strategy] += made.summary["ring_tokens"]
    return sent["auto"] / sent["static"]


def has_long_tail(lengths):
    """Nearly all sequences fit on a rank, some need all, and those are a good part of the work."""
    short, full = lengths <= CAPACITY, lengths >= CONTEXT
    tokens = np.minimum(lengths, CONTEXT)
    long_share = tokens[~short].sum() / tokens.sum()
    return bool(short.mean() > 0.9 and full.sum() > 10 and 0.15 < long_share < 0.5)


@pytest.mark.slow  # the quickstart's test makes it, too
def test_the_corpus_has_a_long_tail(lengths):
    assert len(lengths) > 10_000
    assert has_long_tail(lengths)
    assert planned_traffic(lengths) < 0.3


@pytest.mark.slow
def test_a_corpus_without_one_is_noticed(lengths):
    library = Path(sysconfig.get_path("stdlib"))
    whole = np.array([path.stat().st_size + 1 for path in corpus.source_files(library)])
    assert not has_long_tail(whole) and planned_traffic(whole) > 0.6
    assert not has_long_tail(lengths[lengths <= CAPACITY])


def test_whole_files_then_classes_then_functions(tmp_path):
    paths = [tmp_path / f"{place:02}.py" for place in range(41)]
    for place, path in enumerate(paths):
        path.write_text(FILE.format(place=place))
    found = list(corpus.documents(paths))
    function = "@decorated\ndef first_{}():\n    def inner():\n        pass\n"
    methods = [
        '    async def method(self):\n        """Waits."""\n',
        "        def deep(self): pass\n",
    ]
    assert found[0] == FILE.format(place=0) and found[-1] == FILE.format(place=40)
    assert found[1] == function.format(1) and found[2].startswith("class Class1:\n    field")
    assert found[2].endswith("def deep(self): pass\n") and found[3] == function.format(2)
    assert found[9:12] == [function.format(5), *methods]
    assert len(found) == 2 + 4 * 2 + 35 * 3


def test_a_file_is_read_in_the_encoding_that_it_declares(tmp_path):
    paths = [tmp_path / "a.py", tmp_path / "b.py"]
    for path in paths:
        path.write_bytes("# coding: latin-1\r\ndef f(): return 'é'\r\n".encode("latin-1"))
    whole, function = corpus.documents(paths)
    assert whole.endswith(function) and function == "def f(): return 'é'\n"


@pytest.mark.slow
def test_one_library_gives_one_corpus(tmp_path, whole_corpus):
    corpus.main(str(tmp_path / "again"))
    assert (tmp_path / "again").read_bytes() == whole_corpus.read_bytes()


def test_some_files_give_one_corpus(tmp_path, monkeypatch):
    files = corpus.source_files(Path(sysconfig.get_path("stdlib")))[:60]
    monkeypatch.setattr(corpus, "source_files", lambda root: files)
    found = []
    for name in ("first", "again"):
        corpus.main(str(tmp_path / name))
        found.append((tmp_path / name).read_bytes())
    assert found[0] == found[1] and found[0].count(b"\n") > 100


def test_tests_and_installed_packages_are_left_out(tmp_path):
    for name in ("b.py", "a/c.py", "test/d.py", "a/tests/e.py", "site-packages/f.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    names = [str(path.relative_to(tmp_path)) for path in corpus.source_files(tmp_path)]
    assert names == ["a/c.py", "b.py"]


def test_a_python_without_sources(tmp_path):
    with pytest.raises(ValueError, match="has no .py file, expected .* use a Python that has them"):
        corpus.source_files(tmp_path)
