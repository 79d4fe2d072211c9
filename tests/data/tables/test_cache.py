"""The file of a table is built once, found by content, and made again where it is damaged."""

import errno
import json
import os
import random
import re
import shutil
from contextlib import nullcontext
from unittest import mock

import numpy as np
import pytest

from megatron_hdp import files
from megatron_hdp.data import TokenFileError, mapped_file
from megatron_hdp.data.index_file import IndexFile
from megatron_hdp.data.tables import TableCacheError, cache, cache_file
from megatron_hdp.data.tables.cache import IndexIdentity, TableCache
from megatron_hdp.data.tables.cache_file import TableWriter
from tests.data.tables.pairs import everything, open_table, write_index, write_pair

DOCUMENTS = [[3], [5, 4], [], [8], [9], [1]]
MANY = 40_000  # documents: so many that samples of their .idx leave most of it out


class Corpus:
    """A pair in a folder, its folder of caches, and what was said when it was opened."""

    def __init__(self, folder):
        self.prefix, self.folder = folder / "data", folder / "caches"
        self.said = []
        self.write(DOCUMENTS)

    def write(self, documents):
        write_pair(self.prefix, documents)

    @property
    def index(self):
        return self.prefix.with_suffix(".idx")

    def open(self, **options):
        options = {"max_length": 9, "cache_folder": self.folder, "say": self.said.append} | options
        return everything(open_table(self.prefix, **options))

    def private(self):
        return self.open(cache_folder=None)

    @property
    def tables(self):
        return sorted(self.folder.glob("*.table"))


@pytest.fixture
def corpus(tmp_path):
    return Corpus(tmp_path)


@pytest.fixture
def unbuilt():
    """Fails where anything is built within."""
    return mock.patch.object(TableCache, "_build", side_effect=AssertionError("built"))


@pytest.fixture
def unread():
    """Fails where a whole .idx is compared within."""
    return mock.patch.object(IndexIdentity, "content", side_effect=AssertionError("compared"))


def test_a_second_opening_neither_builds_nor_compares(corpus, unbuilt, unread):
    first = corpus.open()
    with unbuilt, unread:
        assert corpus.open() == first
    assert len(corpus.tables) == 1 and corpus.said == []


def test_opening_is_noted(corpus):
    for _ in range(2):
        corpus.open()
        (path,) = corpus.tables
        assert path.stat().st_atime > 3000
        os.utime(path, (1000, path.stat().st_mtime))


def test_what_is_cut_otherwise_is_another_table(corpus):
    parts = [{"documents": range(1, 6)}, {"documents": range(1, 5)}]
    for cut in ({}, {"max_length": 10}, {"long_sequence": "split"}, *parts):
        corpus.open(**cut)
    assert len(corpus.tables) == 5


def test_rows_cannot_be_written(corpus):
    table = open_table(corpus.prefix, max_length=9, cache_folder=corpus.folder)
    with pytest.raises(ValueError, match="read-only"):
        table._length[0] = 1


def cut_to(size):
    return lambda raw: raw[:size]


def changed(place, new):
    return lambda raw: raw[:place] + new + raw[place + len(new) :]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (cut_to(0), "has 0 bytes, its first page"),
        (cut_to(100), "has 100 bytes"),
        (cut_to(4096), r"has 4,096 bytes, expected 1\d,\d\d\d"),
        (cut_to(-1), "bytes, expected"),
        (lambda raw: raw + b"\0", "bytes, expected"),
        (changed(0, b"X"), "begins with b'XDPTABLE'"),
        (changed(8, b"\1"), "version 1, expected 3"),
        (changed(12, b"\xff\xff\xff\xff"), "damaged description"),
        (changed(40, b"?"), "damaged description"),
        (changed(4096, bytes(40)), "other bytes than were written"),
        (changed(4096 + 8, b"\7"), "other bytes than were written"),
    ],
)
def test_a_damaged_file_is_made_again(corpus, damage, words):
    first = corpus.open()
    (path,) = corpus.tables
    whole = path.read_bytes()
    replace(path, damage(whole))
    assert corpus.open() == first == corpus.private()
    (line,) = corpus.said
    assert re.search(f"{re.escape(str(path))}.*{words}.*: it is made again", line)
    assert path.read_bytes() == whole


def test_no_flipped_byte_of_a_small_file_changes_the_table(corpus, seeds):
    """A file is compared whole up to 64 MiB; above, damage between samples is not seen."""
    first = corpus.open()
    (path,) = corpus.tables
    whole = path.read_bytes()
    for seed in seeds:
        draw = random.Random(seed)
        place = draw.choice([draw.randrange(1000), draw.randrange(len(whole))])
        replace(path, changed(place, bytes([whole[place] ^ 1 << draw.randrange(8)]))(whole))
        assert corpus.open() == first, seed
    assert len(corpus.said) > len(seeds) / 2


