"""Ranks that Ray started load through the data plane: the run of local loaders, bit for bit."""

from pathlib import Path

import pytest

from tests.support.commands import running
from tests.support.metric_lines import lines_of, steps_of
from tests.support.processes import free_port, started
from tests.support.ray_cluster import running_cluster
from tests.training.faults import train
from tests.training.test_survival import flags, folder

pytest.importorskip("ray", reason="no Ray: pip install 'megatron-hdp[ray]'")
pytestmark = pytest.mark.slow

__all__ = ["folder"]  # a fixture

RUN_S = 600  # on a machine that is busy with other tests


def launched(folder, argv, options, environment):
    """Exit code of a launcher, and what it and its ranks wrote."""
    words = ["-m", "megatron_hdp.ray_launch", "--ranks-per-node", "2", "--logs", folder / "logs"]
    words += ["--env", "GLOO_SOCKET_IFNAME=lo", *options, "-m", "megatron_hdp.pretrain_gpt", *argv]
    with running([str(word) for word in words], folder / "launcher", **environment) as command:
        code = command.wait(RUN_S)
    ranks = [one.read_text() for one in sorted((folder / "logs").glob("node-*.log"))]
    return code, "".join([command.text(), *ranks])


@pytest.mark.parametrize("whose", ["its-own", "of-the-site", "joined"])
def test_ranks_that_ray_started(folder, whose):
    """In a cluster made for the job, and in one that ran before and goes on after it.

    The data plane makes a cluster of its own beside that of the ranks, unless it is told to join.
    """
    run = {"hdp_tokens_per_rank": 60}
    local = flags(folder, metrics_path=folder / "local.jsonl", **run)
    with started(2, folder, train, "0:1001:none", local) as ranks:
        assert [one.wait(RUN_S) for one in ranks] == [0, 0], ranks[0].text()
    argv = flags(folder, metrics_path=folder / "remote.jsonl", hdp_loaders="ray", **run)
    if whose == "its-own":
        own = ["--start-ray", f"127.0.0.1:{free_port()}", "--nodes", "1"]
        token = {"RAY_AUTH_TOKEN": "5" * 64, "SLURM_CPUS_ON_NODE": "2"}
        code, text = launched(folder, argv, own, token)
    else:
        with running_cluster() as cluster:
            join = ["--env", "RAY_ADDRESS"] if whose == "joined" else []
            code, text = launched(folder, argv, join, cluster.environment)
            assert cluster.named_actors() == []
    assert code == 0, text
    assert ("in the Ray cluster of RAY_ADDRESS, its log is" in text) == (whose == "joined"), text
    assert steps_of(folder / "remote.jsonl") == steps_of(folder / "local.jsonl")
    assert all(one["loaders"] for one in lines_of(folder / "remote.jsonl"))
    assert not Path(text.split("its log is ")[1].split("/log")[0]).exists()
