"""The pages of the docs, and the commands that they show."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "design").glob("*.md")),
]
LANGUAGES = {"bash", "console", "python", "yaml", "text"}

_FENCE = re.compile(r"^```(\S*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """What stands between two fences."""

    page: str
    language: str
    text: str


@dataclass(frozen=True)
class Command:
    """A command as a page shows it, on one line and without its comment."""

    page: str
    text: str
    printed: str | None = None
    """What the page says that it prints."""


def blocks(page: str, text: str) -> list[Block]:
    """All fenced blocks of a page but the directives of the site."""
    found = [Block(page, language, body) for language, body in _FENCE.findall(text)]
    return [one for one in found if not one.language.startswith("{")]


def commands(block: Block) -> list[Command]:
    """The commands of a block: each line, or in a console each line behind a ``$``."""
    if block.language == "console":
        shown = re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]
        parts = [one.split("\n", 1) for one in shown]
        return [Command(block.page, _words(line), printed) for line, printed in parts]
    if block.language != "bash":
        return []
    lines = re.sub(r"\\\n\s*", " ", block.text).splitlines()
    return [Command(block.page, text) for text in map(_words, lines) if text]


def _words(line: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"(^|\s)#.*$", "", line)).strip()


def all_blocks() -> list[Block]:
    """All blocks of all pages."""
    return [one for path in PAGES for one in blocks(path.name, path.read_text())]


def all_commands() -> list[Command]:
    """All commands of all pages."""
    return [command for block in all_blocks() for command in commands(block)]


def split(text: str) -> tuple[dict[str, str], list[str]]:
    """A command's own environment, and its words."""
    words = shlex.split(text)
    first = next(i for i, word in enumerate(words) if not re.match(r"[A-Z_]+=", word))
    return dict(word.split("=", 1) for word in words[:first]), words[first:]
