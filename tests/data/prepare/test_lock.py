"""Of several processes one prepares; the others wait for it, and not for ever."""

import fcntl
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_hdp.data.prepare import lock
from megatron_hdp.data.prepare.lock import only_one
from tests.data.prepare.corpora import documents, names, run, texts_of, write_lines

REPOSITORY = Path(__file__).parents[3]
PROGRAM = """
import sys
from tests.data.prepare.corpora import run
said = []
run(sys.argv[1], sys.argv[2], workers=1, said=said)
print(sum("prepares" in line for line in said))
"""


def test_processes_at_the_same_time_make_it_once(tmp_path):
    corpus = write_lines(tmp_path / "x.jsonl", texts_of(300))
    command = [sys.executable, "-c", PROGRAM, str(corpus), str(tmp_path / "cache")]
    processes = [
        subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    printed = [process.communicate(timeout=120)[0] for process in processes]
    assert sorted(map(int, printed)) == [0, 0, 1]
    assert len(documents(run(corpus, tmp_path / "cache").prefix)) == 300
    assert len(names(tmp_path / "cache")) == 4


def test_waiting_is_said_and_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "_LOOK_S", 0.01)
    monkeypatch.setattr(lock, "_SAY_AGAIN_S", 0.05)
    path, said = tmp_path / "x.lock", []
    with only_one(path, "source web", 1.0, said.append):
        assert said == []
        late = pytest.raises(TimeoutError, match="still being prepared by process .* after 0 s")
        with late, only_one(path, "source web", 0.2, said.append):
            pytest.fail("two hold it")
    assert len(said) >= 2
    assert said[0].startswith("source web is being prepared by process ")
    with only_one(path, "source web", 0.0, said.append):
        pass


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    def none(*arguments):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", none)
    refused = pytest.raises(OSError, match="no lock .Operation not supported.*: '.*x.lock'")
    with refused, only_one(tmp_path / "x.lock", "source web", 1.0, print):
        pytest.fail("it has no lock")
