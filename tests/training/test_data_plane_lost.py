"""A run that loses its data plane, a node of it or a source, and how it goes on.

Two nodes are two agents of torchrun on this host, a rank each.
"""

import os
import re
import signal
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from megatron_hdp.data_plane.node_files import read_status
from megatron_hdp.processes.ports import free_port
from tests.support.plane import processes_of
from tests.support.processes import running, started, until
from tests.support.sources import WEIGHTS, data_file, write_sources
from tests.training.faults import train
from tests.training.runs import folder, lines_of, long_flags, steps_of

pytest.importorskip("ray", reason="no Ray: pip install 'megatron-hdp[ray]'")
pytestmark = pytest.mark.slow

__all__ = ["folder"]  # a fixture

RUN_S = 600  # on a machine that is busy with other tests
END_S = 120


def remote_run(folder):
    """Flags of a run over a data plane that saves every second step, by field."""
    settings = {"save": folder / "saved", "save_interval": 2, "lr_decay_iters": 1000}
    settings |= {"metrics_path": folder / "metrics.jsonl", "hdp_loaders": "ray"}
    return settings | {"hdp_tokens_per_rank": 60}


def run_to_the_end(folder, **settings):
    """Two ranks that must end well."""
    with started(2, folder, train, "0:10001:none", long_flags(folder, **settings)) as ranks:
        assert [one.wait(RUN_S) for one in ranks] == [0, 0], ranks[0].text()


def resumed(folder, settings):
    """Resumes the run from its latest checkpoint for two steps; returns the last one's number."""
    step = int((folder / "saved" / "latest_checkpointed_iteration.txt").read_text())
    run_to_the_end(folder, train_iters=step + 2, load=folder / "saved", **settings)
    return step + 2


@pytest.mark.parametrize("what", ["megatron_hdp.data_plane.host", "gcs_server"])
def test_the_job_stops_and_resumes(folder, what):
    settings = remote_run(folder)
    argv = long_flags(folder, train_iters=1000, **settings)
    with started(2, folder, train, "0:10001:none", argv) as ranks:
        ranks[0].wait_for(" iteration        5/", RUN_S)
        (place,) = re.findall(r"its log is (\S+)/log", ranks[0].text())
        host = psutil.Process(read_status(Path(place))["pid"])
        one_of([host, *host.children(recursive=True)], what).kill()
        deadline = time.monotonic() + END_S
        codes = [one.wait(deadline - time.monotonic()) for one in ranks]
        assert codes == [3, 3], [one.text() for one in ranks]
        assert any("asked the node's data plane for 'get'" in one.text() for one in ranks)
    assert processes_of(Path(place)) == []
    before = steps_of(settings["metrics_path"])
    last = resumed(folder, settings)
    again = steps_of(settings["metrics_path"])
    assert [one["step"] for one in again] == [*range(1, last + 1)]
    assert [one["loss"] for one in again[: len(before)]] == [
        one["loss"] for one in before[: len(again)]
    ]


@pytest.fixture
def temporary():
    """For temporary files, as a host that is killed cannot remove its own."""
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as short:
        yield short


def agent(folder, temporary, node, port, argv):
    """One node's torchrun."""
    words = ["-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", node]
    words += ["--nproc-per-node", 1, "--master-addr", "127.0.0.1", "--master-port", port]
    words += ["-m", "tests.training.faults", "0:10001:none", *argv]
    output = folder / f"agent-{node}"
    environment = {"GLOO_SOCKET_IFNAME": "lo", "TMPDIR": temporary}
    return running([str(word) for word in words], output, **environment)


