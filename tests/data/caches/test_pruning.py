"""Caches that nobody opens go; what is used, made or somebody else's stays."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_hdp.data import cache_use
from megatron_hdp.data.caches import Fate, prune
from megatron_hdp.data.mixture import Opening, open_corpus, read_data_file
from megatron_hdp.data.tables import open_table
from megatron_hdp.files import locked
from tests.data.prepare.corpora import run, texts_of, write_lines
from tests.data.tables.pairs import everything, write_pair

ROOT = Path(__file__).parents[3]
DAY_S = 86_400
PRUNER = """
import sys
from pathlib import Path
from megatron_hdp.data.caches import prune
print("ready", flush=True)
while True:
    for one in prune(Path(sys.argv[1]), older_than_s=0):
        print(one.fate, flush=True)
"""


class Caches:
    """A folder with a table and a prepared source."""

    def __init__(self, folder):
        self.folder = folder / "caches"
        self.pair = write_pair(folder / "data", [[3], [5, 4], [9]])
        self.text = write_lines(folder / "x.jsonl", texts_of(9))

    def open_table(self):
        return open_table(self.pair, max_length=9, cache_folder=self.folder, say=lambda line: None)

    def prepare(self):
        return run(self.text, self.folder)

    def age(self, days=31.0):
        """As if nobody had been here for so long."""
        then = time.time() - days * DAY_S
        for path in self.folder.rglob("*"):
            os.utime(path, (then, then))

    def prune(self, days=30, **options):
        return list(prune(self.folder, older_than_s=days * DAY_S, **options))

    def fates(self, **options):
        return [one.fate for one in self.prune(**options)]

    @property
    def names(self):
        return sorted(path.suffix for path in self.folder.iterdir())


@pytest.fixture
def caches(tmp_path):
    found = Caches(tmp_path)
    found.open_table()
    found.prepare()
    return found


def snapshot(folder):
    return {path: (path.stat().st_mtime_ns, path.stat().st_atime_ns) for path in folder.rglob("*")}


def test_what_nobody_opens_is_removed(caches):
    caches.age()
    sizes = [path.stat().st_size for path in caches.folder.iterdir()]
    found = caches.prune()
    assert [one.fate for one in found] == [Fate.REMOVED, Fate.REMOVED]
    assert sum(one.num_bytes for one in found) == sum(sizes)
    assert [round(one.idle_s / DAY_S) for one in found] == [31, 31]
    assert caches.names == []
    assert caches.prune() == []
    assert len(caches.open_table()) == 3 and caches.prepare().documents == 9


def test_what_was_opened_stays(caches):
    caches.age(29)
    assert caches.fates() == [Fate.RECENT, Fate.RECENT]
    assert caches.fates(days=28) == [Fate.REMOVED, Fate.REMOVED]


def test_opening_is_noted_and_changes_no_file(caches):
    caches.age()
    before = snapshot(caches.folder)
    caches.open_table()
    caches.prepare()
    assert caches.fates() == [Fate.RECENT, Fate.RECENT]
    times = {path: changed for path, (changed, _) in snapshot(caches.folder).items()}
    assert times == {path: changed for path, (changed, _) in before.items()}


def test_looking_for_a_source_is_not_opening_it(caches, tmp_path):
    """Manifests are read to see what files held; those of older contents are read as well."""
    caches.age()
    write_lines(tmp_path / "x.jsonl", texts_of(5, seed=1))
    caches.prepare()
    assert sorted(caches.fates()) == sorted([Fate.REMOVED, Fate.REMOVED, Fate.RECENT])


def test_a_dry_run_changes_nothing(caches):
    caches.age()
    before = snapshot(caches.folder)
    expected = caches.prune(dry_run=True)
    assert snapshot(caches.folder) == before
    found = caches.prune()
    assert [(one.name, one.num_bytes, one.fate) for one in found] == [
        (one.name, one.num_bytes, one.fate) for one in expected
    ]


def test_a_table_is_in_use_until_it_is_let_go_of(caches):
    table = caches.open_table()
    caches.age()
    assert caches.fates() == [Fate.IN_USE, Fate.REMOVED]
    assert everything(table)[1][3] == [3, 9, 9]
    del table
    assert caches.fates() == [Fate.REMOVED]


def test_a_source_is_in_use_while_a_run_reads_it(caches, tmp_path):
    data = tmp_path / "data.yaml"
    data.write_text("sources:\n  web: {path: x.jsonl}\n")
    opening = Opening(
        max_length=512,
        long_sequence="error",
        tokenizer="byte",
        cache_folder=caches.folder,
        say=lambda line: None,
    )
    corpus = open_corpus(read_data_file(data).training, opening)
    caches.age()
    assert sorted(caches.fates()) == sorted([Fate.REMOVED, Fate.IN_USE, Fate.IN_USE])
    del corpus
    assert caches.fates() == [Fate.REMOVED, Fate.REMOVED]


@pytest.mark.parametrize("options", [{}, {"dry_run": True}])
def test_what_is_being_made_is_not_touched(caches, options):
    caches.age()
    table, source = (next(caches.folder.glob(f"{name}*.lock")) for name in ("sequences", "web"))
    before = caches.names
    with (
        locked(table, "table", print, patience_s=1.0),
        locked(source, "source", print, patience_s=1.0),
    ):
        assert caches.fates(**options) == [Fate.BEING_MADE, Fate.BEING_MADE]
    assert caches.names == before
    assert caches.fates(**options) == [Fate.REMOVED, Fate.REMOVED]


def test_what_was_interrupted_is_removed(caches):
    """Half-made sources, files of killed processes, and what a killed pruner leaves."""
    caches.age()
    caches.prune()
    folder, key = caches.folder, "0123456789abcdef"
    (folder / f"half-{key}.work").mkdir()
    for name in (
        *(f"half-{key}.work/000000.bin", f"half-{key}.lock", f"half-{key}.tmp77.bin"),
        *(f"left-{key}.bin", f"left-{key}.lock", f"lock-{key}.lock"),
        *(f"sequences-{2 * key}.table.tmp77", f"sequences-{2 * key}.lock"),
    ):
        (folder / name).write_bytes(b"x")
    assert caches.fates() == [Fate.RECENT] * 4
    caches.age()
    assert [one.num_bytes for one in caches.prune()] == [2, 3, 2, 1]
    assert caches.names == []


def test_other_files_stay(caches):
    caches.age()
    key = "0123456789abcdef"
    (caches.folder / "below").mkdir()
    others = [
        *("notes.txt", f"{2 * key}-GPTDataset-train-document_index.npy", "corpus.bin"),
        *(f"mine-{key}.bin", f"mine-{key}.idx", f"mine-{key}.json", f"sequences-{key}.table"),
        f"below/sequences-{2 * key}.table",
    ]
    for name in others:
        (caches.folder / name).write_text(json.dumps({"counts": []}))
    caches.age()
    assert caches.fates() == [Fate.REMOVED, Fate.REMOVED]
    assert {str(path.relative_to(caches.folder)) for path in caches.folder.rglob("*.*")} == {
        *others
    }


def test_a_copy_without_its_lock_is_one_too(caches):
    for lock in caches.folder.glob("*.lock"):
        lock.unlink()
    caches.age()
    assert caches.fates(dry_run=True) == [Fate.REMOVED, Fate.REMOVED]
    assert ".lock" not in caches.names
    assert caches.fates() == [Fate.REMOVED, Fate.REMOVED]
    assert caches.names == []


def test_another_users_cache_is_refused(caches, monkeypatch):
    def not_ours(path, mode):
        raise PermissionError(1, "Operation not permitted", str(path))

    opened = os.open

    def read_only(path, flags, *mode):
        if flags & os.O_RDWR and str(path).endswith(".table"):
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, flags, *mode)

    caches.age()
    monkeypatch.setattr(cache_use.os, "open", read_only)
    monkeypatch.setattr(Path, "chmod", not_ours)
    refused, removed = caches.prune()
    assert (refused.fate, refused.reason) == (Fate.REFUSED, "Operation not permitted")
    assert removed.fate == Fate.REMOVED
    assert caches.names == [".lock", ".table"]


def test_a_folder_that_is_missing(tmp_path):
    with pytest.raises(ValueError, match="nowhere: found no folder, expected one of caches"):
        list(prune(tmp_path / "nowhere", older_than_s=1))


def test_pruning_beside_a_process_that_opens(caches):
    """A pruner that waits for nothing; every table that is opened meanwhile is whole."""
    expected = everything(caches.open_table())
    command = [sys.executable, "-c", PRUNER, str(caches.folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as pruner:
        try:
            assert pruner.stdout.readline() == "ready\n"
            for _ in range(200):
                assert everything(caches.open_table()) == expected
                assert caches.prepare().documents == 9
        finally:
            pruner.kill()
        fates = pruner.stdout.read().split("\n")
    assert fates.count("removed") > 10
