"""Runs over several sources: figures by source, resumption, sources that come, go and end.

And with functions of the user's own as primitives, the documented example first.
"""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_hdp.data.spans import SpansWriter
from megatron_hdp.megatron.step import split_specs
from tests.support.gradients import write_corpus
from tests.support.ranks import RankError
from tests.support.sources import LENGTHS, WEIGHTS, data_file, write_sources
from tests.training.runs import largest_difference, lines_of, mixed_run, run, trained


@pytest.fixture
def folder(tmp_path):
    return write_sources(tmp_path)


def test_figures_by_source(run_ranks, folder):
    path = folder / "metrics.jsonl"
    (found, _), *_ = run_ranks(3, trained, mixed_run(folder, metrics_path=path))
    records = lines_of(path)
    weights, drawn = {"web": 0.5, "chat": 0.2, "code": 0.3}, dict.fromkeys(LENGTHS, 0)
    for metrics, record in zip(found, records, strict=True):
        sources = record["sources"]
        assert list(sources) == list(LENGTHS)
        keys = ["tokens", "loss_tokens", "loss", "share", "epoch", "bad", "pairs"]
        assert all(list(one) == keys for one in sources.values())
        for name in drawn:
            drawn[name] += sources[name]["tokens"]
        total = sum(drawn.values())
        assert [one["share"] for one in sources.values()] == pytest.approx(
            [amount / total for amount in drawn.values()]
        )
        for name, weight in weights.items():
            assert abs(drawn[name] - weight * total) <= max(map(max, LENGTHS.values()))
        # what sources lost is what the step lost
        loss = sum(one["loss_tokens"] * (one["loss"] or 0) for one in sources.values())
        assert loss / record["loss_tokens"] == pytest.approx(metrics.loss, rel=1e-12)
        for key in ("tokens", "loss_tokens"):
            assert sum(one[key] for one in sources.values()) == record[key]
        assert all((one["loss"] is None) == (one["loss_tokens"] == 0) for one in sources.values())
    assert {one["sources"]["web"]["epoch"] for one in records} == {0, 1}


@pytest.mark.slow
def test_losses_by_source_do_not_depend_on_the_layout(run_ranks, folder):
    settings = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
    few = mixed_run(folder, train_iters=2)
    (one, _), *_ = run_ranks(1, trained, few)
    (other, _), *_ = run_ranks(4, trained, replace(few, **settings, expert_tensor_parallel_size=2))
    for here, there in zip(one, other, strict=True):
        for name in LENGTHS:
            expected, found = here.sources[name], there.sources[name]
            assert replace(found, loss=None) == replace(expected, loss=None)
            assert (found.loss or 0) == pytest.approx(expected.loss or 0, rel=1e-9)


@pytest.mark.slow
def test_a_run_goes_on_exactly_on_other_ranks(run_ranks, folder):
    whole = mixed_run(folder, save=folder / "saved", save_interval=3)
    (expected, _), *_ = run_ranks(2, trained, whole)
    resumed = replace(whole, save=None, save_interval=None, load=folder / "saved", ckpt_step=3)
    (found, log), *_ = run_ranks(3, trained, resumed)
    assert [one.step for one in found] == [4, 5, 6]
    for one, other in zip(found, expected[3:], strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-9)
        assert replace(one.sources["web"], loss=None) == replace(other.sources["web"], loss=None)
    assert "new to this run" not in log


def test_sources_come_and_go_on_resume(run_ranks, folder):
    two = data_file(folder, "", names=("web", "code"), name="two.yaml")
    began = mixed_run(folder, two, train_iters=3, save=folder / "saved")
    run_ranks(1, trained, began)
    heavier = "schedule: [{from: 0, weights: {chat: 0.9, code: 0.1}}]"
    other = data_file(folder, heavier, names=("chat", "code"), name="other.yaml")
    goes_on = replace(began, hdp_data=other, load=folder / "saved", train_iters=5)
    (found, log), *_ = run_ranks(2, trained, goes_on)
    assert "sources that are new to this run: 'chat'" in log
    assert "no longer draws from: 'web'; their positions are kept" in log
    assert [one.step for one in found] == [4, 5]
    assert set(found[0].sources) == {"chat", "code"}
    # the one that left comes back to where it was
    (found, log), *_ = run_ranks(1, trained, replace(goes_on, hdp_data=two, train_iters=6))
    assert "no longer draws from: 'chat'" in log and "new to this run" not in log


