"""``megatron-hdp data prune``: says what it frees."""

import os
import time

import pytest

from megatron_hdp.cli.main import main
from megatron_hdp.data.caches import pruning
from tests.data.prepare.corpora import run as prepare
from tests.data.prepare.corpora import texts_of, write_lines

DAY_S = 86_400


@pytest.fixture
def folder(tmp_path):
    """Two sources, one of which nobody has opened for 40 days."""
    for name, days in (("old", 40), ("new", 0)):
        found = prepare(write_lines(tmp_path / f"{name}.jsonl", texts_of(3)), tmp_path, name=name)
        then = time.time() - days * DAY_S
        for path in tmp_path.glob(f"{name}-*"):
            os.utime(path, (then, then))
        assert found.documents == 3
    return tmp_path


def run(*arguments):
    return main(["data", "prune", *map(str, arguments)])


def size(folder, pattern):
    return sum(path.stat().st_size for path in folder.glob(pattern))


def test_it_says_what_it_frees(folder, capsys):
    old, new = size(folder, "old-*"), size(folder, "new-*")
    assert run(folder, "--dry-run") == 0
    header, first, second, last = capsys.readouterr().out.splitlines()
    assert header.split() == ["cache", "bytes", "days", "idle"]
    assert first.split()[0].startswith("new-") and first.endswith("0.0  kept: opened recently")
    assert second.split()[1:] == [f"{old:,}", "40.0", "would", "be", "removed"]
    assert last == f"would free {old:,} bytes of 1 cache; kept {new:,} bytes of 1 cache"
    assert size(folder, "old-*") == old
    assert run(folder) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].endswith("40.0  removed")
    assert lines[-1] == f"freed {old:,} bytes of 1 cache; kept {new:,} bytes of 1 cache"
    assert not list(folder.glob("old-*")) and list(folder.glob("new-*"))


def test_days(folder, capsys):
    assert run(folder, "--older-than", 41) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("freed 0 bytes of 0 caches; kept ")
    with pytest.raises(SystemExit):
        run(folder, "--older-than", 0)
    assert "--older-than" in capsys.readouterr().err


def test_an_empty_folder(tmp_path, capsys):
    assert run(tmp_path) == 0
    assert capsys.readouterr().out == "freed 0 bytes of 0 caches; kept 0 bytes of 0 caches\n"


def test_no_folder(tmp_path, capsys):
    assert run(tmp_path / "none") == 2
    assert "data prune: error: " in capsys.readouterr().err


def test_a_cache_that_cannot_be_removed_is_a_mistake(folder, capsys, monkeypatch):
    def refused(cache, *more):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(pruning, "_removed", refused)
    assert run(folder) == 2
    printed = capsys.readouterr()
    assert "kept: Permission denied" in printed.out
    assert "1 caches could not be removed, the first: old-" in printed.err
