"""A run whose source hangs goes on without it, and tries it again when it is started again."""

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from megatron_hdp.data_plane.node_files import read_status
from tests.support.plane import processes_of
from tests.support.processes import started
from tests.support.sources import WEIGHTS, data_file, write_sources
from tests.training.faults import train
from tests.training.test_survival import START_S, flags

pytest.importorskip("ray", reason="no Ray: pip install 'megatron-hdp[ray]'")
pytestmark = pytest.mark.slow

TIMEOUT_S = 40  # on a busy machine a loader takes its time to start, too


def run(folder, **changes):
    more = f"{WEIGHTS}\nloaders: {{backend: ray, timeout-s: {TIMEOUT_S}}}"
    path = data_file(folder, more, chat="on-failure: go-on-without")
    settings = {"hdp_data": path, "data_path": None, "split": None, "global_batch_size": 12}
    settings |= {"save": folder / "saved", "metrics_path": folder / "metrics.jsonl"}
    settings |= {"hdp_tokens_per_rank": 60, "lr_decay_iters": 10_000}
    return flags(folder, **(settings | changes))


def stop_loaders(place, source):
    """Let all loaders of a source hang."""
    found = read_status(place)["sources"]["train"][source]["loaders"]
    pids = [one["pid"] for one in found if one]
    assert len(pids) == len(found) > 0
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)


def failed(place):
    return read_status(place)["planner"]["failed"].get("train", {})


def until(is_so):
    deadline = time.monotonic() + START_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_a_source_that_hangs(tmp_path):
    folder = write_sources(tmp_path)
    arguments = run(folder, train_iters=10_000)
    with started(2, folder, train, "0:10001:none", arguments, folder / "acted") as ranks:
        ranks[0].wait_for(" iteration        5/", START_S)
        (place,) = map(Path, re.findall(r"its log is (\S+)/log", ranks[0].text()))
        stop_loaders(place, "chat")
        ranks[0].wait_for("the run goes on without it", START_S)
        until(lambda: "chat" in failed(place))
        assert f"no tokens within {TIMEOUT_S} s: " in failed(place)["chat"]
        line = "data plane: train continues without source 'chat': no tokens within"
        until(lambda: line in (place / "log").read_text())
        assert (place / "log").read_text().count(line) == 1
        ranks[0].process.terminate()
        assert [one.wait(START_S) for one in ranks] == [0, 0], ranks[0].text()
        text = ranks[0].text()
    assert processes_of(place) == []
    why = rf"source 'chat' has failed \(no tokens within {TIMEOUT_S} s: \S+ has not answered"
    (line,) = [line for line in text.splitlines() if "the run goes on without it" in line]
    assert re.match(rf"{why} for \d+ s\): the run goes on without it, its share goes to", line)
    left_out = [int(number) for number in re.findall(rf"{why}.*\): (\d+) of its sequences", text)]
    (in_all,) = map(int, re.findall(r"(\d+) of its sequences were drawn and are not tr", line))
    assert in_all == sum(left_out) > 0

    steps = [json.loads(one) for one in (folder / "metrics.jsonl").read_text().splitlines()]
    tokens = [one["sources"]["chat"]["tokens"] for one in steps]
    assert tokens[0] > 0 and tokens[-1] == 0
    assert all(one["sources"]["web"]["tokens"] for one in steps[-3:])
    assert {one["skipped_documents"] for one in steps} == {0}

    again = run(folder, train_iters=len(steps) + 4, load=folder / "saved")
    with started(2, folder, train, "0:10001:none", again, folder / "acted") as ranks:
        assert [one.wait(START_S) for one in ranks] == [0, 0], ranks[0].text()
    after = [json.loads(one) for one in (folder / "metrics.jsonl").read_text().splitlines()]
    assert sum(one["sources"]["chat"]["tokens"] for one in after[len(steps) :]) > 0
