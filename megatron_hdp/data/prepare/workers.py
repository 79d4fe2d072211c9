"""Worker processes: fresh interpreters without torch, that take shards and end with their parent.

They are neither forked, for the parent may have threads and a GPU, nor made by multiprocessing,
which would run the parent's main module, a training script perhaps, once more in each.
"""

import os
import pickle
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

from megatron_hdp.data.prepare.decoding import Decoding
from megatron_hdp.data.prepare.shard_run import Tell, run_shard
from megatron_hdp.data.prepare.shards import Counts, Shard
from megatron_hdp.data.tokenizers import available_cpus
from megatron_hdp.processes import end_with_parent

_PROGRAM = (
    "import sys; sys.path[:] = {path!r}; "
    "from megatron_hdp.data.prepare.workers import serve; serve({descriptor}, {parent})"
)
_LOOK_S = 1.0
_TOLD_BYTES = 2**19  # of progress: not told more often than anybody would look
_MISTAKES: tuple[type[Exception], ...] = (ValueError, OSError, ImportError)

Task = tuple[Shard, str]
"""A shard and the prefix to write it to."""


@contextmanager
def started(decoding: Decoding, number: int) -> Iterator[list["Worker"]]:
    """Start processes that know what to do; within the block they are given tasks.

    When it ends they are killed, whatever they are at: what is half has a temporary name.
    """
    raw = pickle.dumps(decoding)
    workers: list[Worker] = []
    try:
        for _ in range(number):
            workers.append(Worker(threads=max(1, available_cpus() // number)))
        for worker in workers:
            worker.send(raw)
        yield workers
    finally:
        for worker in workers:
            worker.process.kill()
        for worker in workers:
            worker.process.wait()
            worker.connection.close()


def run_by_workers(
    decoding: Decoding, workers: int, tasks: Sequence[Task], tell: Tell
) -> Iterator[tuple[Shard, Counts]]:
    """Run shards, as many at a time as there are workers; yield them as they are finished.

    Raises:
        ValueError, OSError, ImportError: what a worker came upon, in its words.
        ChildProcessError: a worker died.
        RuntimeError: a worker failed otherwise; holds its traceback.
    """
    waiting = iter(tasks)
    busy: dict[Connection, Worker] = {}
    with started(decoding, workers) as idle:
        for worker in idle:
            if (task := next(waiting, None)) is not None:
                worker.start(task)
                busy[worker.connection] = worker
        while busy:
            for connection in wait(list(busy), timeout=_LOOK_S):
                worker = busy[connection]  # type: ignore[index]
                if (counts := worker.heard(tell)) is None:
                    continue
                finished = worker.shard
                if (task := next(waiting, None)) is not None:
                    worker.start(task)
                else:
                    del busy[worker.connection]
                yield finished, counts
            for worker in busy.values():
                worker.require_alive()


class Worker:
    """One process, seen from its parent."""

    shard: Shard

    def __init__(self, threads: int) -> None:
        self.connection, theirs = Pipe()
        program = _PROGRAM.format(path=sys.path, descriptor=theirs.fileno(), parent=os.getpid())
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:  # it inherits the mask: Ctrl-C is its parent's to hear
            self.process = subprocess.Popen(
                [sys.executable, "-c", program],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=_environment(threads),
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()

    def start(self, task: Task) -> None:
        """Give it a shard to run."""
        self.shard = task[0]
        self.send(pickle.dumps(task))

    def send(self, raw: bytes) -> None:
        """Send a message, unless it is dead."""
        with suppress(BrokenPipeError, ConnectionResetError):  # `heard` says that it died
            self.connection.send_bytes(raw)

    def heard(self, tell: Tell) -> Counts | None:
        """Take one message; what it came to if it has finished its shard."""
        try:
            kind, content = self.connection.recv()
        except (EOFError, ConnectionResetError) as error:
            raise self._died(self.process.wait()) from error
        if kind == "read":
            tell(content)
            return None
        if kind == "failed":
            number, message = content
            raise _MISTAKES[number](message)
        if kind == "broke":
            raise RuntimeError(f"a worker failed on {self._files()}:\n{content}")
        found: Counts = content
        return found

    def require_alive(self) -> None:
        """Notice an end that the connection does not tell, for another process has it open, too."""
        if (code := self.process.poll()) is not None and not self.connection.poll():
            raise self._died(code)

    def _died(self, code: int) -> ChildProcessError:
        how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        return ChildProcessError(
            f"worker process {self.process.pid} ended {how} while it read {self._files()}, "
            "expected it to finish: if memory ran out, fewer workers take less of it"
        )

    def _files(self) -> str:
        first, last = self.shard.pieces[0].path, self.shard.pieces[-1].path
        return first if first == last else f"{first} to {last}"


def _environment(threads: int) -> dict[str, str]:
    """A worker's environment; the threads are those of Rust, and what the user has set stays."""
    ours = {
        "TOKENIZERS_PARALLELISM": "true" if threads > 1 else "false",
        "RAYON_NUM_THREADS": str(threads),
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    return {**ours, **os.environ}


def serve(descriptor: int, parent: int) -> None:
    """Run shards for the parent until it closes the connection; what a worker process runs."""
    end_with_parent(parent)
    connection = Connection(descriptor)
    try:
        decoding = pickle.loads(connection.recv_bytes())
        while True:
            shard, prefix = pickle.loads(connection.recv_bytes())
            connection.send(_answer(decoding, shard, prefix, connection))
    except (EOFError, BrokenPipeError, ConnectionResetError):  # the parent needs no more
        return


def _answer(
    decoding: Decoding, shard: Shard, prefix: str, connection: Connection
) -> tuple[str, Any]:
    untold = 0

    def tell(num_bytes: int, least: int = _TOLD_BYTES) -> None:
        nonlocal untold
        untold += num_bytes
        if untold >= least:
            connection.send(("read", untold))
            untold = 0

    try:
        counts = run_shard(decoding, shard, prefix, tell)
        tell(0, least=0)
    except (BrokenPipeError, ConnectionResetError):
        raise
    except _MISTAKES as error:
        number = next(i for i, kind in enumerate(_MISTAKES) if isinstance(error, kind))
        return "failed", (number, str(error))
    except Exception:  # handed on to the parent, which raises it
        return "broke", traceback.format_exc()
    return "done", counts
