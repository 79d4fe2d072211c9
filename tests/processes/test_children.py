"""A forked or spawned process ends with its parent, and so does what it forks itself."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.processes.test_launcher import is_running, on_linux, runs_on

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
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", program, how]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root)
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
