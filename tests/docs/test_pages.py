"""Links lead somewhere, pages stay short, CI makes the site."""

import re
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, ROOT

LINK = re.compile(r"\]\(([^)\s]+)\)")


def headings(text):
    """What links may name behind ``#``, as GitHub makes it."""
    lines = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL).splitlines()
    names = [line.lstrip("#").strip().lower() for line in lines if line.startswith("#")]
    return {re.sub(r"[^\w\- ]", "", name).replace(" ", "-") for name in names}


def dead_links(path, text):
    """Links of a page that lead to no file, or to no heading of it; those to the web apart."""
    dead = []
    for target in LINK.findall(text):
        name, _, anchor = target.partition("#")
        if name.startswith("https://"):
            continue
        file = path.parent / name if name else path
        if not file.exists() or anchor and anchor not in anchors(file):
            dead.append(f"{path.name}: {target}")
    return dead


@cache
def anchors(file):
    """The headings of a page."""
    return headings(prepared(file.read_text()))


def prepared(text):
    """A page with the headings that its tables bring."""
    sys.path.insert(0, str(ROOT / "docs" / "_ext"))
    try:
        import declarations
    finally:
        sys.path.pop(0)
    return declarations.filled_in(text)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_links_lead_somewhere(path):
    assert dead_links(path, path.read_text()) == []


def test_a_dead_link_is_found():
    path = ROOT / "docs" / "train.md"
    assert dead_links(path, "[a](gpu.md) [b](gone.md)") == ["train.md: gone.md"]
    assert dead_links(path, "[a](reference.md#model) [b](#gone)") == ["train.md: #gone"]


def test_the_readme_can_be_read():
    assert (ROOT / "README.md").read_text().count("\n") <= 150


def test_no_page_holds_both_sides_of_a_merge():
    lines = [(path.name, line) for path in PAGES for line in path.read_text().splitlines()]
    assert len(PAGES) > 12
    assert [one for one in lines if one[1].startswith(("<<<<<<< ", ">>>>>>> "))] == []


def test_ci_makes_the_site_and_runs_the_tests():
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    assert "./scripts/docs.sh" in lines
    assert "./scripts/test.sh" in lines
    assert Path(ROOT, "scripts/docs.sh").stat().st_mode & 0o100