def replace(path, content):
    """Give a file that cannot be written other content."""
    path.unlink()
    path.write_bytes(content)


@pytest.mark.parametrize(
    "change",
    [
        lambda said: said.pop("facts"),
        lambda said: said["facts"].pop("corpus"),
        lambda said: said["facts"].update(colour=1),
        lambda said: said["facts"].update(num_sequences=4),
        lambda said: said["columns"].update(length="<f8"),
        lambda said: said["columns"].update(length=["<i8"]),
        lambda said: said["columns"].pop("begin"),
        lambda said: said.update(columns=None),
    ],
)
def test_a_description_of_another_kind_is_damage(corpus, change):
    first = corpus.open()
    (path,) = corpus.tables
    raw = path.read_bytes()
    *_, size, _ = mapped_file._HEAD.unpack_from(raw)
    begin = mapped_file._HEAD.size
    said = json.loads(raw[begin : begin + size])
    change(said)
    text = json.dumps(said).encode()
    digest = mapped_file.xxhash.xxh3_64_intdigest(text)
    head = mapped_file._HEAD.pack(cache_file._KIND.magic, cache_file.VERSION, len(text), digest)
    replace(path, (head + text).ljust(4096, b"\0") + raw[4096:])
    assert corpus.open() == first
    assert len(corpus.said) == 1 and "made again" in corpus.said[0]


def swap_unsampled(path):
    """Exchange two documents' lengths where no sample of the .idx lies; keep all sizes."""
    raw = np.fromfile(path, dtype=np.uint8)
    lengths, pointers = raw[34:][: 4 * MANY].view("<i4"), raw[34 + 4 * MANY :][: 8 * MANY]
    row = 3_000
    assert lengths[row] != lengths[row + 1]
    lengths[row], lengths[row + 1] = lengths[row + 1], lengths[row]
    pointers = pointers.view("<i8")
    pointers[row + 1] = pointers[row] + 2 * lengths[row]
    raw.tofile(path)