def test_what_must_not_change_is_refused_by_name(run_ranks, folder):
    began = mixed_run(folder, train_iters=1, save=folder / "saved")
    run_ranks(1, trained, began)
    goes_on = replace(began, load=folder / "saved", train_iters=2)
    changes = {
        "weight-unit: sequences\n" + WEIGHTS: "weight-unit: found sequences, expected tokens",
        "validation: {code: 1}\n" + WEIGHTS: r"source 'code', sequences to train on.*found 3, exp",
    }
    for number, (more, message) in enumerate(changes.items()):
        path = data_file(folder, more, name=f"changed{number}.yaml")
        with pytest.raises(RankError, match=message):
            run_ranks(1, trained, replace(goes_on, hdp_data=path))


def test_a_source_that_ends(run_ranks, folder):
    ends = data_file(folder, code="max-epochs: 1", chat="max-epochs: 1", web="max-epochs: 2")
    settings = {"train_iters": 50, "save": folder / "saved", "metrics_path": folder / "m.jsonl"}
    for said in (1, 0):  # the second run finds nothing left to do
        results = run_ranks(2, trained, mixed_run(folder, ends, load=folder / "saved", **settings))
        logs = [log for _, log in results]
        log = logs[0]
        settings["metrics_path"] = None
        assert [one.count("source 'code' ends with this step") for one in logs] == [said, 0]
        assert "every source of the data has ended: the job ends after iteration 7 of 50" in log
    records = lines_of(folder / "m.jsonl")
    assert sum(one["sequences"] for one in records) == 5 + 4 + 2 * 8
    assert (folder / "saved" / "latest_checkpointed_iteration.txt").read_text() == "7"


def test_validation_by_source(run_ranks, folder):
    path = data_file(folder, WEIGHTS + "\nvalidation: {web: 2, chat: 1}")
    arguments = mixed_run(
        folder, path, train_iters=2, eval_iters=2, eval_interval=2, global_batch_size=3
    )
    metrics = folder / "metrics.jsonl"
    (found, _), *_ = run_ranks(2, trained, replace(arguments, metrics_path=metrics))
    assert found[0].validation_sources is None
    losses = found[1].validation_sources
    assert set(losses) == {"web", "chat"}
    assert lines_of(metrics)[1]["validation_sources"] == losses
    assert min(losses.values()) <= found[1].validation_loss <= max(losses.values())


def test_validation_depends_on_no_rank_and_training_does_not_notice_it(run_ranks, tmp_path):
    lengths = [30, 60, 20, 33, 21, 50, 100, 3, 44, 45, 46, 47]
    settings = {"split": "8,4,0", "clip_grad": 0.0, "hdp_tokens_per_rank": 100}
    plain = run(write_corpus(tmp_path, lengths), steps=4, **settings)
    evaluating = replace(plain, eval_iters=2, eval_interval=2)
    (expected, _), (found, _), (on_three, _) = (
        run_ranks(ranks, trained, arguments)[0]
        for ranks, arguments in ((1, plain), (1, evaluating), (3, evaluating))
    )
    assert [one.validation_loss for one in expected] == [None] * 4
    assert [one.loss for one in found] == [one.loss for one in expected]
    losses, losses_on_three = (
        [*(one.loss for one in of_run), *(one.validation_loss for one in of_run[1::2])]
        for of_run in (found, on_three)
    )
    assert largest_difference(losses_on_three, losses) <= 1e-10
    assert losses[-1] < losses[-2] < 8
    assert [one.validation_loss for one in found[::2]] == [None, None]


def test_a_step_without_loss_names_its_sources(run_ranks, folder):
    (folder / "mute").mkdir()
    write_corpus(folder / "mute", [5, 6, 7])
    with SpansWriter(folder / "mute" / "corpus.spans") as writer:
        for _ in range(3):
            writer.add([])
    path = data_file(folder, "", names=("mute",))
    with pytest.raises(RankError, match="no token with loss in the 4 sequences of step 1.* mute"):
        run_ranks(1, trained, mixed_run(folder, path))


def test_a_blend_of_flags(run_ranks, folder):
    words = ("3", str(folder / "web" / "corpus"), "1", str(folder / "code" / "corpus"))
    blend = mixed_run(folder, hdp_data=None, data_path=words, split="1,0,0", train_iters=8)
    (found, _), *_ = run_ranks(1, trained, blend)
    drawn = [sum(one.sources[words[i]].tokens for one in found) for i in (1, 3)]
    assert abs(drawn[0] - 0.75 * sum(drawn)) <= 100


