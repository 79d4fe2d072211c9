"""Flags that users of Megatron-LM are used to, on a real checkout: as one rank, so several.

Needs what test_training.py needs. Training is counted in samples, and a step has ever more of them.
"""

import json
from functools import partial

import pytest
import torch
from megatron.core import package_info

from tests.megatron.lm.runs import HDP, LENGTHS, MARKS, drive, planned, require_same, scalars
from tests.megatron.lm.runs import weights as weights_of
from tests.support.gradients import write_corpus

pytestmark = [*MARKS, pytest.mark.slow]

IS_18 = tuple(map(int, package_info.__version__.split(".")[:2])) >= (0, 18)
OF_RELEASE = (
    "--step-batch-size-schedule 0:4,1536:6,3072:8 --eval-global-batch-size 4"
    if IS_18
    else "--rampup-batch-size 4 2 12"
)
SAMPLED = f"--train-samples 30 --lr-decay-samples 60 --log-params-norm {OF_RELEASE}"
SIZES = {1: 4, 2: 4, 3: 6, 4: 8, 5: 8}
NOT_SAMPLED = ["--train-iters", "--lr-decay-iters", *(["--global-batch-size"] if IS_18 else [])]


def by_samples(run):
    """The same run counted in samples, not in steps."""
    arguments = list(run["arguments"])
    for flag in NOT_SAMPLED:
        place = arguments.index(flag)
        del arguments[place : place + 2]
    return run | {"arguments": [*arguments, *SAMPLED.split()]}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """All runs of this file."""
    folder = tmp_path_factory.mktemp("megatron-lm")
    write_corpus(folder, LENGTHS)
    run = partial(planned, folder)
    one, two = [*HDP, "256"], [*HDP, "160"]
    late = [*one, "--ckpt-step", "2"]
    learning = partial(run, ranks=2, steps=8, save="learnt")
    online = [*HDP, "200", "--hdp-cost-model", "online", "--metrics-path"]
    first = [*online, str(folder / "first.jsonl"), "--exit-interval", "6"]
    drive(
        folder,
        [
            by_samples(run("one", 1, one, save="one")),
            by_samples(run("two", 2, two, save="two")),
            by_samples(run("again", 2, [*two, "--ckpt-step", "2"], load="one")),
            run("unclipped", 1, [*one, "--clip-grad", "0"], save="unclipped"),
            run("unclipped two", 2, [*two, "--clip-grad", "0"]),
            run("plain", 1, late, load="unclipped"),
            run("meta", 1, [*late, "--init-model-with-meta-device"], load="unclipped"),
            run("evaluated", 1, [*late, "--skip-train"], load="unclipped"),
            run("evaluated two", 2, [*two, "--ckpt-step", "2", "--skip-train"], load="unclipped"),
            run("learns nothing", 2, [*HDP, "200"], steps=8),
            learning("first", extra=first),
            learning("second", extra=[*online, str(folder / "second.jsonl")], load="learnt"),
        ],
    )
    return folder


def test_the_batch_grows_by_samples_whatever_the_ranks(runs):
    one, two = scalars(runs, "one"), scalars(runs, "two")
    assert one["batch-size"] == two["batch-size"] == SIZES
    require_same(two, one, rel=2e-6, steps=SIZES)
    for tag in ("params-norm", "learning-rate"):
        assert two[tag] == pytest.approx(one[tag], rel=1e-6) and len(one[tag]) == 5


def test_a_growing_batch_resumes_on_other_ranks(runs):
    again = scalars(runs, "again")
    assert again["batch-size"] == {step: SIZES[step] for step in (3, 4, 5)}
    require_same(again, scalars(runs, "one"), rel=2e-6, steps=(3, 4, 5))
    whole, resumed = weights_of(runs, "one", 5), weights_of(runs, "two", 5)
    key = "embedding.word_embeddings.weight"
    found = [one[key] for one in (whole, resumed)]
    assert torch.equal(found[0], found[1]) or (found[0] - found[1]).norm() < 1e-5


def test_gradients_that_are_not_clipped(runs):
    require_same(scalars(runs, "unclipped two"), scalars(runs, "unclipped"), rel=2e-6)


def test_weights_that_are_loaded_need_not_be_made_before(runs):
    plain, meta = scalars(runs, "plain"), scalars(runs, "meta")
    assert meta["lm loss"] == plain["lm loss"] and sorted(meta["lm loss"]) == [3, 4]


def test_evaluation_alone(runs):
    logs = ("log evaluated.0", "log evaluated two.1")  # the last rank prints it
    one, two = ((runs / name).read_text() for name in logs)
    words = "validation loss at iteration 2"
    found = [text[text.index(words) :].split("|")[1].strip() for text in (one, two)]
    assert found[0].startswith("lm loss value: ")
    values = [float(text.split()[-1]) for text in found]
    assert values[0] == pytest.approx(values[1], rel=2e-6)
    assert "lm loss" not in scalars(runs, "evaluated")


def test_it_calibrates_online_and_its_checkpoints_hold_what_was_learnt(runs):
    first, second = (
        [json.loads(line) for line in (runs / f"{name}.jsonl").read_text().splitlines()]
        for name in ("first", "second")
    )
    assert first[0]["cost_model_changes"] == 0 and first[-1]["cost_model_changes"] >= 1
    assert [one["step"] for one in second] == [7, 8]
    assert second[0]["cost_model_changes"] >= first[-1]["cost_model_changes"]
    log = (runs / "log first.0").read_text()
    assert "cost model corrected after step " in log and "dropped" not in log
    expected = scalars(runs, "learns nothing")
    require_same(scalars(runs, "second"), expected, rel=1e-4, steps=(7, 8))
