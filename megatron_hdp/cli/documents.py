"""The raw documents of a corpus: files, folders in sorted order, and JSON lines."""

import fnmatch
import json
import os
from collections.abc import Iterator, Sequence

_JSON_LINES_SUFFIXES = (".jsonl", ".ndjson")
_HEAD_BYTES = 8192
_COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"BZh": "bzip2",
    b"\xfd7zXZ\x00": "xz",
    b"PK\x03\x04": "zip",
    b"\x04\x22\x4d\x18": "lz4",
}


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
        ValueError: the file is compressed or binary, or a line is no JSON object with a string
            under the key; names file and line.
    """
    _require_text(path)
    if json_key is not None or path.endswith(_JSON_LINES_SUFFIXES):
        yield from _read_json_lines(path, json_key or "text")
        return
    with open(path, "rb") as stream:
        raw = stream.read()
    yield raw, len(raw)


def _require_text(path: str) -> None:
    """Refuse what begins like a compressed file or holds a zero byte, as no UTF-8 text does."""
    with open(path, "rb") as stream:
        head = stream.read(_HEAD_BYTES)
    for magic, name in _COMPRESSED.items():
        if head.startswith(magic):
            raise ValueError(
                f"{path} is compressed ({name}), expected text: decompress it, or leave it out "
                "with --glob"
            )
    if b"\0" in head:
        raise ValueError(
            f"{path} is binary (byte {head.index(0)} is zero), expected UTF-8 text: convert it, or "
            "leave it out with --glob"
        )


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
            except (ValueError, RecursionError) as error:
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
