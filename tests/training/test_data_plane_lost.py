"""A run whose data plane is lost ends at once, says so, and goes on from its checkpoint."""

import json
import re
import time
from pathlib import Path

import psutil
import pytest

from tests.support.plane import processes_of
from tests.support.processes import started
from tests.training.faults import train
from tests.training.test_survival import START_S, flags, folder

pytest.importorskip("ray", reason="no Ray: pip install 'megatron-hdp[ray]'")
pytestmark = pytest.mark.slow

__all__ = ["folder"]  # a fixture


@pytest.mark.parametrize("what", ["megatron_hdp.data_plane.host", "gcs_server"])
def test_the_job_stops_and_resumes(folder, what):
    path = folder / "metrics.jsonl"
    settings = {"save": folder / "saved", "save_interval": 2, "metrics_path": path}
    settings |= {"hdp_loaders": "ray", "lr_decay_iters": 1000, "hdp_tokens_per_rank": 60}
    long = flags(folder, train_iters=1000, **settings)
    with started(2, folder, train, "0:1001:none", long, folder / "acted") as ranks:
        ranks[0].wait_for(" iteration        5/", START_S)
        (place,) = re.findall(r"its log is (\S+)/log", ranks[0].text())
        host = json.loads((Path(place) / "status.json").read_text())["pid"]
        processes = [psutil.Process(host), *psutil.Process(host).children(recursive=True)]
        (victim,) = (one for one in processes if any(what in w for w in one.cmdline()[:4]))
        victim.kill()
        deadline = time.monotonic() + 60
        codes = [one.wait(deadline - time.monotonic()) for one in ranks]
        assert codes == [3, 3], [one.text() for one in ranks]
        assert any("asked the node's data plane for 'get'" in one.text() for one in ranks)
    assert processes_of(Path(place)) == []
    step = int((folder / "saved" / "latest_checkpointed_iteration.txt").read_text())
    short = flags(folder, train_iters=step + 2, load=folder / "saved", **settings)
    before = [json.loads(line)["loss"] for line in path.read_text().splitlines()][: step + 2]
    with started(2, folder, train, "0:1001:none", short, folder / "acted") as ranks:
        assert [one.wait(START_S) for one in ranks] == [0, 0], ranks[0].text()
    after = [json.loads(line) for line in path.read_text().splitlines()]
    again = {one["step"]: one["loss"] for one in after[-2:]}
    assert list(again) == [step + 1, step + 2]
    for number, loss in again.items():
        if number <= len(before):
            assert loss == before[number - 1]
