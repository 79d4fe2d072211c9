"""Pages and help texts use the field's words: those that the vocabulary replaces are refused."""

import argparse
import re
from collections.abc import Iterator

import pytest

from tests.docs import names
from tests.docs.pages import PAGES, ROOT

_ROW = re.compile(r"^\| (?!instead of)([^|]+) \| ([^|]+) \|$", re.MULTILINE)
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
VOCABULARY = CONTRIBUTING[CONTRIBUTING.index("## Vocabulary") : CONTRIBUTING.index("## Tests on")]
INSTEAD = {word: right for row, right in _ROW.findall(VOCABULARY) for word in row.split(", ")}


def house_words(text: str) -> list[str]:
    """Words that the vocabulary replaces, with what to write; code is left out."""
    prose = re.sub(r"^```.*?^```$|`[^`]*`|\]\([^)]*\)", "", text, flags=re.MULTILINE | re.DOTALL)
    prose = " ".join(prose.split())
    return [
        f"{found[0]}: write {right}"
        for word, right in INSTEAD.items()
        for found in re.finditer(rf"\b{word}\b", prose, re.IGNORECASE)
    ]


def helps(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    """What a parser says, and where."""
    yield parser.prog, f"{parser.description or ''} {parser.epilog or ''}"
    for action in parser._actions:
        if action.help not in (None, argparse.SUPPRESS):
            yield f"{parser.prog} {action.option_strings or action.dest}", action.help
        for one in getattr(action, "_choices_actions", ()):
            yield f"{parser.prog} {one.dest}", one.help or ""


def in_helps(parsers) -> list[str]:
    """House words in the help of parsers, and where."""
    said = dict.fromkeys(pair for parser in parsers for pair in helps(parser))
    return [f"{place}: {word}" for place, text in said for word in house_words(text)]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_pages_use_the_words_of_the_field(path):
    assert house_words(path.read_text().replace(VOCABULARY, "")) == []


def test_helps_use_the_words_of_the_field():
    assert in_helps(names.parsers()) == []


def test_planted_words_are_found():
    assert len(INSTEAD) > 25
    page = "Runs go\non. `go on`\n```bash\ngo on\n```\n[a](shadow.md) Shadows are alike"
    assert house_words(page) == [
        "go on: write resume; continue",
        "Shadows: write standby loader",
        "alike: write equal, the same, similar",
    ]
    parser = argparse.ArgumentParser("tool", description="Goes on.")
    parser.add_argument("--loaders", help="one with a shadow")
    parser.add_argument("--hidden", help=argparse.SUPPRESS)
    commands = parser.add_subparsers()
    commands.add_parser("stop", help="stop slow ranks").add_argument("when", help="page-locked")
    assert in_helps(names.below(parser)) == [
        "tool: Goes on: write resume; continue",
        "tool ['--loaders']: shadow: write standby loader",
        "tool stop: slow ranks: write straggler",
        "tool stop when: page-locked: write pinned",
    ]


def test_the_table_is_read_whole():
    rows = [line for line in VOCABULARY.splitlines() if line.startswith("| ")]
    assert len(_ROW.findall(VOCABULARY)) == len(rows) - 1
