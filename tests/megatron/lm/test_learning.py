"""A stock checkout learns while it trains, and its checkpoints hold what it has learnt."""

import json

import pytest

from tests.megatron.lm.runs import HDP, LENGTHS, MARKS, drive, planned, require_same, scalars
from tests.support.gradients import write_corpus

pytestmark = [*MARKS, pytest.mark.slow]


def test_it_learns_and_goes_on(tmp_path):
    write_corpus(tmp_path, LENGTHS)
    hdp = [*HDP, "200"]

    def run(name, *flags, **more):
        return planned(tmp_path, name, 2, [*hdp, *flags], **more)

    def learning(name, *flags, **more):
        metrics = ["--metrics-path", str(tmp_path / f"{name}.jsonl")]
        flags = ["--hdp-cost-model", "online", *metrics, *flags]
        return run(name, *flags, steps=8, save="saved", **more)

    runs = [learning("first", "--exit-interval", "6"), learning("second", load="saved")]
    drive(tmp_path, [run("plain", steps=8), *runs])
    first, second = (
        [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("first", "second")
    )
    assert first[0]["cost_model_changes"] == 0 and first[-1]["cost_model_changes"] >= 1
    assert [one["step"] for one in second] == [7, 8]
    assert second[0]["cost_model_changes"] >= first[-1]["cost_model_changes"]
    log = (tmp_path / "log first.0").read_text()
    assert "cost model corrected after step " in log and "dropped" not in log
    expected = scalars(tmp_path, "plain")
    require_same(scalars(tmp_path, "second"), expected, rel=1e-4, steps=(7, 8))
