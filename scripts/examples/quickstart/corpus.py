"""A corpus with a long tail: Python's standard library as functions, classes and whole files.

``python scripts/examples/quickstart/corpus.py CORPUS.jsonl`` writes one document a line. Of forty
files in sorted order one stays whole, four become their classes and functions, and the rest become
single functions and methods. No text comes twice, and one version of Python gives one corpus.
"""

import ast
import json
import sys
import sysconfig
import tokenize
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def source_files(root: Path) -> list[Path]:
    """Return the library's own files in sorted order, without tests and installed packages.

    Raises:
        ValueError: there is none.
    """
    paths = [p for p in root.rglob("*.py") if not _SKIPPED & set(p.relative_to(root).parts)]
    if not paths:
        raise ValueError(
            f"{root} has no .py file, expected the sources of Python's standard library: use a "
            "Python that has them (PYTHON=/path/to/python)"
        )
    return sorted(paths)


def documents(paths: Sequence[Path]) -> Iterator[str]:
    """Yield the corpus of these files: whole files, classes and functions by their place."""
    for place, path in enumerate(paths):
        with tokenize.open(path) as stream:  # in the encoding that the file declares
            source = stream.read()
        if place % 40 == 0:
            yield source
            continue
        lines = source.split("\n")
        for node in _definitions(ast.parse(source, str(path)).body, whole_classes=place % 40 <= 4):
            first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
            yield "\n".join([*lines[first - 1 : node.end_lineno], ""])


def _definitions(
    body: Sequence[ast.stmt], whole_classes: bool
) -> Iterator[_Function | ast.ClassDef]:
    """Yield functions, and classes or, instead of them, their methods."""
    for node in body:
        if isinstance(node, _Function) or (whole_classes and isinstance(node, ast.ClassDef)):
            yield node
        elif isinstance(node, ast.ClassDef):
            yield from _definitions(node.body, whole_classes)


def main(output: str) -> None:
    """Write the corpus."""
    paths = source_files(Path(sysconfig.get_path("stdlib")))
    with warnings.catch_warnings(), open(output, "w", encoding="utf-8") as stream:
        warnings.simplefilter("ignore")  # of the library's own escape sequences
        for text in documents(paths):
            stream.write(json.dumps({"text": text}) + "\n")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: corpus.py CORPUS.jsonl")
    try:
        main(sys.argv[1])
    except (OSError, SyntaxError, ValueError) as error:
        sys.exit(f"error: {error}")
