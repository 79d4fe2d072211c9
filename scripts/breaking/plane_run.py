"""A run over a data plane, with temporary files of its own, and what it leaves behind."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from megatron_hdp.data_plane.cluster.job_folder import takes_sockets

RUN_S = 300.0


def words_of(process: psutil.Process) -> list[str]:
    """A process' command line; none if it has ended."""
    with suppress(psutil.Error):
        return list(process.cmdline())
    return []


def lives(process: psutil.Process) -> bool:
    """Whether a process has not ended."""
    with suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


class Run:
    """One torchrun, every process that was ever below it, and its folders."""

    def __init__(self, process: "subprocess.Popen[bytes]", output: Path, temporary: Path) -> None:
        self.process, self.output, self.temporary = process, output, temporary
        self._shared: set[str] = set()
        self._seen: dict[int, psutil.Process] = {}

    def text(self) -> str:
        """All that it has said."""
        return self.output.read_text(errors="replace")

    def said(self) -> str:
        """The last lines that say what happened."""
        lines = self.text().splitlines()
        lines = [one for one in lines if "data plane" in one or "expected" in one]
        return " | ".join(lines[-4:])[:600]

    def below(self) -> list[psutil.Process]:
        """The processes below it that live."""
        with suppress(psutil.Error):
            for one in psutil.Process(self.process.pid).children(recursive=True):
                self._seen.setdefault(one.pid, one)
                words = words_of(one)
                if "--shared" in words:
                    self._shared.add(words[words.index("--shared") + 1])
        return [one for one in self._seen.values() if lives(one)]

    def one(self, word: str) -> psutil.Process:
        """The one process with a word in what it runs."""
        (found,) = (p for p in self.below() if any(word in text for text in words_of(p)[:4]))
        return found

    def until(self, is_so: Callable[[], object], what: str, may_end: bool = False) -> None:
        """Wait until something is so."""
        deadline = time.monotonic() + RUN_S
        while not is_so():
            self.below()
            has_ended = not may_end and self.process.poll() is not None
            if has_ended or time.monotonic() > deadline:
                raise AssertionError(f"no {what}: {self.text()[-1500:]}")
            time.sleep(0.1)

    def until_step(self, number: int) -> None:
        """Wait for a line of the log."""
        self.until(lambda: re.search(rf" iteration +{number}/", self.text()), f"step {number}")

    def last_step(self) -> int:
        """The number of the last step that was logged."""
        return int(re.findall(r" iteration +(\d+)/", self.text())[-1])

    def wait(self, timeout_s: float = RUN_S) -> int | None:
        """Its exit code; None if it has not ended by then."""
        deadline = time.monotonic() + timeout_s
        while self.process.poll() is None and time.monotonic() < deadline:
            self.below()
            time.sleep(0.05)
        return self.process.poll()

    def codes(self) -> list[int]:
        """The exit codes of ranks that torchrun tells."""
        return sorted({int(code) for code in re.findall(r"exitcode *: (-?\d+)", self.text())})

    def kept_logs(self) -> set[str]:
        """The logs that it names and that are there."""
        named = set(re.findall(r"(/\S*hdp-data-\w+/log)", self.text()))
        return {one for one in named if Path(one).exists()}

    def left(self, within_s: float = 10.0) -> list[str]:
        """Processes and files that are left after so long, but for logs that it names."""
        deadline = time.monotonic() + within_s
        while True:
            processes = [" ".join(words_of(p))[:80] for p in self._seen.values() if lives(p)]
            files = [str(one) for one in self.temporary.glob("hdp-*")] + self.shared()
            kept = self.kept_logs()
            found = processes + [one for one in files if f"{one}/log" not in kept]
            found = [one for one in found if "unshare" not in one]
            if not found or time.monotonic() > deadline:
                return found
            time.sleep(0.1)

    def shared(self) -> list[str]:
        """Its folders in shared memory that are there."""
        return [one for one in sorted(self._shared) if Path(one).exists()]

    def has_traceback(self) -> bool:
        """Whether a rank said more than a sentence."""
        return "Traceback" in self.text().split("failed (exitcode")[0]

    def end(self) -> None:
        """Kill all of it and remove what it left."""
        self.below()
        with suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
        for one in self._seen.values():
            with suppress(psutil.Error):
                one.send_signal(signal.SIGKILL)
        for folder in self.shared():
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def running(
    folder: Path,
    *,
    ranks: int = 1,
    steps: int = 100_000,
    shell: str = "",
    timeout_s: int = 30,
    **environment: str,
) -> Iterator[Run]:
    """A run that trains; ``shell`` runs before it, in a mount namespace of its own (root)."""
    from tests.support.gradients import write_corpus
    from tests.training.runs import LENGTHS, long_flags

    number = len(list(folder.iterdir()))
    place = folder / str(number)
    temporary = place / "t"
    assert takes_sockets(temporary), f"{temporary}: a plane's files would lie elsewhere: set TMPDIR"
    temporary.mkdir(parents=True)
    write_corpus(place, LENGTHS)
    data = place / "data.yaml"
    loaders = f"loaders: {{backend: ray, timeout-s: {timeout_s}}}"
    data.write_text(f"sources: {{web: {{path: {place}/corpus}}}}\n{loaders}\n")
    settings = {"hdp_tokens_per_rank": 120 // ranks, "train_iters": steps}
    settings |= {"lr_decay_iters": 100_000, "hdp_data": data, "data_path": None, "split": None}
    argv = [str(one) for one in long_flags(place, **settings)]
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    words += ["--nproc-per-node", str(ranks), "-m", "megatron_hdp.pretrain_gpt", *argv]
    if shell:
        words = ["unshare", "-m", "bash", "-c", f'{shell}\nexec "$@"', "bash", *words]
    of_run = {"TMPDIR": str(temporary), "TMP_OF_RUN": str(temporary), "OMP_NUM_THREADS": "1"}
    of_run |= {"PYTHONWARNINGS": "ignore", "GLOO_SOCKET_IFNAME": "lo"}
    with (place / "output").open("wb") as output:
        process = subprocess.Popen(
            words,
            cwd=Path(__file__).parents[2],
            env=os.environ | of_run | environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    found = Run(process, place / "output", temporary)
    try:
        yield found
    finally:
        found.end()
