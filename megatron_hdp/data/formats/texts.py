"""Files of text: one document each; what begins like something else is refused by name."""

from collections.abc import Iterator

from megatron_hdp.data.formats.records import (
    BadRecord,
    Format,
    Origin,
    Piece,
    Record,
    text_record,
)

_HEAD_BYTES = 8192
_COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"BZh": "bzip2",
    b"\xfd7zXZ\x00": "xz",
    b"PK\x03\x04": "zip",
    b"\x04\x22\x4d\x18": "lz4",
}
_AS_LINES = {"gzip": ".jsonl.gz", "zstd": ".jsonl.zst"}


class Text(Format):
    """The whole file is one record, as it lies on disk."""

    name = "text"

    def read(self, piece: Piece, key: str | None) -> Iterator[Record | BadRecord]:
        """Yield the one record."""
        require_text(piece.path)
        with open(piece.path, "rb") as stream:
            raw = stream.read()
        yield text_record(raw, len(raw), Origin(piece.path, "line"), 0)


def require_text(path: str) -> None:
    """Refuse what begins like a compressed file or holds a zero byte, as no UTF-8 text does.

    Raises:
        ValueError: so it is.
    """
    with open(path, "rb") as stream:
        head = stream.read(_HEAD_BYTES)
    for magic, name in _COMPRESSED.items():
        if head.startswith(magic):
            lines = f" (JSON lines: or call it NAME{_AS_LINES[name]})" if name in _AS_LINES else ""
            raise ValueError(
                f"{path} is compressed ({name}), expected text: decompress it{lines}, or leave it "
                "out by a glob"
            )
    if b"\0" in head:
        raise ValueError(
            f"{path} is binary (byte {head.index(0)} is zero), expected UTF-8 text: convert it, or "
            "leave it out by a glob"
        )
