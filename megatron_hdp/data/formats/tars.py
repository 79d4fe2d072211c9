"""Tars of WebDataset: members of one name before its first dot are a row, media by their place.

A row is the object of its ``.json``, or the text of its ``.txt``, with its pictures under
``images``, its sounds under ``audios`` and its videos under ``videos``, in the order in which they
lie in the file.
"""

import os
import tarfile
from collections.abc import Iterator
from itertools import groupby
from typing import Any, BinaryIO

import orjson

from megatron_hdp.data.formats.records import BadRecord, Format, Origin, Piece, Record

_PICTURES = ("jpg", "jpeg", "png", "webp", "gif", "tif", "tiff", "avif", "bmp", "img")
_SOUNDS = ("wav", "flac", "ogg", "opus", "mp3")
_VIDEOS = ("mp4", "m4v", "mov", "mkv", "webm", "avi")
_KINDS = (
    {one: "image" for one in _PICTURES}
    | {one: "audio" for one in _SOUNDS}
    | {one: "video" for one in _VIDEOS}
)
_BLOCK = 512


class Tar(Format):
    """A plain tar, read from its beginning."""

    name = "tar"
    suffixes = (".tar",)

    def read(self, piece: Piece, key: str | None) -> Iterator[Record | BadRecord]:
        """Yield the rows; their pictures, sounds and videos are not read."""
        origin = Origin(piece.path, "row")
        try:
            with tarfile.open(piece.path, "r:") as tar, open(piece.path, "rb") as stream:
                members = (one for one in tar if one.isfile())
                for number, (_, some) in enumerate(groupby(members, _row_name), start=1):
                    yield _row(list(some), stream, origin, number)
        except tarfile.TarError as error:
            raise ValueError(
                f"{piece.path} cannot be read as a tar ({error}), expected a whole one that is "
                "not compressed: copy it again, or unpack it"
            ) from error


def _row_name(member: tarfile.TarInfo) -> str:
    folder, name = os.path.split(member.name)
    return f"{folder}/{name.partition('.')[0]}"


def _row(
    members: list[tarfile.TarInfo], stream: BinaryIO, origin: Origin, number: int
) -> Record | BadRecord:
    row: dict[str, Any] = {}
    media: dict[str, list[dict[str, Any]]] = {"image": [], "audio": [], "video": []}
    num_bytes = sum(_BLOCK * (1 + -(-one.size // _BLOCK)) for one in members)
    for one in members:
        kind = one.name.rpartition(".")[2].lower()
        if kind in _KINDS:
            place = {"path": one.name, "offset": one.offset_data, "size": one.size}
            media[_KINDS[kind]].append(place)
        elif kind in ("json", "txt"):
            stream.seek(one.offset_data)
            raw = stream.read(one.size)
            try:
                found = orjson.loads(raw) if kind == "json" else {"txt": raw.decode()}
            except ValueError as error:
                message = f"{origin.where(number)}: {one.name} is no {kind} ({error})"
                return BadRecord(message, num_bytes)
            row |= found if isinstance(found, dict) else {"messages": found}
    for name, places in media.items():
        if places:  # what a name in the object stands for
            row.pop(name, None)
            row[f"{name}s"] = places
    return Record(row, num_bytes, origin, number)
