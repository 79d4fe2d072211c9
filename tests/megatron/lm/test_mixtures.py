"""Several sources in a stock checkout: the same steps on any ranks, resumed, until they end."""

import json
import shutil
from functools import partial
from pathlib import Path

import pytest

from tests.data.chat import tiny_tokenizer
from tests.megatron.lm.runs import HDP, MARKS, drive, planned, scalars
from tests.support.sources import LENGTHS, WEIGHTS, data_file, write_sources

pytestmark = [*MARKS, pytest.mark.slow]  # by default: tests/training/test_mixture.py
EXAMPLE = Path(__file__).parents[3] / "configs/primitives/follow_the_loss.py"
ENDING = dict.fromkeys(LENGTHS, "max-epochs: 1")
VALIDATED = WEIGHTS + "\nvalidation: {web: 2, chat: 1}"


def mixed(folder, name, ranks=1, capacity=256, flags=(), data="data.yaml", **more):
    """A run whose data a file of several sources names."""
    path = folder / data
    flags = [*HDP, str(capacity), "--metrics-path", str(folder / f"{name}.jsonl"), *flags]
    return planned(folder, name, ranks, flags, data=["--hdp-data", str(path)], **more)


def common_plan(folder):
    data_file(write_sources(folder), VALIDATED)
    return [
        mixed(folder, "half", 2, 60, ["--exit-interval", "2"], save="halves"),
        mixed(folder, "whole"),
        mixed(folder, "rest", load="halves"),
    ]


@pytest.fixture(scope="module")
def more(runs):
    """Sources that end, weights that follow the loss, conversations."""
    shutil.copy(EXAMPLE, runs)
    data = f"{WEIGHTS}\nprimitives: {{mix: {EXAMPLE.name}:mix, losses-behind: 2}}"
    data_file(runs, data, name="follow.yaml")
    data_file(runs, "", name="ends.yaml", **ENDING)
    following = partial(mixed, runs, data="follow.yaml")
    again = following("goes on", flags=["--ckpt-step", "2"], load="followed")
    ends = mixed(runs, "ends", 2, 100, data="ends.yaml", steps=40, save="ended")
    drive(runs, [ends, following("follows", save="followed"), again, conversations(runs)])
    return runs


def conversations(folder):
    """A run with ``--sft``, which tokenises its rows when it starts."""
    tiny_tokenizer.write(folder / "tokenizer")
    rows = []
    for i in range(12):
        question, answer = {"role": "user", "content": f"{i}?"}, "hello " * (i + 1)
        rows.append({"messages": [question, {"role": "assistant", "content": answer}]})
    (folder / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = [*HDP, "160", "--sft", "--sft-tokenizer-prompt-format", "nemotron-nano-v2"]
    flags += ["--tokenizer-type", "SFTTokenizer", "--tokenizer-model", str(folder / "tokenizer")]
    flags += ["--metrics-path", str(folder / "sft.jsonl"), "--split", "100,0,0"]
    data = ["--data-path", str(folder / "chat.jsonl")]
    return planned(folder, "sft", 2, flags, data=data, steps=3)


def metrics(folder, name):
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def test_a_run_goes_on_exactly_on_other_ranks(runs):
    whole, half, rest = (metrics(runs, name) for name in ("whole", "half", "rest"))
    assert [one["step"] for one in whole] == [1, 2, 3, 4]
    assert [one["step"] for one in half + rest] == [1, 2, 3, 4]
    for expected, found in zip(whole, half + rest, strict=True):
        assert found["loss"] == pytest.approx(expected["loss"], rel=2e-5)
        for name in LENGTHS:
            one, other = expected["sources"][name], found["sources"][name]
            assert (other.pop("loss") or 0) == pytest.approx(one.pop("loss") or 0, rel=2e-4)
            assert one == other


def test_a_mixture_that_follows_the_loss_goes_on_exactly(more):
    """Losses of before the restart decide what is drawn after it."""
    plain, whole, rest = (metrics(more, name) for name in ("whole", "follows", "goes on"))
    drawn = [{name: one["sources"][name]["tokens"] for name in LENGTHS} for one in whole]
    assert drawn[3] != {name: plain[3]["sources"][name]["tokens"] for name in LENGTHS}
    assert [one["step"] for one in rest] == [3, 4]
    for expected, found in zip(whole[2:], rest, strict=True):
        assert (found["loss"], found["sources"]) == (expected["loss"], expected["sources"])


def test_figures_by_source_reach_megatrons_logs(runs):
    tags = scalars(runs, "whole")
    for step, record in enumerate(metrics(runs, "whole"), 1):
        for name in LENGTHS:
            for key in ("loss", "share", "tokens"):
                expected = record["sources"][name][key]
                found = tags[f"hdp/sources/{name}/{key}"].get(step)
                assert found == (None if expected is None else pytest.approx(expected, rel=1e-6))
    losses = metrics(runs, "whole")[1]["validation_sources"]
    assert set(losses) == {"web", "chat"}
    log = (runs / "log whole.0").read_text()
    assert "loss (share) by source: web " in log


def test_a_run_ends_with_its_data(more):
    records = metrics(more, "ends")
    assert sum(one["sequences"] for one in records) == sum(map(len, LENGTHS.values()))
    log = (more / "log ends.0").read_text()
    assert "every source of the data has ended: the job ends after iteration 3" in log
    assert log.count("source 'code' ends with this step") == 1
    latest = more / "ended" / "latest_checkpointed_iteration.txt"
    assert latest.read_text() == "3"


def test_conversations_by_megatrons_flags(more):
    """Twelve rows, eight a step: an epoch and a half, the loss on the answers alone."""
    records = metrics(more, "sft")
    found = [one["sources"]["chat.jsonl"] for one in records]
    assert [one["sequences"] for one in records] == [8, 8, 8]
    assert [one["epoch"] for one in found] == [0, 0, 1]
    assert all(0 < one["loss_tokens"] < one["tokens"] - 3 * 8 for one in found)
    assert list((more / "hdp-cache").glob("chat.jsonl-*.spans"))


def test_the_data_plane_gives_the_same_run_bit_for_bit(runs):
    pytest.importorskip("ray", reason="no Ray: pip install 'megatron-hdp[ray]'")
    data_file(runs, VALIDATED + "\nloaders: {shadows: 1}", name="plane.yaml")
    run = partial(mixed, runs, ranks=2, capacity=60, data="plane.yaml")
    drive(runs, [run("local"), run("ray", flags=["--hdp-loaders", "ray"])])
    local, ray = (metrics(runs, name) for name in ("local", "ray"))
    assert len(local) == len(ray) == 4
    for one, other in zip(local, ray, strict=True):
        for key in ("loss", "grad_norm", "tokens", "sources", "validation_loss", "ring_bytes"):
            assert one[key] == other[key]
        assert one["loaders"] is None and other["loaders"] >= 2 * 3
    assert "data plane: hdp-data-" in (runs / "log ray.0").read_text()
