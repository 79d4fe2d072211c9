"""Two nodes of a data plane, which is two agents of torchrun on this host, a rank each."""

import re
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from tests.support.commands import running
from tests.support.metric_lines import lines_of, steps_of
from tests.support.plane import processes_of
from tests.support.processes import free_port, started
from tests.training.faults import train
from tests.training.test_survival import flags, folder

pytest.importorskip("ray", reason="no Ray: pip install 'megatron-hdp[ray]'")
pytestmark = pytest.mark.slow

__all__ = ["folder"]  # a fixture

RUN_S = 600  # on a machine that is busy with other tests
END_S = 120


@pytest.fixture
def temporary():
    """For temporary files, as a host that is killed cannot remove its own."""
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as short:
        yield short


def agent(folder, temporary, node, port, argv):
    """One node's torchrun."""
    words = ["-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", node]
    words += ["--nproc-per-node", 1, "--master-addr", "127.0.0.1", "--master-port", port]
    words += ["-m", "tests.training.faults", "0:1001:none", *argv]
    output = folder / f"agent-{node}"
    environment = {"GLOO_SOCKET_IFNAME": "lo", "TMPDIR": temporary}
    return running([str(word) for word in words], output, **environment)


def one_of(agent, what):
    """The process below an agent whose command has a word."""
    found = []
    for one in agent.below():
        try:
            found += [one] if any(what in word for word in one.cmdline()[:4]) else []
        except psutil.Error:
            continue
    (process,) = found
    return process


def codes_of_ranks(text):
    """As torchrun reports them."""
    return [int(code) for code in re.findall(r"exitcode *: (-?\d+)", text)]


@pytest.mark.parametrize("victim", ["megatron_hdp.data_plane.host", "raylet"])
def test_a_node_is_lost_and_the_run_goes_on_without_it(folder, temporary, victim):
    """Until then, and on one node from the checkpoint on, its steps are those of local loaders."""
    path = folder / "metrics.jsonl"
    settings = {"save": folder / "saved", "save_interval": 2, "metrics_path": path}
    settings |= {"hdp_loaders": "ray", "lr_decay_iters": 1000, "hdp_tokens_per_rank": 60}
    argv = flags(folder, train_iters=1000, **settings)
    with ExitStack() as stack:
        port = free_port()
        agents = [stack.enter_context(agent(folder, temporary, n, port, argv)) for n in range(2)]
        agents[0].wait_for(" iteration        5/", RUN_S)
        assert "on 2 nodes, its log is" in agents[0].text()
        hosts = [one_of(one, "megatron_hdp.data_plane.host").cmdline() for one in agents]
        assert all(one_of(one, "Constructor") for one in agents)  # each on a Ray of its own
        folders = [Path(words[words.index("--folder") + 1]) for words in hosts]
        one_of(agents[1], victim).kill()
        deadline = time.monotonic() + END_S
        assert [one.wait(deadline - time.monotonic()) for one in agents] == [1, 1]
        texts = [one.text() for one in agents]
    assert set(codes_of_ranks(texts[1])) == {3}, texts[1]
    assert "asked the node's data plane for" in texts[1] and "has ended" in texts[1], texts[1]
    assert set(codes_of_ranks(texts[0])) == {3}, texts[0]
    assert "rank 1 (host" in texts[0] and "failed: " in texts[0], texts[0]
    for text in texts:
        assert "Traceback" not in text.split("failed (exitcode")[0], text  # then torchrun's own
    assert [processes_of(one) for one in folders] == [[], []]

    before = steps_of(path)
    step = int((folder / "saved" / "latest_checkpointed_iteration.txt").read_text())
    short = flags(folder, train_iters=step + 2, load=folder / "saved", **settings)
    with started(2, folder, train, "0:1001:none", short) as ranks:
        assert [one.wait(RUN_S) for one in ranks] == [0, 0], ranks[0].text()
    last = max(len(before), step + 2)
    changed = dict.fromkeys(("hdp_loaders", "save", "save_interval"))
    changed["metrics_path"] = folder / "local.jsonl"
    local = flags(folder, train_iters=last, **(settings | changed))
    with started(2, folder, train, "0:1001:none", local) as ranks:
        assert [one.wait(RUN_S) for one in ranks] == [0, 0], ranks[0].text()
    expected = steps_of(folder / "local.jsonl")
    assert before == expected[: len(before)]
    assert steps_of(path) == expected[: step + 2]
    assert all(one["loaders"] for one in lines_of(path))
