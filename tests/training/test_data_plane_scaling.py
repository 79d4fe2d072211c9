"""A source that cannot keep up gets another loader, and gives it back; steps stay the same."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import orjson
import pytest

from megatron_hdp.data_plane.hooks import VARIABLE
from megatron_hdp.data_plane.watcher import Watcher
from tests.support import slow_text
from tests.support.metric_lines import lines_of
from tests.support.plane import processes_of
from tests.support.sources import write_sources
from tests.support.thread_plane import write_notes
from tests.training.test_data_plane import figures, run, trained

pytest.importorskip("ray", reason="no Ray: pip install 'megatron-hdp[ray]'")
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
RUN_S = 900  # on a machine that is busy with other tests
GROW_S, SHRINK_S = 300, 120
MOST_STEPS = 2000
STEPS_AFTER = 8  # more than are made ahead, so that one of them knows of fewer loaders
COMMAND = "import sys; from megatron_hdp.cli.main import main; sys.exit(main())"
TOP = [sys.executable, "-c", COMMAND, "data", "top", "--once"]


class Watching:
    """What the first rank does in its steps: it waits for loaders to come, then for one to go.

    Steps go on while loaders come, and while a user is shown what they do.
    """

    def __init__(self):
        self._watcher = Watcher()
        self._until = time.monotonic() + GROW_S
        self._shown = []
        self._last_step = 0
        self.texts = []

    def __call__(self, step):
        assert time.monotonic() < self._until, f"still {self._serving()} loaders"
        if not self._shown:
            if self._serving() > 1:
                self._shown = [
                    subprocess.Popen([*TOP, *more], stdout=subprocess.PIPE, text=True)
                    for more in ([], ["--json"])
                ]
        elif not self.texts:
            if all(one.poll() is not None for one in self._shown):
                self.texts = [one.communicate()[0] for one in self._shown]
                self._until_there_are_fewer()
                self._last_step = step + STEPS_AFTER
        elif step == self._last_step:
            os.kill(os.getpid(), signal.SIGTERM)  # the run ends after this step

    def _serving(self):
        (plane,) = self._watcher.look()["planes"].values()
        return plane["sources"]["train"]["notes"]["serving"]

    def _until_there_are_fewer(self):
        before = self._serving()
        deadline = time.monotonic() + SHRINK_S
        while (found := self._serving()) >= before:
            assert time.monotonic() < deadline, f"still {found} loaders"
            time.sleep(0.2)


def scaled(arguments, temporary):
    """Body of a rank, which decodes nothing: metrics, contents, and what was shown meanwhile."""
    os.environ |= {
        **{"TMPDIR": temporary, "PYTHONPATH": str(ROOT)},
        **{VARIABLE: "tests.support.slow_text:decode_slowly", slow_text.ROW_S: "0.05"},
    }
    tempfile.tempdir = None
    slow_text.refuse_to_decode()
    watching = None
    if os.environ["RANK"] == "0":
        watching = Lazily(Watching)
    found, held, log = trained(arguments, watching)
    return found, held, log, [] if watching is None else watching.made.texts


class Lazily:
    """Made with the first step, when a plane runs."""

    def __init__(self, make):
        self._make = make
        self.made = None

    def __call__(self, step):
        self.made = self.made or self._make()
        self.made(step)


def test_loaders_come_and_go(run_ranks, tmp_path):
    write_sources(tmp_path, ("web",))
    schedule = "schedule: [{from: 0, weights: {notes: 0.9, web: 0.1}}]\n"
    loaders = "loaders: {min: 1, max: 3}\n"
    path = write_notes(tmp_path, 20_000, range(1, 21), more=schedule + loaders)
    metrics = tmp_path / "metrics.jsonl"
    many = {"train_iters": MOST_STEPS, "lr_decay_iters": MOST_STEPS, "seq_length": 100}
    local = run(tmp_path, path, **many)
    run_ranks(1, trained, replace(local, train_iters=1), timeout_s=RUN_S)  # makes the caches
    remote = replace(local, hdp_loaders="ray", metrics_path=metrics)
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as temporary:
        found = run_ranks(2, scaled, remote, temporary, timeout_s=RUN_S)
        assert processes_of(Path(temporary)) == []
    (records, _, log, (said, shown)), _ = found
    count = len(records)
    print(f"{said}{count} steps, loaders {[one.loaders for one in records]}")
    assert count < MOST_STEPS, log

    expected = run_ranks(2, trained, replace(local, train_iters=count), timeout_s=RUN_S)
    for (here, held_here, *_), (there, held_there, _) in zip(found, expected, strict=True):
        assert figures(here) == figures(there) and held_here == held_there

    loaders = [one["loaders"] for one in lines_of(metrics)]
    assert loaders == [one.loaders for one in records]
    assert loaders[0] == 2 and max(loaders) > 2  # one of each source at first
    assert min(loaders[-STEPS_AFTER:]) < max(loaders)
    (plane,) = orjson.loads(shown)["planes"].values()
    notes = plane["sources"]["train"]["notes"]
    assert notes["serving"] > 1, notes
    assert 0.2 < notes["busy_share"] <= 1.0 and notes["tokens_per_s"] > 0, notes
    assert "notes" in said and " web " in said
