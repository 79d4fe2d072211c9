"""A run that loads through the data plane is the run that loads in its ranks, bit for bit.

With a Ray of its own, in a cluster that runs already, and while loaders come and go.
"""

import hashlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from unittest import mock

import numpy as np
import orjson
import psutil
import pytest

from megatron_hdp.data_plane.hooks import VARIABLE
from megatron_hdp.data_plane.watcher import Watcher
from megatron_hdp.megatron.execution.executor import HdpExecutor
from megatron_hdp.processes.ports import free_port
from tests.support import slow_text
from tests.support.plane import processes_of
from tests.support.processes import started, until
from tests.support.ray_cluster import running_cluster
from tests.support.sources import WEIGHTS, data_file, write_notes, write_sources
from tests.training import runs
from tests.training.faults import train
from tests.training.runs import TIMES, folder, lines_of, long_flags, mixed_run

pytest.importorskip("ray", reason="no Ray: pip install 'megatron-hdp[ray]'")
# Ray gives its processes a time to start, which a busy machine may not keep
pytestmark = pytest.mark.slow

__all__ = ["folder"]  # a fixture

RUN_S = 900  # on a machine that is busy with other tests
LOADERS = f"{WEIGHTS}\nvalidation: {{web: 2}}\nloaders: {{max: 2, shadows: 1}}"


def trained(arguments, fault=None):
    """Body of a rank: metrics of every step, what its micro-batches held, and the log."""
    held, run = [], HdpExecutor.run

    def noting(self, micro_batches, *rest, **named):
        held.append([digest(one) for one in micro_batches])
        if fault is not None:
            fault(len(held))
        return run(self, micro_batches, *rest, **named)

    with mock.patch.object(HdpExecutor, "run", noting):
        found, log = runs.trained(arguments)
    return found, held, log


def digest(micro_batch):
    """Of everything in it but tokens and labels that its rank does not need."""
    found = hashlib.blake2b(digest_size=8)
    for item in fields(micro_batch):
        value = getattr(micro_batch, item.name)
        found.update(value.tobytes() if isinstance(value, np.ndarray) else repr(value).encode())
    return found.hexdigest()


def figures(found):
    return [{k: v for k, v in vars(one).items() if k not in TIMES} for one in found]


def require_equal(found, expected):
    """Ranks of two runs had the same figures but for times, and held the same."""
    for (here, held_here, *_), (there, held_there, _) in zip(found, expected, strict=True):
        for one, other in zip(figures(here), figures(there), strict=True):
            assert {k: (v, other[k]) for k, v in one.items() if v != other[k]} == {}
        assert held_here == held_there


def run(folder, path, **overrides):
    return mixed_run(folder, path, **({"steps": 5, "global_batch_size": 6} | overrides))


