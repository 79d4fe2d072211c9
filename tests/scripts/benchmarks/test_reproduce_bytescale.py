"""The reproduction of ByteScale's evaluation: cells as in the JSON, the page as the JSON says."""

import copy
import json
import sys

import numpy as np
import pytest

from tests.docs.pages import ROOT
from tests.support.processes import run_script

SCRIPT = ROOT / "scripts" / "benchmarks" / "reproduce_bytescale.py"
DOCS = ROOT / "docs"
CELLS = (
    ("llama-7b", "github", 262_144),
    *(
        pytest.param(one, marks=pytest.mark.slow)
        for one in (("llama-13b", "byted", 2_097_152), ("mistral-8x22b", "byted", 262_144))
    ),
)
FIELDS = ("paper_naive", "paper_balanced", "naive", "bytescale", "auto")


@pytest.fixture(scope="module", autouse=True)
def _scripts_are_found():
    sys.path.insert(0, str(SCRIPT.parent))
    yield
    sys.path.remove(str(SCRIPT.parent))


@pytest.fixture(scope="module")
def found():
    return json.loads((DOCS / "reproduction.json").read_text())


def test_every_cell_of_the_paper_is_there_once(found):
    names = [(cell["model"], cell["data"], cell["context"]) for cell in found["cells"]]
    assert len(set(names)) == len(names) == 48
    gpus = {cell["model"]: cell["gpus"] for cell in found["cells"]}
    assert gpus == {
        "llama-7b": 1024,
        "llama-13b": 2048,
        "llama-30b": 4096,
        "llama-70b": 8192,
        "mistral-8x7b": 8192,
        "mistral-8x22b": 12_288,
    }
    assert all(isinstance(cell[field], float) for cell in found["cells"] for field in FIELDS)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: " ".join(map(str, cell)))
def test_a_cell_again(cell, found):
    model, data, context = cell
    name = f"{model} {data} {context // 1024}K"
    done = run_script(SCRIPT, "--cells", name)
    assert done.returncode == 0, done.stderr
    again = json.loads(done.stdout)
    assert again["constants"] == found["constants"]
    (entry,) = again["cells"]
    (expected,) = [
        one
        for one in found["cells"]
        if (one["model"], one["data"], one["context"]) == (model, data, context)
    ]
    assert entry.keys() == expected.keys()
    for field, value in expected.items():
        close = value if isinstance(value, str) else pytest.approx(value, rel=1e-3)
        assert entry[field] == close, field


def test_the_page_is_made_of_the_json(found):
    from bytescale.page import page_of

    page = (DOCS / "reproduction.md").read_text()
    assert page_of(found) == page
    other = copy.deepcopy(found)
    other["cells"][7]["auto"] += 1
    assert page_of(other) != page


def test_an_unknown_cell_is_refused():
    done = run_script(SCRIPT, "--cells", "llama-8b*")
    assert done.returncode == 2 and "no such cell; there are llama-7b github 256K" in done.stderr


def test_ranks_are_those_of_the_case_study_and_the_least_that_hold_the_capacity():
    from bytescale.machine import Constants, Layout, layout_of
    from bytescale.paper import ROWS

    layouts = {row.model: layout_of(row.model, row.gpus, Constants()) for row in ROWS}
    assert layouts == {
        "llama-7b": Layout(2, 1),
        "llama-13b": Layout(2, 1),
        "llama-30b": Layout(4, 1),
        "llama-70b": Layout(8, 2),
        "mistral-8x7b": Layout(4, 2),
        "mistral-8x22b": Layout(8, 2),
    }


def test_documents_are_split_and_none_is_lost():
    from bytescale.cells import split_at

    lengths = np.array([5, 10, 20, 21, 3])
    assert split_at(lengths, 10).tolist() == [5, 10, 10, 10, 10, 10, 1, 3]


def test_naive_as_it_comes_covers_the_batch():
    from bytescale.unsorted import naive_in_order

    lengths = np.array([3, 31, 4, 9, 8, 100, 2], dtype=np.int64)
    made = naive_in_order(lengths, ranks=16, tokens_per_rank=10)
    made.validate()
    degrees = np.diff(made.rank_offsets)[
        np.repeat(np.arange(made.num_micro_batches), np.diff(made.sequence_offsets))
    ]
    by_sequence = dict(zip(made.sequences.tolist(), degrees.tolist(), strict=True))
    assert [by_sequence[number] for number in range(7)] == [1, 4, 1, 1, 1, 10, 1]


def test_seconds_that_both_have_in_common():
    from bytescale.checks import common_s

    common = common_s(100.0, 20.0, paper=3.0)
    assert (100 + common) / (20 + common) == pytest.approx(3.0)
