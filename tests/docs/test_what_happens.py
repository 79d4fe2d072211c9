"""Every row of "When something fails" has its tests, and they exist."""

from pathlib import Path

import pytest

from tests.docs.what_happens import SHOWN_BY

ROOT = Path(__file__).parents[2]


def rows(page):
    """The first cells of the page's first table."""
    lines = page.splitlines()
    first = lines.index("|---|---|---|---|") + 1
    cells = []
    for line in lines[first:]:
        if not line.startswith("|"):
            return cells
        cells.append(line.split("|")[1].strip())
    return cells


def problems(page, shown_by):
    found = [f"no test for: {row}" for row in rows(page) if row not in shown_by]
    found += [f"no row for: {row}" for row in shown_by if row not in rows(page)]
    for tests in shown_by.values():
        for test in tests:
            path, name = test.split("::")
            if not (ROOT / path).exists() or f"\ndef {name}(" not in (ROOT / path).read_text():
                found.append(f"no such test: {test}")
    return found


@pytest.fixture
def page():
    return (ROOT / "docs" / "failures.md").read_text()


def test_every_row_has_its_tests(page):
    assert problems(page, SHOWN_BY) == []


def test_planted_mistakes_are_found(page):
    row, tests = next(iter(SHOWN_BY.items()))
    assert problems(page, {k: v for k, v in SHOWN_BY.items() if k != row}) == [
        f"no test for: {row}"
    ]
    assert problems(page, SHOWN_BY | {"it rains": tests}) == ["no row for: it rains"]
    gone = f"{tests[0]}_not"
    assert problems(page, SHOWN_BY | {row: (gone,)}) == [f"no such test: {gone}"]