def test_a_blend_without_hdp_is_megatrons(run_ranks, folder):
    """Sources of stock training are blended by Megatron's own builder."""
    words = tuple(f"{folder}/{name}/corpus" for name in ("web", "code"))
    blend = ("3", words[0], "1", words[1])
    stock = {"hybrid_data_parallel": False, "hdp_tokens_per_rank": None, "hdp_data": None}
    stock |= {"seq_length": 32, "max_position_embeddings": 32, "train_iters": 2, "split": "1,0,0"}
    curves = [
        [
            one.loss
            for one in run_ranks(1, trained, mixed_run(folder, data_path=given, **stock))[0][0]
        ]
        for given in (blend, blend, words)
    ]
    assert curves[0] == curves[1] != curves[2]
    with pytest.raises(RankError, match="--sft, .* go with --hybrid-data-parallel"):
        run_ranks(1, trained, mixed_run(folder, data_path=words, sft=True, **stock))


EXAMPLE = Path(__file__).parents[2] / "configs/primitives/follow_the_loss.py"
OTHERS = """
import numpy as np
from megatron_hdp.planner import plan

def cost(lengths):
    return 1e-6 * lengths + 1e-8 * np.minimum(lengths, 32).astype(float) * lengths

def balance(lengths, settings):
    return plan(lengths, ranks=settings.num_ranks, tokens_per_rank=settings.tokens_per_rank,
                strategy="naive", max_length=settings.max_length, cost_model=settings.cost_model,
                slice_multiple=settings.slice_multiple)

def distribute(made, position, settings):
    return (np.arange(made.num_ranks) + position.steps) % made.num_ranks

def broadcast_at(from_plane):
    return ["tensor"] if from_plane else []

def broken(weights, position, losses):
    return {"web": losses[0]["nowhere"]}
"""


def with_primitives(folder, primitives, **overrides):
    """A run with functions of others' files, or without."""
    shutil.copy(EXAMPLE, folder)
    (folder / "others.py").write_text(OTHERS)
    more = f"{WEIGHTS}\nprimitives: {{{primitives}}}" if primitives else WEIGHTS
    path = data_file(folder, more)
    return mixed_run(folder, path, steps=8, **({"global_batch_size": 6} | overrides))


def tokens(found):
    return [{name: one.tokens for name, one in step.sources.items()} for step in found]


MIX = "mix: follow_the_loss.py:mix, losses-behind: 2"


def test_a_mixture_follows_the_loss_and_a_run_goes_on_exactly(run_ranks, folder):
    whole = with_primitives(folder, MIX, save=folder / "saved", save_interval=5)
    (expected, _), *_ = run_ranks(2, trained, whole)
    (plain, _), *_ = run_ranks(2, trained, with_primitives(folder, ""))
    assert tokens(expected)[:2] == tokens(plain)[:2]  # too early to tell
    assert tokens(expected) != tokens(plain)
    resumed = replace(whole, save=None, save_interval=None, load=folder / "saved", ckpt_step=5)
    (found, _), *_ = run_ranks(2, trained, resumed)
    assert [(one.step, one.loss) for one in found] == [(one.step, one.loss) for one in expected[5:]]
    assert tokens(found) == tokens(expected)[5:]


def test_code_is_refused_by_a_flag(folder):
    with pytest.raises(ValueError, match="mix: found '.*py:mix' with --no-primitives"):
        split_specs(with_primitives(folder, MIX, hdp_primitives=False))


@pytest.mark.slow
def test_the_others_change_the_plan_and_not_what_is_learnt(run_ranks, folder):
    named = (
        "cost: others.py:cost, balance: others.py:balance, distribute: others.py:distribute, "
        "broadcast-at: others.py:broadcast_at"
    )
    layout = {"tensor_model_parallel_size": 2, "train_iters": 3}
    (expected, _), *_ = run_ranks(4, trained, with_primitives(folder, "", **layout))
    (found, _), *_ = run_ranks(4, trained, with_primitives(folder, named, **layout))
    assert tokens(found) == tokens(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-9)
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-9)
    planned = [one.planned_efficiency for one in found]
    assert planned != [one.planned_efficiency for one in expected]


def test_a_function_that_fails_ends_the_run_with_its_place(run_ranks, folder):
    with pytest.raises(RankError) as caught:
        run_ranks(1, trained, with_primitives(folder, "mix: others.py:broken, losses-behind: 2"))
    assert "others.py:broken raised IndexError: list index out of range in " in str(caught.value)


@pytest.mark.slow
def test_a_data_plane_follows_alike(run_ranks, folder):
    pytest.importorskip("ray", reason="no Ray: pip install 'megatron-hdp[ray]'")
    named = f"{MIX.replace('2', '4')}, distribute: others.py:distribute, cost: others.py:cost"
    local = with_primitives(folder, named)
    (expected, _), *_ = run_ranks(2, trained, local)
    (found, _), *_ = run_ranks(2, trained, replace(local, hdp_loaders="ray"))
    assert tokens(found) == tokens(expected)
    assert [(one.loss, one.grad_norm) for one in found] == [
        (one.loss, one.grad_norm) for one in expected
    ]