@pytest.mark.parametrize("is_time_kept", [True, False])
@pytest.mark.parametrize("is_sampled", [True, False])
def test_another_content_under_the_same_name(corpus, is_time_kept, is_sampled):
    lengths = [4, 5, 6] * (MANY // 3)
    lengths += [4] * (MANY - len(lengths))
    corpus.write([[length] for length in lengths])
    before, status, key = corpus.open(), os.stat(corpus.index), corpus.tables
    if is_sampled:
        lengths[0], lengths[-1] = lengths[-1] + 1, lengths[0] - 1
        corpus.write([[length] for length in lengths])
    else:
        swap_unsampled(corpus.index)
    os.utime(corpus.index, ns=(status.st_atime_ns, status.st_mtime_ns + (not is_time_kept)))
    assert os.stat(corpus.index).st_size == status.st_size
    after = corpus.open()
    assert (corpus.tables == key) == (not is_sampled)
    if is_time_kept and not is_sampled:
        assert after == before  # whoever keeps size, time and all samples is believed
        return
    assert after == corpus.private() != before
    assert corpus.said == (
        [] if is_sampled else [f"{key[0]} belongs to another content of the .idx: it is made again"]
    )


@pytest.mark.parametrize("is_time_kept", [True, False])
def test_a_moved_corpus_is_compared_once_and_not_built_again(
    corpus, tmp_path, unbuilt, unread, is_time_kept
):
    first, old = corpus.open(), corpus.prefix
    corpus.prefix = tmp_path / "elsewhere"
    for suffix in (".bin", ".idx"):
        shutil.copy2(old.with_suffix(suffix), corpus.prefix.with_suffix(suffix))
    if not is_time_kept:
        os.utime(corpus.index, ns=(1, 2))
    with unbuilt:
        with unread if is_time_kept else nullcontext():
            assert corpus.open() == first
        with unread:
            assert corpus.open() == first
            corpus.prefix = old
            assert corpus.open() == first


def test_times_of_another_content_are_not_believed(corpus, unread):
    corpus.open()
    os.utime(corpus.index, ns=(1, 2))
    corpus.open()
    (path,) = corpus.folder.glob("*.times")
    said = json.loads(path.read_bytes())
    assert said["mtime_ns"] == [2]
    others = [json.dumps(said | other) for other in ({"content": "0"}, {"mtime_ns": 2})]
    for content in (*others, "[]", "{"):
        path.write_text(content)
        with unread, pytest.raises(AssertionError, match="compared"):
            corpus.open()


def refuse(name, suffix, code):
    """Let one function of os fail for files with a suffix (any for ``None``)."""
    function = getattr(os, name)

    def refused(path, *args, **kwargs):
        if suffix is None or str(path).endswith(suffix):
            raise OSError(code, os.strerror(code))
        return function(path, *args, **kwargs)

    return mock.patch.object(os, name, refused)


def test_a_folder_that_was_filled_elsewhere_may_be_read_only(corpus, unbuilt):
    first = corpus.open()
    os.utime(corpus.index, ns=(1, 2))
    with refuse("open", ".lock", errno.EROFS), unbuilt:
        assert corpus.open() == first
        assert not list(corpus.folder.glob("*.times"))
    corpus.write([[3], [5, 4], [], [8], [1], [9]])
    with refuse("open", ".lock", errno.EROFS), pytest.raises(TableCacheError, match="Read-only"):
        corpus.open()


def test_a_folder_that_is_none_is_refused(corpus):
    corpus.folder.write_text("a file")
    for folder in (corpus.folder, corpus.folder / "below"):
        message = rf"--data-cache-path {folder}: found .*expected a folder.*name another"
        with pytest.raises(TableCacheError, match=message):
            corpus.open(cache_folder=folder)


@pytest.mark.parametrize(
    ("name", "suffix", "code", "message"),
    [
        ("pwrite", None, errno.ENOSPC, r"no room .*bytes are free.*, expected [\d,]+ bytes: make"),
        ("pwrite", None, errno.EDQUOT, "no room"),
        ("fsync", None, errno.EIO, "Input/output error"),
        ("replace", None, errno.EACCES, "Permission denied.*change its permissions"),
        ("open", ".table.tmpPID", errno.EACCES, "Permission denied"),
        ("open", ".lock", errno.EACCES, "Permission denied"),
    ],
)
def test_what_cannot_be_written_is_refused_by_name(corpus, name, suffix, code, message):
    suffix = suffix and suffix.replace("PID", str(os.getpid()))
    with refuse(name, suffix, code), pytest.raises(TableCacheError, match=message) as caught:
        corpus.open()
    assert f"--data-cache-path {corpus.folder}" in str(caught.value)
    assert not [path for path in corpus.folder.iterdir() if ".table" in path.name]
    assert corpus.open() == corpus.private()


def test_a_file_system_without_locks_is_refused(corpus):
    def unsupported(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    with (
        mock.patch("fcntl.flock", unsupported),
        pytest.raises(TableCacheError, match="no lock here"),
    ):
        corpus.open()


def test_an_index_that_changes_while_it_is_read_is_refused(corpus):
    put = TableWriter.put

    def touched(self, *args):
        os.utime(corpus.index, ns=(1, 2))
        put(self, *args)

    message = r"data\.idx changed while it was read"
    with (
        mock.patch.object(TableWriter, "put", touched),
        pytest.raises(TokenFileError, match=message),
    ):
        corpus.open()
    assert corpus.tables == []


@pytest.mark.parametrize("others", [[[3], [4]], [[3]] * 9])
def test_documents_that_change_between_two_readings_are_refused(corpus, tmp_path, others):
    read, other = IndexFile.documents, IndexFile(write_index(tmp_path / "other.idx", others))

    def documents(self, pieces=None):
        return read(self, pieces) if pieces else read(other)

    message = "gave 5 sequences of 30 tokens .*others when it was read again"
    with (
        mock.patch.object(IndexFile, "documents", documents),
        pytest.raises(TokenFileError, match=message),
    ):
        corpus.private()


def test_a_holder_without_progress_is_named(corpus, monkeypatch):
    monkeypatch.setattr(cache, "_PATIENCE_S", 0.2)
    monkeypatch.setattr(files, "SAY_AFTER_S", 0.0)
    corpus.open()
    (path,) = corpus.tables
    path.unlink()
    lines = []
    with files.locked(path.with_suffix(".lock"), "it", lines.append, patience_s=0.0) as note:
        note("40% written")
        holder = rf"process {os.getpid()} on \S+, 40% written"
        with pytest.raises(TableCacheError, match=f"locked by {holder}, without progress for 0 s"):
            corpus.open()
    (line,) = corpus.said
    assert re.search(rf"table of sequences of .*data\.idx: waiting for {holder}, which makes", line)
    assert corpus.open() == corpus.private()


def test_progress_of_a_long_build_is_told(corpus, monkeypatch):
    monkeypatch.setattr(cache, "_SAY_EVERY_S", 0.0)
    monkeypatch.setattr(cache, "_NOTE_EVERY_S", 0.0)
    corpus.open()
    shares = [line.removeprefix(f"table of sequences of {corpus.index}: ") for line in corpus.said]
    assert shares == ["100% summed", "100% checked", "100% written"]
    (path,) = corpus.folder.glob("*.lock")
    assert path.read_text().endswith(", 100% written")
