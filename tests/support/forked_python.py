"""A program that a script takes for Python; what it runs is forked after its imports.

Each of a script's commands would import torch and Megatron anew, which is most of what a short run
computes. Its modules and scripts run in processes forked from the server of `ranks`; everything
else (``-c``, standard input) goes to the Python of the tests, and pip, which writes into scripts
which Python they belong to.
"""

import atexit
import gc
import os
import pickle
import runpy
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from tests.support.ranks import _context, _server_environment

_CLIENT = """#!{python} -IS
import os, pickle, signal, socket, sys
words = [word for word in sys.argv[1:] if word != "-u"]
if words[:2] == ["-m", "pip"] or words[0] != "-m" and not words[0].endswith(".py"):
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
with socket.socket(socket.AF_UNIX) as server:
    server.connect({path!r})
    asked = pickle.dumps((words, os.getcwd(), dict(os.environ)))
    socket.send_fds(server, [len(asked).to_bytes(8, "big")], [0, 1, 2])
    server.sendall(asked)
    answer = server.recv(64)
code = int(answer or 1)
if code < 0:
    signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


@contextmanager
def forked_python(folder: Path) -> Iterator[Path]:
    """A program for ``PYTHON``; what it has started ends with the block.

    Args:
        folder: an empty one, for the program and its socket.
    """
    program, path = folder / "python", folder / "socket"
    program.write_text(_CLIENT.format(python=sys.executable, path=str(path)))
    program.chmod(0o700)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen(64)
        with _server_environment():
            server = _context.Process(target=_serve, args=(listening, str(program)))
            server.start()
    try:
        yield program
    finally:
        server.terminate()
        server.join(10)
        server.kill()
        server.join()


def _serve(listening: socket.socket, program: str) -> None:
    """Forks a process for each that connects, until it is terminated."""
    gc.freeze()  # as `ranks` does
    asking: dict[int, socket.socket] = {}  # by the process that runs what was asked
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        while True:
            ready, _, _ = select.select([listening, *asking.values()], [], [], 0.02)
            for pid, client in asking.items():
                if client in ready and _has_ended(client):
                    os.kill(pid, signal.SIGKILL)
            if listening in ready:
                client, _ = listening.accept()
                if (pid := os.fork()) == 0:
                    listening.close()
                    _run(client, program)
                asking[pid] = client
            for pid in list(asking):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    with suppress(OSError), asking.pop(pid) as client:
                        client.sendall(str(os.waitstatus_to_exitcode(status)).encode())
    finally:
        for pid in asking:
            os.kill(pid, signal.SIGKILL)


def _has_ended(client: socket.socket) -> bool:
    """True once it was killed; what it asks may still wait to be read."""
    with suppress(BlockingIOError):
        return not client.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    return False


def _run(client: socket.socket, program: str) -> NoReturn:
    code = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        size, descriptors, _, _ = socket.recv_fds(client, 8, 3)
        with client.makefile("rb") as stream:
            words, folder, environment = pickle.loads(stream.read(int.from_bytes(size, "big")))
        client.close()
        _become(descriptors, folder, environment, program)
        code = _called(words)
    except BaseException:
        traceback.print_exc()
    with suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def _become(descriptors: list[int], folder: str, environment: dict[str, str], program: str) -> None:
    """The process is as if its client had started it."""
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.executable = program


def _called(words: list[str]) -> int:
    """Runs a module or a script; returns its exit code."""
    try:
        if words[0] == "-m":
            sys.argv = words[1:]
            sys.path.insert(0, os.getcwd())
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = words
            sys.path.insert(0, str(Path(words[0]).resolve().parent))
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as leaving:
        if isinstance(leaving.code, str):
            print(leaving.code, file=sys.stderr)
            return 1
        return int(leaving.code or 0)
    return 0
