"""Checkpoints of mixtures: resumed on other numbers of ranks, killed while they are saved."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from breaking.rows import Try, row
from breaking.sources import chats, texts, write_lines

_CONFIG = Path(__file__).parents[2] / "configs" / "tiny-cpu.yaml"
_TRAIN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")

Steps = dict[int, dict[str, int]]
"""Tokens of each source by step."""


def _data_file(folder: Path) -> Path:
    write_lines(folder / "chat.jsonl", chats(400, 5))
    write_lines(folder / "text.jsonl", texts(800))
    data = folder / "d.yaml"
    data.write_text(
        "sources:\n"
        "  c: {path: chat.jsonl, format: chat, bad-limit: 0.9, long-sequence: truncate}\n"
        "  t: {path: text.jsonl, long-sequence: truncate}\n"
        "  l: {path: text.jsonl, tokenise: on-the-fly}\n"
        "schedule: [{from: 0, weights: {c: 0.4, t: 0.3, l: 0.3}}]\n"
    )
    return data


def _trained(
    folder: Path,
    ranks: int,
    save: Path,
    steps: int,
    until: Callable[["subprocess.Popen[bytes]"], None] | None = None,
    interval: int = 4,
) -> tuple[int, Steps]:
    """Exit code and drawn tokens of a run, which is killed once `until` returns."""
    metrics = folder / "metrics.jsonl"
    metrics.unlink(missing_ok=True)
    words = [*_TRAIN, ranks, "-m", "megatron_hdp.pretrain_gpt", "--config", _CONFIG]
    words += ["--hybrid-data-parallel", "--hdp-data", folder / "d.yaml", "--train-iters", steps]
    words += ["--save", save, "--load", save, "--save-interval", interval]
    words += ["--metrics-path", metrics, "--seq-length", 1024]  # which one rank can hold
    words += ["--lr-decay-iters", 12]  # of the longest run: others resume on its schedule
    with (folder / "log").open("wb") as log:
        job = subprocess.Popen(
            [str(word) for word in words], stdout=log, stderr=log, start_new_session=True
        )
        if until is not None:
            until(job)
            with suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)
        code = job.wait(400)
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    rows = [json.loads(line) for line in lines]
    return code, {
        one["step"]: {name: source["tokens"] for name, source in one["sources"].items()}
        for one in rows
        if "sources" in one
    }


@row("checkpoints", 900)
def mixtures_on_other_ranks(folder: Path) -> Iterator[Try]:
    """The steps do not depend on the ranks."""
    _data_file(folder)
    code, expected = _trained(folder, 2, folder / "whole", 12)
    yield "2 ranks", code == 0 and len(expected) == 12, (folder / "log").read_text()[-200:]
    for ranks in (1, 3):
        save = folder / f"on-{ranks}"
        _, first = _trained(folder, 2, save, 6, interval=3)
        code, second = _trained(folder, ranks, save, 12, interval=3)
        held = code == 0 and first | second == expected
        yield f"2 ranks, then {ranks}", held, f"exit {code}, steps {sorted(second)}"


@row("checkpoints", 900)
def killed_while_it_saves(folder: Path) -> Iterator[Try]:
    """At the first file, at the second, and when its list of tensors is there."""
    _data_file(folder)
    _, expected = _trained(folder, 2, folder / "whole", 12)
    for number, moment in enumerate(("the first file", "half", "the list of tensors")):
        save = folder / f"killed-{number}"

        def until(job: "subprocess.Popen[bytes]", save: Path = save, number: int = number) -> None:
            end = time.monotonic() + 120
            while time.monotonic() < end and job.poll() is None:
                files = [one.name for one in save.glob("*8*/*")]
                if len(files) > min(number, 1) and (number < 2 or ".metadata" in files):
                    return
                time.sleep(0.002)

        _trained(folder, 2, save, 12, until)
        code, second = _trained(folder, 3, save, 12)
        same = all(expected[step] == found for step, found in second.items())
        note = f"exit {code}, steps {sorted(second)}"
        yield f"{moment}, then 3 ranks", code == 0 and same and 12 in second, note
