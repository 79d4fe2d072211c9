"""A rank ends with the process that launched it, and what it starts ends with the rank."""

import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock
from unittest.mock import DEFAULT

import psutil
import pytest

from megatron_hdp.megatron.lm import replacements
from megatron_hdp.processes.ports import free_port

ROOT = Path(__file__).parents[2]
COMMANDS = {
    "own": "-m megatron_hdp.pretrain_gpt --num-layers 1 --hidden-size 8 --num-attention-heads 1 "
    "--seq-length 8 --train-iters 1 --lr 1 --data-path nowhere --global-batch-size 1",
    "plugin": "-m megatron_hdp run script.py",
}
LAUNCHER = "import subprocess, sys; subprocess.run(sys.argv[1:])"
TORCH = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"  # an import takes long
TORCHRUN = {"TORCHELASTIC_RUN_ID": "none"}


def is_running(process):
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def runs_on(process, for_s):
    """Whether it still runs when so much time has passed."""
    deadline = time.monotonic() + for_s
    while is_running(process) and time.monotonic() < deadline:
        time.sleep(0.02)
    return is_running(process)


def outlives_its_launcher(folder, command, environment, for_s=10.0):
    """Whether the rank still runs `for_s` after its launcher was killed, while it imports torch."""
    (folder / "torch.py").write_text(TORCH)
    (folder / "script.py").touch()
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, sys.executable, *command],
        cwd=folder,
        env={"PYTHONPATH": f"{folder}:{ROOT}", "PATH": ""} | environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    rank = psutil.Process(int(launcher.stdout.readline()))
    try:
        assert rank.ppid() == launcher.pid
        launcher.kill()
        launcher.wait()
        return runs_on(rank, for_s)
    finally:
        launcher.stdout.close()
        if is_running(rank):
            rank.kill()


on_linux = pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux ends processes with their parent"
)


@on_linux
@pytest.mark.parametrize("command", COMMANDS)
def test_a_rank_ends_with_torchrun_while_it_imports(tmp_path, command):
    assert not outlives_its_launcher(tmp_path, COMMANDS[command].split(), TORCHRUN)


def test_what_a_user_starts_outlives_the_shell(tmp_path):
    environment = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    assert outlives_its_launcher(tmp_path, COMMANDS["own"].split(), environment, for_s=0.5)


ELSEWHERE = """
from megatron_hdp.processes import children, launcher
children._libc, launcher._CHECK_S = None, 0.05
launcher.end_with_launcher()
launcher.end_with_launcher()
import threading
assert [one.name for one in threading.enumerate()].count("launcher-watch") == 1
import torch
"""


def test_elsewhere_a_thread_looks(tmp_path):
    command = ["-c", ELSEWHERE]
    assert not outlives_its_launcher(tmp_path, command, TORCHRUN)


def started_after_torchrun(port, node="0"):
    """A rank whose torchrun listened at `port` of its first node."""
    program = """
from megatron_hdp.processes.launcher import end_with_launcher
end_with_launcher()
print("goes on")
"""
    environment = TORCHRUN | {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "RANK": "5",
        "GROUP_RANK": node,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    return subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": str(ROOT), "PATH": ""} | environment,
        capture_output=True,
        text=True,
    )


def test_torchrun_that_died_before_its_rank_ran():
    port = free_port()
    done = started_after_torchrun(port)
    assert (done.returncode, done.stdout) == (1, "")
    expected = "megatron_hdp: rank 5 ends: torchrun, which started it, is gone\n"
    assert done.stderr == expected
    assert started_after_torchrun(port, node="1").stdout == "goes on\n"  # it listens elsewhere
    with socket.create_server(("127.0.0.1", port)):
        assert started_after_torchrun(port).stdout == "goes on\n"


@on_linux
def test_the_parent_that_was_gone_already():
    program = (
        "import os; from megatron_hdp.processes.children import end_with_parent;"
        "end_with_parent(os.getppid() + 1); print('goes on')"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True)
    assert (done.returncode, done.stdout) == (1, b"")


@pytest.mark.parametrize("is_on", [True, False])
def test_a_patched_script_asks_when_its_flags_are_known(is_on):
    """Whoever started the script imported Megatron before the plugin had a word."""
    calls = []
    args = SimpleNamespace(hybrid_data_parallel=is_on)
    with (
        mock.patch.object(replacements.launcher, "end_with_launcher", lambda: calls.append(1)),
        mock.patch.multiple(replacements.options, check=DEFAULT, settle=DEFAULT),
        mock.patch.object(replacements.options, "check_derived"),
    ):
        assert replacements.validate(lambda args, defaults: args, args) is args
    assert calls == [1] * is_on


FORKS = """
import os, sys, time
from contextlib import nullcontext
from megatron_hdp.processes.children import bound_to_this_process

with bound_to_this_process() if sys.argv[1] == "bound" else nullcontext():
    if os.fork() == 0 and os.fork() == 0:
        print(os.getpid(), flush=True)
time.sleep(60)
"""

SPAWNS = """
import multiprocessing, sys, time
from contextlib import nullcontext
from megatron_hdp.processes.children import bound_to_this_process

code = "import os, time; os.fork() or print(os.getpid(), flush=True); time.sleep(60)"
with bound_to_this_process() if sys.argv[1] == "bound" else nullcontext():
    multiprocessing.get_context("spawn").Process(target=exec, args=(code,)).start()
time.sleep(60)
"""


@on_linux
@pytest.mark.parametrize("how, survives", [("bound", False), ("free", True)])
@pytest.mark.parametrize("program", [FORKS, SPAWNS], ids=["forked", "spawned"])
def test_a_grandchild(how, survives, program):
    command = [sys.executable, "-c", program, how]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    grandchild = psutil.Process(int(parent.stdout.readline()))
    child = grandchild.parent()
    try:
        parent.kill()
        parent.wait(10)
        assert runs_on(grandchild, 0.0 if survives else 10.0) == survives
    finally:
        for process in filter(is_running, (grandchild, child)):
            process.kill()
        parent.stdout.close()
