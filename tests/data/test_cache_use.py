"""Who opens a cache in the moment in which it is pruned makes it again."""

import os

import pytest

from megatron_hdp.data import cache_use
from megatron_hdp.data.cache_use import alone, hold, note_opened
from megatron_hdp.data.prepare import prepared_files
from megatron_hdp.data.tables import cache_file, open_table
from tests.data.prepare.corpora import names, run, texts_of, write_lines
from tests.data.tables.pairs import everything, write_pair


@pytest.fixture
def path(tmp_path):
    found = tmp_path / "file"
    found.write_text("x")
    os.utime(found, (1000, 2000))
    return found


def test_what_is_held_is_not_alone(path):
    with path.open("rb") as file:
        with alone(path) as is_alone:
            assert is_alone
        assert hold(file.fileno())
        with alone(path) as is_alone:
            assert not is_alone
    with alone(path) as is_alone, alone(path) as another:
        assert is_alone and not another


def test_the_time_of_access_is_set_and_no_other(path):
    assert note_opened(path)
    assert path.stat().st_atime > 3000 and path.stat().st_mtime == 2000
    assert not note_opened(path.with_name("missing"))


def test_a_file_without_a_name(path):
    with path.open("rb") as file:
        path.unlink()
        assert not hold(file.fileno())


def test_a_file_that_is_read_only_is_locked_and_stays_so(path, monkeypatch):
    opened = os.open

    def by_its_owner(path, flags, *mode):  # who runs the tests may be allowed everything
        if flags & os.O_RDWR and not os.stat(path).st_mode & 0o200:
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, flags, *mode)

    path.chmod(0o444)
    monkeypatch.setattr(cache_use.os, "open", by_its_owner)
    with alone(path) as is_alone:
        assert is_alone
    assert path.stat().st_mode & 0o777 == 0o444


def test_a_file_system_without_locks(path, monkeypatch):
    def none(*arguments):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(cache_use.fcntl, "flock", none)
    assert note_opened(path)
    with pytest.raises(OSError, match=r"Operation not supported: '.*file'"), alone(path):
        pytest.fail("it has no lock")


def test_a_table_that_is_pruned_while_it_is_opened(tmp_path, monkeypatch):
    pair, folder = write_pair(tmp_path / "data", [[3], [5]]), tmp_path / "caches"
    expected = everything(open_table(pair, max_length=9, cache_folder=folder))
    (path,) = folder.glob("*.table")
    pruned = []

    def too_late(file):
        if not pruned:
            pruned.append(path.unlink())
        return hold(file)

    monkeypatch.setattr(cache_file, "hold", too_late)
    assert everything(open_table(pair, max_length=9, cache_folder=folder)) == expected
    assert pruned and path.exists()


def test_a_source_that_is_pruned_while_it_is_opened(tmp_path, monkeypatch):
    corpus, folder = write_lines(tmp_path / "x.jsonl", texts_of(9)), tmp_path / "caches"
    first = run(corpus, folder)
    pruned = []

    def too_late(path):
        if not pruned:
            pruned.extend(one.unlink() for one in folder.iterdir() if one.suffix != ".lock")
        return note_opened(path)

    before = names(folder)
    monkeypatch.setattr(prepared_files, "note_opened", too_late)
    assert run(corpus, folder) == first
    assert pruned and names(folder) == before
