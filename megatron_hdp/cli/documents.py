"""The raw documents of a corpus: files, folders in sorted order, and JSON lines."""

import fnmatch
import json
import os
from collections.abc import Iterator, Sequence

_JSON_LINES_SUFFIXES = (".jsonl", ".ndjson")


def find_files(inputs: Sequence[str], glob: str) -> list[str]:
    """Return the given files, and those of the given folders (sorted) whose name matches ``glob``.

    Raises:
        ValueError: a path does not exist, or nothing is found.
    """
    files: list[str] = []
    for path in inputs:
        if os.path.isdir(path):
            files += _walk(path, glob)
        elif os.path.isfile(path):
            files.append(path)
        else:
            raise ValueError(f"--input {path}: no such file or folder")
    if not files:
        raise ValueError(
            f"--input {' '.join(inputs)}: no file whose name matches --glob {glob!r} below it"
        )
    return files


def read_documents(path: str, json_key: str | None) -> Iterator[tuple[bytes, int]]:
    """Yield each document of a file as (raw bytes, bytes of the file it took).

    A ``.jsonl`` file, and any file once ``json_key`` is given, holds one JSON object a line whose
    value under the key (``text`` by default) is the document; any other file is one document.

    Raises:
        ValueError: a line is no JSON object with a string under the key; names file and line.
    """
    if json_key is not None or path.endswith(_JSON_LINES_SUFFIXES):
        yield from _read_json_lines(path, json_key or "text")
        return
    with open(path, "rb") as stream:
        raw = stream.read()
    yield raw, len(raw)


def _walk(folder: str, glob: str) -> Iterator[str]:
    for parent, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(fnmatch.filter(names, glob)):
            path = os.path.join(parent, name)
            if os.path.isfile(path):
                yield path


def _read_json_lines(path: str, key: str) -> Iterator[tuple[bytes, int]]:
    with open(path, "rb") as stream:
        for number, line in enumerate(stream, start=1):
            if line.isspace():
                continue
            try:
                record = json.loads(line)
            except ValueError as error:
                raise ValueError(
                    f"{path}, line {number}: expected one JSON object, found {_excerpt(line)} "
                    f"({error})"
                ) from error
            if not isinstance(record, dict) or not isinstance(record.get(key), str):
                raise ValueError(
                    f"{path}, line {number}: expected a JSON object with a string under {key!r}, "
                    f"found {_excerpt(line)}; name the key with --json-key"
                )
            yield record[key].encode("utf-8", errors="replace"), len(line)


def _excerpt(line: bytes) -> str:
    text = line.decode("utf-8", errors="replace").strip()
    return repr(text if len(text) <= 60 else text[:60] + "...")
