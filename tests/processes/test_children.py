"""A forked or spawned process ends with its parent, and so does what it forks itself."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

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


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends processes with their parent")
@pytest.mark.parametrize("how, survives", [("bound", False), ("free", True)])
@pytest.mark.parametrize("program", [FORKS, SPAWNS], ids=["forked", "spawned"])
def test_a_grandchild(how, survives, program):
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", program, how]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root)
    grandchild = psutil.Process(int(parent.stdout.readline()))
    child = grandchild.parent()
    try:
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait(10)
        deadline = time.monotonic() + 10
        while not survives and grandchild.is_running() and time.monotonic() < deadline:
            if grandchild.status() == psutil.STATUS_ZOMBIE:
                break
            time.sleep(0.02)
        alive = grandchild.is_running() and grandchild.status() != psutil.STATUS_ZOMBIE
        assert alive == survives
    finally:
        for process in (grandchild, child):
            if process.is_running():
                process.kill()
        parent.stdout.close()
