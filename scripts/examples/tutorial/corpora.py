"""Three small corpora for the tutorial of the data, made of the Python standard library.

``python scripts/examples/tutorial/corpora.py FOLDER`` writes ``code.jsonl`` (modules),
``prose.jsonl`` (documentation of modules, classes and functions, one text each) and ``chat.jsonl``
(conversations: what is this, and the first line of its documentation).
"""

import ast
import json
import sys
import sysconfig
import tokenize
import warnings
from collections.abc import Iterator
from pathlib import Path

_MODULES = 160  # of the library, in sorted order
_MOST_CHARACTERS = 12_000  # of a module


def modules(root: Path) -> Iterator[tuple[str, str]]:
    """Yield name and source of modules at the top of the library.

    Raises:
        ValueError: there is none.
    """
    paths = sorted(root.glob("*.py"))[:_MODULES]
    if not paths:
        raise ValueError(
            f"{root} has no .py file, expected the sources of Python's standard library: use a "
            "Python that has them (PYTHON=/path/to/python)"
        )
    for path in paths:
        with tokenize.open(path) as stream:  # in the encoding that the file declares
            yield path.stem, stream.read()


def documented(name: str, source: str) -> Iterator[tuple[str, str]]:
    """Yield what is documented in a module: its dotted name and its documentation."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some sources hold invalid escapes
        tree = ast.parse(source)
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in [tree, *(one for one in ast.walk(tree) if isinstance(one, kinds))]:
        text = ast.get_docstring(node)
        if text:
            yield f"{name}.{node.name}" if isinstance(node, kinds) else name, text


def main(folder: Path) -> None:
    """Writes the three files."""
    folder.mkdir(parents=True, exist_ok=True)
    code, prose, chat = [], [], []
    for name, source in modules(Path(sysconfig.get_path("stdlib"))):
        code.append({"text": source[:_MOST_CHARACTERS]})
        for thing, text in documented(name, source):
            prose.append({"text": f"{thing}\n\n{text}\n"})
            question = {"role": "user", "content": f"What is {thing}?"}
            answer = {"role": "assistant", "content": text.splitlines()[0]}
            chat.append({"messages": [question, answer]})
    for kind, rows in (("code", code), ("prose", prose), ("chat", chat)):
        path = folder / f"{kind}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(f"{path}: {len(rows):,} rows")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
