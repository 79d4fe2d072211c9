"""The files of a source as they were when it was opened: while a run goes on they must stay."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from megatron_hdp.arrays import Int64Array
from megatron_hdp.data.formats import CompressedLines, Format, files_of, format_of, kind_of
from megatron_hdp.data.hashes import change_of, sampled_file
from megatron_hdp.data.prepare import text_key
from megatron_hdp.data.spec import SourceSpec

_MOST_SAMPLED = 256  # files
_NUM_SAMPLES = 512  # of all files together


class ChangedFileError(ValueError):
    """A file is not what it was when the run began."""


@dataclass(frozen=True)
class SourceFiles:
    """Files in the order of their records."""

    kind: str
    """``text`` or ``chat``."""
    key: str | None
    """Of the text; None: rows are conversations."""
    paths: Sequence[str]
    formats: Sequence[Format]
    sizes: Int64Array
    times: Int64Array
    """Of their last change, in nanoseconds."""

    @classmethod
    def of(cls, spec: SourceSpec) -> SourceFiles:
        """Find the files of a source.

        Raises:
            ValueError: there are none, or they cannot be tokenised on the fly.
        """
        kind = kind_of(spec)
        if kind == "tokens":
            raise ValueError(
                f"source '{spec.name}': found tokenise: on-the-fly for {spec.path}, which holds "
                "tokens, expected text or conversations: leave tokenise out"
            )
        key = text_key(spec, kind)
        paths = files_of(spec.path, spec.glob)
        formats = [format_of(path, key, lines=False) for path in paths]
        for path, one in zip(paths, formats, strict=True):
            if isinstance(one, CompressedLines):
                raise ValueError(
                    f"source '{spec.name}': found {path}, which is compressed ({one.name}), "
                    "expected files that can be read from any place, as it is tokenised on the "
                    "fly: uncompress it, or leave tokenise: on-the-fly out to prepare it"
                )
        states = [os.stat(path) for path in paths]
        sizes = np.array([one.st_size for one in states], dtype=np.int64)
        times = np.array([one.st_mtime_ns for one in states], dtype=np.int64)
        return cls(kind, key, paths, formats, sizes, times)

    def __len__(self) -> int:
        """Return the number of files."""
        return len(self.paths)

    def require_unchanged(self, number: int) -> None:
        """Refuse a file that is another one than when the source was opened.

        Raises:
            ChangedFileError: it is, or it is gone.
        """
        path, size = self.paths[number], int(self.sizes[number])
        try:
            found = os.stat(path)
        except FileNotFoundError:
            raise ChangedFileError(
                f"{path} is gone, expected the {size:,} bytes that were there when the run began: "
                "put it back and start again"
            ) from None
        if (found.st_size, found.st_mtime_ns) != (size, int(self.times[number])):
            raise ChangedFileError(
                f"{path} has changed while the run read it "
                f"({change_of(size, int(self.times[number]), found)}), expected a file that "
                "stays: put back what was there and start again; text that grows is a source of "
                "its own"
            )

    def outline(self) -> list[tuple[str, str, int]]:
        """Return name below the files' common folder, format and size of each."""
        folder = os.path.commonpath([os.path.dirname(path) or "." for path in self.paths])
        names = [os.path.relpath(path, folder) for path in self.paths]
        formats = [one.name for one in self.formats]
        return list(zip(names, formats, self.sizes.tolist(), strict=True))

    def samples(self) -> int:
        """Return 63 bits of samples of what stands in them: of all, or of some if they are many."""
        digest = xxhash.xxh3_64()
        count = min(len(self), _MOST_SAMPLED)
        for i in range(count):
            number = i * (len(self) - 1) // max(count - 1, 1)
            size, num_samples = int(self.sizes[number]), max(2, _NUM_SAMPLES // count)
            digest.update(sampled_file(self.paths[number], size, num_samples))
        return digest.intdigest() >> 1
