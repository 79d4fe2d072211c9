"""The data plane on real runs: killed, stopped, without room, beside other users."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from breaking.plane_run import Run, running, words_of
from breaking.rows import Try, row

_HOST, _KEEPER = "megatron_hdp.data_plane.host", "megatron_hdp.data_plane.keeper"
_ON_TMP = "mount -t tmpfs -o size={} tmpfs $TMP_OF_RUN"
_ON_SHM = "mount -t tmpfs -o size={} tmpfs /dev/shm"


def _badly_ended(what: str, found: Run) -> Try:
    """What every bad end must show: exit code 3, a log that is kept, and nothing else left."""
    began = time.monotonic()
    found.wait(200)
    took_s, left = time.monotonic() - began, found.left()
    held = found.codes() == [3] and bool(found.kept_logs()) and not left
    return what, held, f"{took_s:.1f} s, codes {found.codes()}, left {left}; {found.said()}"


@row("data_plane", 900)
def parts_killed_in_the_run(folder: Path) -> Iterator[Try]:
    """Killed or stopped: every rank ends with a sentence."""
    parts = [(one, signal.SIGKILL) for one in ("gcs_server", "raylet", _HOST)]
    parts += [(one, signal.SIGSTOP) for one in ("Constructor", "Planner")]
    for word, number in parts:
        with running(folder) as found:
            found.until_step(5)
            found.one(word).send_signal(number)
            yield _badly_ended(f"{word}, {number.name}", found)


@row("data_plane", 600)
def parts_killed_while_it_starts(folder: Path) -> Iterator[Try]:
    """Nobody waits for what cannot come."""
    for word in ("gcs_server", "raylet/raylet"):
        with running(folder, timeout_s=60) as found:

            def is_there(run: Run = found, word: str = word) -> bool:
                return any(any(word in one for one in words_of(p)[:4]) for p in run.below())

            found.until(is_there, word)
            found.one(word).kill()
            yield _badly_ended(word, found)


@row("data_plane", 600)
def parents_killed(folder: Path) -> Iterator[Try]:
    """Nothing outlives torchrun, the first rank or the keeper by more than 10 seconds."""
    for what in ("torchrun", "the first rank"):
        with running(folder, ranks=2) as found:
            found.until_step(5)
            ranks = [p for p in found.below() if "megatron_hdp.pretrain_gpt" in words_of(p)]
            (first,) = (p for p in ranks if p.environ().get("RANK") == "0")
            (psutil.Process(found.process.pid) if what == "torchrun" else first).kill()
            left = found.left()
            yield what, not left, f"{left}"
    with running(folder) as found:
        found.until_step(5)
        found.one(_KEEPER).kill()
        found.wait(200)
        left = found.left(90.0)  # Ray's agents end by themselves
        held = found.codes() == [3] and not left
        yield "the keeper", held, f"{found.codes()}, left {left}; {found.said()}"


@row("data_plane", 300)
def all_of_it_killed_at_once(folder: Path) -> Iterator[Try]:
    """Its files stay, and the next run or doctor removes them."""
    doctor = [sys.executable, "-m", "megatron_hdp.cli.main", "doctor", "--clean-up"]
    with running(folder) as found:
        found.until_step(5)
        for one in found.below():
            one.kill()
        found.process.kill()
        before = found.left(5.0)
        environment = os.environ | {"TMPDIR": str(found.temporary)}
        subprocess.run(doctor, env=environment, stdout=subprocess.DEVNULL)
        after = found.left(1.0)
        yield "doctor", bool(before) and not after, f"{before}, then {after}"


@row("data_plane", 900)
def no_room_at_the_start(folder: Path) -> Iterator[Try]:
    """As root: temporary files and shared memory that are full, small or nearly full."""
    full = "head -c {0} /dev/zero > {1}/fill; true"
    tmp, shm = _ON_TMP.format("64k"), _ON_SHM.format("64m")
    cases: dict[str, tuple[str, list[int]]] = {
        "temporary files full": (f"{tmp}; {full.format(65536, '$TMP_OF_RUN')}", []),
        "temporary files of 2 MB": (_ON_TMP.format("2m"), []),
        "temporary files 97 % full": (
            f"{_ON_TMP.format('400m')}; {full.format(407_000_000, '$TMP_OF_RUN')}",
            [],
        ),
        "temporary files of nobody": ("chown 65534 $TMP_OF_RUN; chmod 1777 $TMP_OF_RUN", []),
        "shared memory full": (f"{shm}; {full.format(2**26, '/dev/shm')}", [2]),
        "shared memory of 64 MB": (shm, []),
        "100 kB of shared memory": (f"{shm}; {full.format(67_006_464, '/dev/shm')}", []),
    }
    for what, (shell, codes) in cases.items():
        with running(folder, steps=12, shell=shell) as found:
            code = found.wait(240)
            held = found.codes() == codes and not found.left(2.0) and not found.has_traceback()
            yield what, held, f"exit {code}, codes {found.codes()}; {found.said()}"


@row("data_plane", 600)
def no_room_in_the_run(folder: Path) -> Iterator[Try]:
    """As root: a file system fills up while it trains."""
    cases = {
        "$TMP_OF_RUN": (_ON_TMP.format("100m"), "found no room for the data plane's journal"),
        "/dev/shm": (_ON_SHM.format("400m"), "found no room for a step"),
    }
    for where, (shell, told) in cases.items():
        with running(folder, shell=shell) as found:
            found.until_step(5)
            place = where.replace("$TMP_OF_RUN", str(found.temporary))
            fill = f"/proc/{found.one(_HOST).pid}/root{place}/fill"
            with suppress(OSError), open(fill, "wb", buffering=0) as file:
                while True:
                    file.write(b"x" * 4096)
            code = found.wait(90)
            held = found.codes() == [2] and not found.left(2.0) and told in found.text()
            yield where, held and not found.has_traceback(), f"exit {code}; {found.said()}"


@row("data_plane", 1500)
def kills_in_the_last_step(folder: Path) -> Iterator[Try]:
    """And at shutdown: the run is done, and says so."""
    words = ("gcs_server", "raylet/raylet", _HOST, _KEEPER, "Constructor", "Planner")
    for word in words:
        for delay_s in (0.0, 0.2):
            with running(folder, steps=60) as found:
                found.until_step(5)
                victim = found.one(word)

                def is_last(run: Run = found) -> bool:
                    return " iteration       60/" in run.text()

                found.until(is_last, "last step", may_end=True)
                time.sleep(delay_s)
                with suppress(psutil.Error):
                    victim.kill()
                code = found.wait(60)
                left = found.left(90.0 if word == _KEEPER else 10.0)  # Ray's agents end themselves
                held = code == 0 and not left
                yield f"{word} after {delay_s} s", held, f"exit {code}, left {left}; {found.said()}"


@row("data_plane", 900)
def clusters_that_refuse(folder: Path) -> Iterator[Try]:
    """Wrong tokens, addresses of nothing, and a joined cluster that stays."""
    from tests.support.ray_cluster import running_cluster

    def refused(what: str, told: str, **environment: str) -> Try:
        with running(folder, steps=12, **environment) as found:
            code = found.wait(240)
            held = found.codes() == [3] and told in found.text() and not found.has_traceback()
            return what, held and not found.left(2.0), f"exit {code}; {found.said()}"

    with running_cluster() as cluster:
        right = cluster.environment
        for token in (right["RAY_AUTH_TOKEN"][::-1], "", "x"):
            environment = right | {"RAY_AUTH_TOKEN": token}
            yield refused(f"token {token[:4]!r}", "RAY_AUTH_TOKEN", **environment)
        with running(folder, ranks=2, **right) as found:
            found.until_step(5)
            before = cluster.named_actors()
            found.process.kill()
            left, after = found.left(), cluster.named_actors()
            held = bool(before) and not after and not left
            yield "torchrun killed in a joined cluster", held, f"{after}, left {left}"
    for address in ("127.0.0.1:1", "nonsense", "ray://127.0.0.1:9", "127.0.0.1:99999999", "\x07:9"):
        yield refused(f"address {address!r}", "RAY_ADDRESS", RAY_ADDRESS=address)


@row("data_plane", 600)
def folders_and_journals(folder: Path) -> Iterator[Try]:
    """Its folders are removed while it trains, its journal is damaged before a planner starts."""
    for which in ("temporary", "shared"):
        with running(folder) as found:
            found.until_step(5)
            gone = str(next(iter(found.temporary.glob("hdp-data-*"))))
            shutil.rmtree(gone if which == "temporary" else found.shared()[0], ignore_errors=True)
            code, left = found.wait(120), found.left()
            held = found.codes() in ([2], [3]) and not left and not found.has_traceback()
            yield f"{which} files removed", held, f"exit {code}, left {left}; {found.said()}"
    with running(folder, timeout_s=60) as found:
        found.until_step(5)
        (journal,) = found.temporary.glob("hdp-data-*/journal")
        with (journal / "steps.jsonl").open("ab") as file:
            file.write(b"\xff{garbage\n[1, 2]\n{}\nnull\n")
        found.one("Planner").kill()
        found.until_step(found.last_step() + 20)
        yield "a damaged journal", True, "trains on"


@row("data_plane", 300)
def signals_to_all_of_it(folder: Path) -> Iterator[Try]:
    """As Slurm sends them: the plane minds none, torchrun ends the run."""
    with running(folder, timeout_s=60) as found:
        found.until_step(5)
        for one in found.below():
            if not re.search("pretrain_gpt", " ".join(words_of(one))):
                for number in (signal.SIGTERM, signal.SIGUSR1):
                    one.send_signal(number)
        found.until_step(found.last_step() + 20)
        found.process.terminate()
        code, left = found.wait(60), found.left()
        yield "SIGTERM and SIGUSR1", not left, f"exit {code}, left {left}"


@row("data_plane", 300)
def a_stopped_host(folder: Path) -> Iterator[Try]:
    """Which watches alone: the run trains on, and nothing of it outlives torchrun."""
    with running(folder, timeout_s=60) as found:
        found.until_step(5)
        found.one(_HOST).send_signal(signal.SIGSTOP)
        found.until_step(found.last_step() + 200)
        found.process.terminate()
        code, left = found.wait(60), found.left()
        yield "SIGSTOP, then torchrun ends", not left, f"exit {code}, left {left}; {found.said()}"


@row("data_plane", 300)
def another_user_at_the_socket(folder: Path) -> Iterator[Try]:
    """As root: nobody reads a run's files or speaks to its node."""
    with running(folder, timeout_s=60) as found:
        found.until_step(5)
        (place,) = found.temporary.glob("hdp-data-*")
        socket = "import socket; s = socket.socket(socket.AF_UNIX)"
        for what in (
            f"{socket}; s.connect('{place}/node.sock')",
            *(f"open('{place}/{name}')" for name in ("log", "status.json")),
            *(f"import os; os.listdir('{one}')" for one in (found.shared()[0], f"{place}/r")),
        ):
            words = ["setpriv", "--reuid", "65534", "--clear-groups", sys.executable, "-S", "-c"]
            done = subprocess.run([*words, what], capture_output=True, text=True, cwd="/")
            yield what[:40], "PermissionError" in done.stderr, done.stderr[-100:]
