"""A folder of tables of sequences, one file each, built once a node and found by content."""

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import xxhash

from megatron_hdp.data.hashes import change_of, sampled_file
from megatron_hdp.data.index_checks import IndexChecks
from megatron_hdp.data.index_file import Documents, IndexFile, TokenFileError
from megatron_hdp.data.mapped_file import DamagedFileError
from megatron_hdp.data.sums import Sums
from megatron_hdp.data.tables.cache_file import (
    VERSION,
    CachedTable,
    TableCacheError,
    TableOrigin,
    TableWriter,
    read_table,
    unusable,
)
from megatron_hdp.data.tables.columns import column_types, fill
from megatron_hdp.data.tables.cutting import Cutting, Survey
from megatron_hdp.files import Say, locked, write_atomically

_NOTE_EVERY_S = 1.0
_SAY_EVERY_S = 10.0
_PATIENCE_S = 600.0  # with a process that builds, and notes no progress
_MOST_TIMES = 64  # remembered of one content
_NUM_SAMPLES = 48
_BLOCK_BYTES = 1 << 20  # stays in a core's cache between reading and summing


@dataclass(frozen=True)
class IndexIdentity:
    """Size and time of an ``.idx`` now, and its content when asked for."""

    path: Path
    num_bytes: int
    mtime_ns: int

    @classmethod
    def of(cls, path: str | os.PathLike[str]) -> "IndexIdentity":
        """Look at a file that exists."""
        status = os.stat(path)
        return cls(Path(path), status.st_size, status.st_mtime_ns)

    def key(self, cutting: Cutting, version: int) -> str:
        """Return a name for what a cutting makes of it in a version of the caches' format.

        It comes of the size and of samples of the content, so it takes no time.
        """
        parts = (
            version,
            self.num_bytes,
            cutting.max_length,
            cutting.long_sequence,
            cutting.documents.start,
            cutting.documents.stop,
        )
        digest = xxhash.xxh3_128(json.dumps(parts).encode())
        digest.update(sampled_file(self.path, self.num_bytes, _NUM_SAMPLES))
        return digest.hexdigest()

    def content(self, note: Callable[[int, int], None]) -> str:
        """Return the XXH3 of the whole file, which is read; bytes done and all are noted."""
        digest, block, num_read = xxhash.xxh3_128(), memoryview(bytearray(_BLOCK_BYTES)), 0
        with self.path.open("rb", buffering=0) as file:
            while count := file.readinto(block):
                digest.update(block[:count])
                num_read += count
                note(num_read, self.num_bytes)
        return digest.hexdigest()

    def require_unchanged(self) -> None:
        """Refuse a file that has changed since it was looked at.

        Raises:
            TokenFileError: it has.
        """
        now = IndexIdentity.of(self.path)
        if now != self:
            change = change_of(self.num_bytes, self.mtime_ns, os.stat(self.path))
            raise TokenFileError(
                f"{self.path} changed while it was read ({change}), expected a file that stays: "
                "wait until it is complete"
            )


