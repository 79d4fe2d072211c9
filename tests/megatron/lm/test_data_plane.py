"""The data plane in a stock checkout: the run is that of in-process loaders, bit for bit."""

import json

import pytest

from tests.megatron.lm.runs import HDP, MARKS, drive, planned
from tests.support.sources import WEIGHTS, data_file, write_sources

pytest.importorskip("ray", reason="no Ray: pip install 'megatron-hdp[ray]'")
pytestmark = [*MARKS, pytest.mark.slow]


def test_the_same_run(tmp_path):
    folder = write_sources(tmp_path)
    path = data_file(folder, WEIGHTS + "\nvalidation: {web: 2, chat: 1}\nloaders: {shadows: 1}")
    data = ["--hdp-data", str(path)]

    def run(name, *flags):
        flags = [*HDP, "60", "--metrics-path", str(folder / f"{name}.jsonl"), *flags]
        return planned(folder, name, 2, flags, data=data)

    drive(folder, [run("local"), run("ray", "--hdp-loaders", "ray")])
    local, ray = (
        [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        for name in ("local", "ray")
    )
    assert len(local) == len(ray) == 4
    for one, other in zip(local, ray, strict=True):
        for key in ("loss", "grad_norm", "tokens", "sources", "validation_loss", "ring_bytes"):
            assert one[key] == other[key]
        assert one["loaders"] is None and other["loaders"] >= 2 * 3
    log = (folder / "log ray.0").read_text()
    assert "data plane: hdp-data-" in log