TWO_STAGES = {"pipeline_model_parallel_size": 2}
CHUNKS = {"num_layers": 4, "num_virtual_stages_per_pipeline_rank": 2}
LAYOUTS = {
    **{str(ranks): (ranks, {}) for ranks in (1, 2, 4, 5)},
    "tp2": (2, {"tensor_model_parallel_size": 2}),
    "pp2": (2, TWO_STAGES),
    "pp2-v2": (4, TWO_STAGES | CHUNKS),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_run(run_ranks, tmp_path, layout):
    ranks, more = LAYOUTS[layout]
    path = data_file(write_sources(tmp_path), LOADERS)
    local = run(tmp_path, path, eval_iters=1, eval_interval=2, **more)
    expected = run_ranks(ranks, trained, local, timeout_s=RUN_S)
    found = run_ranks(ranks, trained, replace(local, hdp_loaders="ray"), timeout_s=RUN_S)
    require_equal(found, expected)
    (records, _, log), *_ = found
    assert "data plane: hdp-data-" in log
    assert all(3 * 2 <= one.loaders <= 3 * 3 for one in records)  # a standby loader each
    assert all(one.data_wait_ms is not None for one in records)
    assert expected[0][0][0].loaders is None
    (folder,) = re.findall(r"its log is (\S+)/log", log)
    assert not Path(folder).exists() and processes_of(Path(folder)) == []


@pytest.fixture(scope="module")
def cluster():
    """One serves all tests, which may not end it."""
    with running_cluster() as found:
        yield found
        assert found.process.poll() is None


def trained_in(environment, arguments):
    """Body of a rank whose environment names a cluster."""
    os.environ.update(environment)
    return trained(arguments)


def train_in(environment, argv):
    os.environ.update(environment)
    train("0:1001:none", argv)


def test_a_cluster_is_joined_and_left(run_ranks, tmp_path, cluster):
    local = run(tmp_path, data_file(write_sources(tmp_path), LOADERS))
    expected = run_ranks(2, trained, local, timeout_s=RUN_S)
    before = set(psutil.Process(cluster.process.pid).children(recursive=True))
    remote = replace(local, hdp_loaders="ray")
    found = run_ranks(2, trained_in, cluster.environment, remote, timeout_s=RUN_S)
    require_equal(found, expected)
    assert all(one.loaders >= 3 * 2 for here, *_ in found for one in here)
    (place,) = re.findall(r"in the Ray cluster of RAY_ADDRESS, its log is (\S+)/log", found[0][2])
    assert not Path(place).exists() and processes_of(Path(place)) == []
    assert cluster.named_actors() == []
    assert before <= set(psutil.Process(cluster.process.pid).children(recursive=True))
    until(lambda: not ours_below(cluster, before), 60, sleep_s=0.5)  # Ray gives them a moment


def ours_below(cluster, before):
    """Actors' processes that are still there; those of before are the cluster's own."""
    found = []
    for one in {*psutil.Process(cluster.process.pid).children(recursive=True)} - before:
        with suppress(psutil.Error):
            found.append(" ".join(one.cmdline()))
    return [one for one in found if "hdp-data-" in one or "Constructor" in one]


@pytest.mark.parametrize("what", ["no cluster", "another token", "no token"])
def test_a_cluster_that_takes_nobody_is_told_in_a_sentence(folder, cluster, what):
    environment = dict(cluster.environment)
    if what == "no cluster":
        environment["RAY_ADDRESS"] = f"127.0.0.1:{free_port()}"
    elif what == "another token":
        environment["RAY_AUTH_TOKEN"] = environment["RAY_AUTH_TOKEN"][::-1]
    else:
        environment["RAY_AUTH_TOKEN"] = environment["RAY_AUTH_MODE"] = ""
    argv = long_flags(folder, hdp_loaders="ray", hdp_tokens_per_rank=60)
    with started(2, folder, train_in, environment, argv) as ranks:
        assert [one.wait(RUN_S) for one in ranks] == [3, 3], [one.text() for one in ranks]
        texts = [one.text() for one in ranks]
    for text in texts:
        (line,) = [one for one in text.splitlines() if "error on rank" in one]
        address = environment["RAY_ADDRESS"]
        assert f"RAY_ADDRESS='{address}': found no cluster there" in line
        assert "RAY_AUTH_TOKEN" in line and "Traceback" not in text, text
        assert line.count("expected ") == 1 and "or unset RAY_ADDRESS; its log is" in line
    assert cluster.named_actors() == []


ROOT = Path(__file__).parents[2]
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
        self._watcher = None
        self._shown = []
        self._last_step = 0
        self.texts = []

    def __call__(self, step):
        if self._watcher is None:  # with the first step a plane runs
            self._watcher, self._until = Watcher(), time.monotonic() + GROW_S
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
                before = self._serving()
                until(lambda: self._serving() < before, SHRINK_S, sleep_s=0.2)
                self._last_step = step + STEPS_AFTER
        elif step == self._last_step:
            os.kill(os.getpid(), signal.SIGTERM)  # the run ends after this step

    def _serving(self):
        (plane,) = self._watcher.look()["planes"].values()
        return plane["sources"]["train"]["notes"]["serving"]


def scaled(arguments, temporary):
    """Body of a rank, which decodes nothing: metrics, contents, and what was shown meanwhile."""
    os.environ |= {
        **{"TMPDIR": temporary, "PYTHONPATH": str(ROOT)},
        **{VARIABLE: "tests.support.slow_text:decode_slowly", slow_text.ROW_S: "0.05"},
    }
    tempfile.tempdir = None
    slow_text.refuse_to_decode()
    watching = Watching() if os.environ["RANK"] == "0" else None
    return *trained(arguments, watching), watching and watching.texts


def test_loaders_come_and_go(run_ranks, tmp_path):
    write_sources(tmp_path, ("web",))
    schedule = "schedule: [{from: 0, weights: {notes: 0.9, web: 0.1}}]\n"
    loaders = "loaders: {min: 1, max: 3, sources-per-loader: 2}\n"
    path = write_notes(tmp_path, 20_000, range(1, 21), more=schedule + loaders)
    metrics = tmp_path / "metrics.jsonl"
    local = run(tmp_path, path, steps=MOST_STEPS, seq_length=100)
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
    require_equal(found, expected)

    loaders = [one["loaders"] for one in lines_of(metrics)]
    assert loaders == [one.loaders for one in records]
    assert loaders[0] == 1 and max(loaders) > 1  # one for both sources at first
    assert min(loaders[-STEPS_AFTER:]) < max(loaders)
    (plane,) = orjson.loads(shown)["planes"].values()
    notes = plane["sources"]["train"]["notes"]
    assert notes["serving"] > 1, notes
    assert 0.2 < notes["busy_share"] <= 1.0 and notes["tokens_per_s"] > 0, notes
    assert "notes" in said and " web " in said
