"""Which slow tests CI runs, in which order, and what it does when the time is over."""

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from tests.support.scripts import script_module

with script_module("dev/slow_tests.py") as slow_tests:
    pass
FOLDERS = {"tests", "tests/planner", "tests/megatron", "tests/megatron/lm", "tests/scripts"}


@pytest.mark.parametrize(
    ("path", "room"),
    [
        ("megatron_hdp/megatron/lm/run.py", "tests/megatron/lm"),
        ("megatron_hdp/megatron/model/moe.py", "tests/megatron"),
        ("csrc/planner/rings/rings.cpp", "tests/planner"),
        ("scripts/dev/slow_tests.py", "tests/scripts"),
        ("tests/planner/test_fuzz.py", "tests/planner"),
        ("docs/train.md", None),
        ("megatron_hdp/plugin.py", None),
    ],
)
def test_a_change_leads_to_the_tests_of_its_room(path, room):
    assert slow_tests.room_of(path, FOLDERS) == room


def test_files_that_never_ran_come_first_then_the_newest_rooms():
    files = [f"tests/{name}" for name in ("a/test_1.py", "a/test_2.py", "b/test_3.py", "c/x.py")]
    order = slow_tests.ordered(files, ["tests/b", "tests/a"], {"tests/a/test_1.py": 5.0})
    assert order == ["tests/b/test_3.py", "tests/a/test_2.py", "tests/a/test_1.py"]


@pytest.mark.parametrize("lanes", [1, 2])
def test_what_did_not_run_and_what_failed_is_named(lanes):
    codes = {"passes": 0, "has none": 5, "fails": 1, "too long": None, "rest": None}
    assert slow_tests.run_all([*codes], codes.get, lanes) == (["too long", "rest"], ["fails"])


def test_lanes_write_one_whole_record(tmp_path):
    path = tmp_path / "folder" / "record.json"
    record = slow_tests.Record(path)
    files = [f"tests/test_{number}.py" for number in range(200)]

    def note(file):
        record.note(file)
        assert file in json.loads(path.read_text())

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as lanes:
            list(lanes.map(note, files))
    finally:
        sys.setswitchinterval(before)
    assert slow_tests.Record(path).last_run.keys() == set(files)


def test_a_broken_record_costs_only_the_order(tmp_path, capsys):
    path = tmp_path / "record.json"
    path.write_text('{"tests/test_1.py": 1.0}}')
    record = slow_tests.Record(path)
    assert record.last_run == {} and f"{path}: expected JSON" in capsys.readouterr().out
    record.note("tests/test_2.py")
    assert list(json.loads(path.read_text())) == ["tests/test_2.py"]


LEAVES = """
import os, subprocess, sys, time
where = sys.argv[1]
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
if not os.fork():
    os.setsid()
    if not os.fork():
        open(where + "/" + str(os.getpid()), "w").close()
        time.sleep(600)
    os._exit(0)
open(where + "/" + str(child.pid), "w").close()
while len(os.listdir(where)) < 2:
    time.sleep(0.01)
print("left", flush=True)
time.sleep(float(sys.argv[2]))
"""


@pytest.mark.parametrize("ends", [True, False])
def test_a_run_leaves_no_process_in_any_session(tmp_path, ends):
    command = [sys.executable, "-S", "-c", LEAVES, str(tmp_path), "0" if ends else "600"]
    beside = psutil.Popen(["sleep", "600"])
    try:
        for patience_s in (60.0,) if ends else (0.5, 5.0, 50.0):  # until it had time to start them
            code, output = slow_tests.run_command(command, time.monotonic() + patience_s)
            assert code == (0 if ends else None) and beside.is_running()
            if output:
                break
        left = [int(one.name) for one in tmp_path.iterdir()]
        assert output == "left\n" and len(left) >= 2
        assert not [one for one in left if is_alive(one)]
    finally:
        beside.kill()
        beside.wait()


def is_alive(process):
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
