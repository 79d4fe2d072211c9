"""A data plane in a Ray cluster that runs already: the same run, and the cluster is left as it was.

One cluster serves all tests, which may not end it.
"""

import os
import re
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tests.support.plane import processes_of
from tests.support.processes import free_port, started
from tests.support.ray_cluster import running_cluster
from tests.support.sources import WEIGHTS, data_file, write_sources
from tests.training.faults import train
from tests.training.test_data_plane import figures, run, trained
from tests.training.test_survival import flags, folder

pytest.importorskip("ray", reason="no Ray: pip install 'megatron-hdp[ray]'")
pytestmark = pytest.mark.slow

__all__ = ["folder"]  # a fixture

RUN_S = 600  # on a machine that is busy with other tests


@pytest.fixture(scope="module")
def cluster():
    with running_cluster() as found:
        yield found
        assert found.process.poll() is None


def trained_in(environment, arguments):
    """Body of a rank whose environment names a cluster."""
    os.environ.update(environment)
    return trained(arguments)


def train_in(environment, argv):
    """The same as a command, which ends its process."""
    os.environ.update(environment)
    train("0:1001:none", argv)


def test_a_cluster_is_joined_and_left(run_ranks, tmp_path, cluster):
    path = data_file(write_sources(tmp_path), f"{WEIGHTS}\nloaders: {{max: 2, shadows: 1}}")
    local = run(tmp_path, path)
    expected = run_ranks(2, trained, local, timeout_s=RUN_S)
    before = set(psutil.Process(cluster.process.pid).children(recursive=True))
    remote = replace(local, hdp_loaders="ray")
    found = run_ranks(2, trained_in, cluster.environment, remote, timeout_s=RUN_S)
    for (here, held_here, _), (there, held_there, _) in zip(found, expected, strict=True):
        assert figures(here) == figures(there) and held_here == held_there
        assert all(one.loaders >= 3 * 2 for one in here)
    (place,) = re.findall(r"in the Ray cluster of RAY_ADDRESS, its log is (\S+)/log", found[0][2])
    assert not Path(place).exists() and processes_of(Path(place)) == []
    assert cluster.named_actors() == []
    assert before <= set(psutil.Process(cluster.process.pid).children(recursive=True))
    assert ours_below(cluster) == []


def ours_below(cluster):
    """Actors' processes that are still there; Ray gives them a moment."""
    deadline = time.monotonic() + 60
    while True:
        below = psutil.Process(cluster.process.pid).children(recursive=True)
        names = [" ".join(words) for one in below if (words := words_of(one))]
        found = [one for one in names if "hdp-data-" in one or "Constructor" in one]
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.5)


def words_of(process):
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@pytest.mark.parametrize("what", ["no cluster", "another token", "no token"])
def test_a_cluster_that_takes_nobody_is_told_in_a_sentence(folder, cluster, what):
    environment = dict(cluster.environment)
    if what == "no cluster":
        environment["RAY_ADDRESS"] = f"127.0.0.1:{free_port()}"
    elif what == "another token":
        environment["RAY_AUTH_TOKEN"] = environment["RAY_AUTH_TOKEN"][::-1]
    else:
        environment["RAY_AUTH_TOKEN"] = environment["RAY_AUTH_MODE"] = ""
    argv = flags(folder, hdp_loaders="ray", hdp_tokens_per_rank=60)
    with started(2, folder, train_in, environment, argv) as ranks:
        assert [one.wait(RUN_S) for one in ranks] == [3, 3], [one.text() for one in ranks]
        texts = [one.text() for one in ranks]
    for text in texts:
        (line,) = [one for one in text.splitlines() if "error on rank" in one]
        address = environment["RAY_ADDRESS"]
        assert f"RAY_ADDRESS='{address}': found no cluster there" in line
        assert "RAY_AUTH_TOKEN" in line and "Traceback" not in text, text
        assert line.count("expected ") == 1 and line.endswith("or unset RAY_ADDRESS"), line
    assert cluster.named_actors() == []