class TableCache:
    """The file of one table: what a cutting makes of an ``.idx``."""

    def __init__(
        self,
        index: IndexFile,
        cutting: Cutting,
        folder: Path,
        say: Say,
        sums: Sums | None = None,
    ) -> None:
        """Name the file; see `open`. An ``.idx`` that is not as `sums` say is refused."""
        self._index = index
        self._cutting = cutting
        self._folder = folder
        self._say = say
        self._sums = sums
        self._identity = IndexIdentity.of(index.path)
        key = self._identity.key(cutting, VERSION)
        self._path = folder / f"sequences-{key}.table"
        self._times_path = self._path.with_suffix(".times")
        self._what = f"table of sequences of {index.path}"

    def open(self) -> CachedTable:
        """Map the table, which is built before by one process of those that want it.

        A file that is there is believed if the ``.idx`` has the time that it had when the file was
        made, or when it was last compared; else the whole ``.idx`` is compared with it.

        Raises:
            TableCacheError: the folder cannot be used, or the process that builds is stuck.
            TokenFileError: the ``.idx`` contradicts itself, changes, or is not what was written.
            ValueError: its documents make no table.
        """
        found = self._opened()
        self._require_as_written(found.origin.content)
        return found

    def _require_as_written(self, content: str) -> None:
        if self._sums is not None:
            self._sums.require_file(".idx", content)

    def _opened(self) -> CachedTable:
        found, _ = self._read()
        if found is not None and self._is_of_this_time(found):
            return found
        try:
            with self._locked() as note:
                return self._prove_or_build(_Progress(self._what, note, self._say))
        except TableCacheError:
            # a folder may be filled elsewhere and be read-only here
            if found is None or not self._is_same(found, _Progress(self._what)):
                raise
            return found

    @contextmanager
    def _locked(self) -> Iterator[Say]:
        """Hold the lock of the table; an error of the block itself is none of the lock."""
        lock, what = self._path.with_suffix(".lock"), self._what
        with ExitStack() as stack:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                note = stack.enter_context(locked(lock, what, self._say, patience_s=_PATIENCE_S))
            except TimeoutError as error:
                raise TableCacheError(f"--data-cache-path {self._folder}: {error}") from None
            except OSError as error:
                raise unusable(self._folder, error) from None
            yield note

    def _prove_or_build(self, progress: "_Progress") -> CachedTable:
        """Under the lock: another process may have been here first."""
        found, damage = self._read()
        if found is not None:
            if self._is_of_this_time(found):
                return found
            if self._is_same(found, progress):
                self._remember_time(found)
                return found
            damage = "belongs to another content of the .idx"
        if damage:
            self._say(f"{self._path} {damage}: it is made again")
        self._build(progress)
        return read_table(self._path)

    def _read(self) -> tuple[CachedTable | None, str]:
        """Return the table in the file, or none and what is wrong with the file."""
        try:
            return read_table(self._path), ""
        except FileNotFoundError:
            return None, ""
        except DamagedFileError as error:
            return None, str(error)
        except OSError as error:
            raise unusable(self._folder, error) from None

    def _is_of_this_time(self, found: CachedTable) -> bool:
        time_now = self._identity.mtime_ns
        return time_now == found.origin.mtime_ns or time_now in self._known_times(found)

    def _is_same(self, found: CachedTable, progress: "_Progress") -> bool:
        return self._identity.content(partial(progress.tell, "compared")) == found.origin.content

    def _known_times(self, found: CachedTable) -> list[int]:
        """Return times of an ``.idx`` that has been compared with the table."""
        try:
            said = json.loads(self._times_path.read_bytes())
        except (OSError, ValueError):  # none yet, or none to be relied on: it is compared again
            return []
        if not isinstance(said, dict) or said.get("content") != found.origin.content:
            return []
        times = said.get("mtime_ns")
        return times if isinstance(times, list) else []

    def _remember_time(self, found: CachedTable) -> None:
        times = [*self._known_times(found), self._identity.mtime_ns][-_MOST_TIMES:]
        text = json.dumps({"content": found.origin.content, "mtime_ns": times})
        with suppress(OSError):  # without it the next process compares again
            write_atomically(self._times_path, text.encode(), durable=False)

    def _build(self, progress: "_Progress") -> None:
        """Make the file, under the lock: it appears whole, or not at all."""
        index, identity = self._index, self._identity
        for left in self._folder.glob(f"{self._path.stem}.t*.*"):  # by a process that was killed
            left.unlink(missing_ok=True)
        content = identity.content(partial(progress.tell, "summed"))
        self._require_as_written(content)
        checks, all_of_them = IndexChecks(index), index.num_documents
        documents = progress.along("checked", checks.documents(), all_of_them)
        survey = Survey.of(self._cutting, documents)
        with TableWriter(self._path, survey.num_sequences, column_types(survey)) as writer:
            documents = progress.along("written", index.documents(), all_of_them)
            facts = fill(documents, survey, writer.put)
            identity.require_unchanged()
            origin = TableOrigin(
                index=str(identity.path),
                mtime_ns=identity.mtime_ns,
                content=content,
                token_type=index.dtype.str,
                token_bytes=checks.num_bytes,
            )
            writer.publish(facts, origin)


class _Progress:
    """Tells those who wait, and now and then the log, how far a table is."""

    def __init__(self, what: str, note: Say | None = None, say: Say | None = None) -> None:
        self._what = what
        self._note = note
        self._say = say
        self._noted = self._said = time.monotonic()

    def along(
        self, verb: str, documents: Iterable[Documents], num_documents: int
    ) -> Iterator[Documents]:
        """Hand on documents, and tell how many of all have come."""
        for piece in documents:
            yield piece
            self.tell(verb, piece.first + len(piece.lengths), num_documents)

    def tell(self, verb: str, done: int, total: int) -> None:
        """Say how many of how many have been compared, checked or written, if it is time."""
        now = time.monotonic()
        if self._note is not None and now - self._noted > _NOTE_EVERY_S:
            self._note(f"{done / total:.0%} {verb}")
            self._noted = now
        if self._say is not None and now - self._said > _SAY_EVERY_S:
            self._say(f"{self._what}: {done / total:.0%} {verb}")
            self._said = now
