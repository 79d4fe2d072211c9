"""Run the slow tests of the rooms that the latest commits touched, as many as fit into a time.

    python scripts/dev/slow_tests.py --minutes 20

Rooms come from ``git log``: a changed file of the package, the C++ parts, the scripts or the tests
leads to the folder of its tests. Files that never ran on this machine come first, then those that
ran longest ago; among equals the room of the newest commit. The runs are recorded in
``~/.cache/megatron-hdp/slow-tests.json``. The files that did not fit are printed.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Lock

import psutil

from megatron_hdp.files import write_atomically

REPOSITORY = Path(__file__).parents[2]
NO_TESTS = 5  # exit code of pytest
RECORD = Path.home() / ".cache/megatron-hdp/slow-tests.json"
_MARK = "MEGATRON_HDP_SLOW_TESTS"
_KILLED_S = 30.0
_CPP = {"csrc/planner": "tests/planner", "csrc/data": "tests/data", "csrc": "tests/planner"}


def room_of(path: str, folders: Iterable[str]) -> str | None:
    """Return the folder of tests for a changed file, the deepest that mirrors it; None for none."""
    place = path
    if path.startswith("megatron_hdp/"):
        place = path.replace("megatron_hdp", "tests", 1)
    elif path.startswith("scripts/"):
        place = f"tests/{path}"
    elif path.startswith("csrc/"):
        place = next(tests for source, tests in _CPP.items() if path.startswith(source))
    known = set(folders)
    parents = [place, *map(str, Path(place).parents)]
    return next((one for one in parents if one in known and one != "tests"), None)


def ordered(files: Iterable[str], rooms: Iterable[str], last_run: Mapping[str, float]) -> list[str]:
    """Return the files of these rooms (the newest commit's first): those unrun longest first."""
    newest_first = list(dict.fromkeys(rooms))
    chosen = {}
    for number, room in enumerate(newest_first):
        for file in files:
            if file.startswith(f"{room}/"):
                chosen.setdefault(file, number)
    return sorted(chosen, key=lambda file: (last_run.get(file, 0.0), chosen[file], file))


class Record:
    """When each file last ran, kept in a file; lanes write it one after the other.

    A file that cannot be read counts as empty, and is replaced: the order is the only loss.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = Lock()
        self.last_run: dict[str, float] = {}
        if path.exists():
            try:
                self.last_run = json.loads(path.read_text())
            except ValueError as error:
                print(f"{path}: expected JSON, found {error}: every file counts as never run")

    def note(self, file: str) -> None:
        """Write that a file runs now."""
        with self._lock:
            self.last_run[file] = time.time()
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._path, json.dumps(self.last_run).encode(), durable=False)


def _git(*arguments: str) -> list[str]:
    done = subprocess.run(
        ["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


def _slow_files() -> list[str]:
    """Files that hold a slow test, as pytest collects them."""
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-m", "slow"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"collecting the slow tests failed:\n{done.stdout[-3000:]}")
    ids = (line.split("::")[0] for line in done.stdout.splitlines() if "::" in line)
    return list(dict.fromkeys(ids))


def run_command(command: Sequence[str], deadline: float) -> tuple[int | None, str]:
    """Run a command; return its exit code, None at the deadline, and its output.

    What it leaves is killed, in whichever session: a rank has one of its own. The mark of the run
    is in the environment of all that it starts.
    """
    mark = uuid.uuid4().hex
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            stdout=output,
            stderr=output,
            env=os.environ | {_MARK: mark},
            start_new_session=True,
        )
        code = None
        try:
            code = process.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()  # first: it starts no more
        finally:
            _end_all(mark)
            process.wait()
        output.seek(0)
        return code, output.read()


def _end_all(mark: str) -> None:
    """Kill the processes that carry a mark, until there are none."""
    give_up_at = time.monotonic() + _KILLED_S
    while found := [one for one in psutil.process_iter() if _carries(one, mark)]:
        for one in found:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        if time.monotonic() > give_up_at:
            raise RuntimeError(f"found processes that outlive SIGKILL: {found}")
        time.sleep(0.05)


def _carries(process: psutil.Process, mark: str) -> bool:
    with suppress(psutil.NoSuchProcess, psutil.ZombieProcess, psutil.AccessDenied):
        return bool(process.environ().get(_MARK) == mark)
    return False


def _run(file: str, deadline: float) -> int | None:
    """Run the slow tests of one file; return pytest's exit code, or None at the deadline."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "slow", file]
    code, output = run_command(command, deadline)
    if code is not None:
        print(f"{file}\n{output}", flush=True)
    return code


def run_all(
    files: Sequence[str], run: Callable[[str], int | None], lanes: int
) -> tuple[list[str], list[str]]:
    """Run the files in order, so many at a time; return those left out and those that failed.

    `run` returns pytest's exit code, or None if the time was over.
    """
    with ThreadPoolExecutor(lanes) as pool:
        codes = dict(zip(files, pool.map(run, files), strict=True))
    left_out = [file for file, code in codes.items() if code is None]
    return left_out, [file for file, code in codes.items() if code not in (None, 0, NO_TESTS)]


def main() -> int:
    """Run them; the exit code is 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=20, help="time to spend (default: 20)")
    parser.add_argument("--commits", type=int, default=30, help="how many (default: 30)")
    parser.add_argument("--lanes", type=int, default=2, help="files at a time (default: 2)")
    arguments = parser.parse_args()
    deadline = time.monotonic() + 60 * arguments.minutes

    changed = _git("log", f"-{arguments.commits}", "--format=", "--name-only")
    files = _slow_files()
    folders = {str(parent) for file in files for parent in Path(file).parents}
    rooms = [room for path in changed if (room := room_of(path, folders))]
    record = Record(RECORD)
    chosen = ordered(files, rooms, record.last_run)
    print(f"{len(chosen)} files of {len(set(rooms))} rooms in {arguments.minutes:.0f} minutes")

    def run(file: str) -> int | None:
        # noted at the start: a file that never fits must not come first each time
        record.note(file)
        return _run(file, deadline) if time.monotonic() < deadline else None

    left_out, failed = run_all(chosen, run, arguments.lanes)
    print("left out for time: " + (" ".join(left_out) or "nothing"))
    print("failed: " + (" ".join(failed) or "nothing"))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