def one_of(processes, what):
    """The process whose command has a word."""
    found = []
    for one in processes:
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
    settings = remote_run(folder)
    path = settings["metrics_path"]
    argv = long_flags(folder, train_iters=1000, **settings)
    with ExitStack() as stack:
        port = free_port()
        agents = [stack.enter_context(agent(folder, temporary, n, port, argv)) for n in range(2)]
        agents[0].wait_for(" iteration        5/", RUN_S)
        assert "on 2 nodes, its log is" in agents[0].text()
        hosts = [one_of(one.below(), "megatron_hdp.data_plane.host").cmdline() for one in agents]
        assert all(one_of(one.below(), "Constructor") for one in agents)  # each on a Ray of its own
        folders = [Path(words[words.index("--folder") + 1]) for words in hosts]
        one_of(agents[1].below(), victim).kill()
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
    last = resumed(folder, settings)
    local = settings | dict.fromkeys(("hdp_loaders", "save", "save_interval"))
    local["metrics_path"] = folder / "local.jsonl"
    run_to_the_end(folder, train_iters=max(len(before), last), **local)
    expected = steps_of(folder / "local.jsonl")
    assert before == expected[: len(before)]
    assert steps_of(path) == expected[:last]
    assert all(one["loaders"] for one in lines_of(path))


TIMEOUT_S = 40  # on a busy machine a loader takes its time to start, too


def run_without(folder, **changes):
    """Flags of a run that goes on without the source `chat`, by field."""
    more = f"{WEIGHTS}\nloaders: {{backend: ray, timeout-s: {TIMEOUT_S}}}"
    path = data_file(folder, more, chat="on-failure: go-on-without")
    settings = {"hdp_data": path, "data_path": None, "split": None, "global_batch_size": 12}
    settings = remote_run(folder) | settings | {"lr_decay_iters": 10_000, "save_interval": None}
    return settings | changes


def stop_loaders(place, source):
    """Let all loaders of a source hang."""
    found = read_status(place)["sources"]["train"][source]["loaders"]
    pids = [one["pid"] for one in found if one]
    assert len(pids) == len(found) > 0
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)


def failed(place):
    return read_status(place)["planner"]["failed"].get("train", {})


def test_a_source_that_hangs(tmp_path):
    folder = write_sources(tmp_path)
    argv = long_flags(folder, **run_without(folder, train_iters=10_000))
    with started(2, folder, train, "0:10001:none", argv) as ranks:
        ranks[0].wait_for(" iteration        5/", RUN_S)
        (place,) = map(Path, re.findall(r"its log is (\S+)/log", ranks[0].text()))
        stop_loaders(place, "chat")
        ranks[0].wait_for("the run continues without it", RUN_S)
        until(lambda: "chat" in failed(place), RUN_S)
        assert f"no tokens within {TIMEOUT_S} s: " in failed(place)["chat"]
        line = "data plane: train continues without source 'chat': no tokens within"
        until(lambda: line in (place / "log").read_text(), RUN_S)
        assert (place / "log").read_text().count(line) == 1
        ranks[0].process.terminate()
        assert [one.wait(RUN_S) for one in ranks] == [0, 0], ranks[0].text()
        text = ranks[0].text()
    assert processes_of(place) == []
    why = rf"source 'chat' has failed \(no tokens within {TIMEOUT_S} s: \S+ has not answered"
    (line,) = [line for line in text.splitlines() if "the run continues without it" in line]
    assert re.match(rf"{why} for \d+ s\): the run continues without it, its share goes to", line)
    left_out = [int(number) for number in re.findall(rf"{why}.*\): (\d+) of its sequences", text)]
    (in_all,) = map(int, re.findall(r"(\d+) of its sequences were drawn and are not tr", line))
    assert in_all == sum(left_out) > 0

    steps = lines_of(folder / "metrics.jsonl")
    tokens = [one["sources"]["chat"]["tokens"] for one in steps]
    assert tokens[0] > 0 and tokens[-1] == 0
    assert all(one["sources"]["web"]["tokens"] for one in steps[-3:])
    assert {one["skipped_documents"] for one in steps} == {0}

    again = run_without(folder, train_iters=len(steps) + 4, load=folder / "saved")
    run_to_the_end(folder, **again)
    after = lines_of(folder / "metrics.jsonl")
    assert sum(one["sources"]["chat"]["tokens"] for one in after[len(steps) :]) > 0
