"""Losses of preferences in the training command: exact on any plan, their reference kept."""

import os
import signal
from contextlib import nullcontext
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_hdp.data import TokenFile
from megatron_hdp.data.mixture import Position
from megatron_hdp.megatron import parallel
from megatron_hdp.megatron.model import building
from megatron_hdp.megatron.options import parse_arguments
from megatron_hdp.megatron.step import HdpSteps, ReferenceSums, open_split, setup, split_specs
from megatron_hdp.runtime.timeline import Timeline
from megatron_hdp.training.loop import pretrain
from tests.data.prepare.corpora import run as prepare_rows
from tests.docs.pages import all_commands, split
from tests.support import gradients
from tests.support.gradients import VOCABULARY, largest_error, whole_gradients
from tests.support.preferences import (
    REFERENCED,
    expected_step,
    preference_arguments,
    write_rows,
)
from tests.support.random_plans import random_plan

SLOW = pytest.mark.slow
KINDS = {
    "dpo": {"hdp_label_smoothing": 0.1},
    "ipo": {"hdp_beta": 0.3},
    "orpo": {"hdp_beta": 0.7},
    "simpo": {"hdp_beta": 2.0},
    "kto": {"hdp_desirable_weight": 1.5, "hdp_undesirable_weight": 0.5},
}


def prepared(path, kind="pairs"):
    """Rows as a .bin/.idx pair, which any objective takes that its sides allow."""
    return prepare_rows(path, path.parent / "cache", format=kind).prefix


def steps_of(arguments):
    """Chunks and steps over the training split, in a job whose groups are there."""
    parallel.set_seeds(arguments.seed)
    chunks = building.build_chunks(arguments, VOCABULARY)
    executor = setup.build_executor(arguments, chunks, Timeline())
    cost_model = setup.cost_model_of(arguments, executor)
    corpus = open_split(arguments, split_specs(arguments)["train"])
    return chunks, HdpSteps(arguments, executor, cost_model, corpus, VOCABULARY)


def planned_at_random(seed):
    """Within the block all steps run random plans; None: the strategy's."""
    if seed is None:
        return nullcontext()

    def made(problem, *_, **__):
        capacity = {"ranks": problem.ranks, "tokens_per_rank": problem.tokens_per_rank}
        return random_plan(problem.lengths, **capacity, seed=seed)

    return mock.patch("megatron_hdp.data.steps.planning.make_plan", made)


@gradients.seldom_compiled
def errors_of(arguments, kinds, seeds=(None, 0), fault=None, left_out=()):
    """Body of a rank: by kind and plan the largest error of loss, rewards and gradient."""
    parallel.initialise(arguments)
    found = {}
    for kind in kinds:
        mine = replace(arguments, hdp_objective=kind, **KINDS[kind])
        for seed in seeds:
            chunks, steps = steps_of(mine)
            known = None
            if kind in REFERENCED:
                known = given_reference(steps)
            if fault is not None:
                steps.preferences.judged = fault(steps.preferences.judged)
            for chunk in chunks:
                chunk.zero_grad_buffer()
            with planned_at_random(seed):
                report = steps.run(Position())
            steps.close()
            found[kind, seed] = mine, report, whole_gradients(chunks, mine), known
            corpus, mixture = steps.corpus, steps.planner.mixture
    parallel.finish()
    parallel.initialise(gradients.stock(arguments))
    if dist.get_rank():
        return None
    errors = {}
    for case, (mine, report, grads, known) in found.items():
        loss, expected, rewards = expected_step(mine, corpus, mixture, known, left_out)
        errors[case] = largest_error((report.loss, grads), (loss, expected))
        if mine.hdp_objective in ("dpo", "ipo"):
            assert report.pairs == len(rewards) // 2
        if mine.hdp_objective == "dpo":
            c, r = rewards.view(-1, 2).unbind(1)
            figures = [report.chosen_reward, report.rejected_reward, report.reward_margin]
            means = [c.mean(), r.mean(), (c - r).mean()]
            assert np.allclose(figures, means, rtol=0, atol=1e-10)
            assert report.reward_accuracy == pytest.approx(float((c > r).double().mean()))
        (of_source,) = report.sources.values()
        assert of_source.loss == pytest.approx(report.loss, abs=1e-12)
    return errors


def given_reference(steps):
    """Sums of the step's answers near the model's own, put where a pass would have put them."""
    steps.preferences.hold(ReferenceSums("a model"))
    table = steps.answers(Position())
    noise = np.random.default_rng(5).standard_normal(len(table.sums))
    sums = table.sums + torch.from_numpy(noise)
    keys = zip(table.sources.tolist(), table.documents.tolist(), strict=True)
    known = {(int(i), int(d)): float(one) for (i, d), one in zip(keys, sums, strict=True)}
    other = table.unrelated
    if other is not None:  # less, so that there is a divergence
        other = replace(other, sums=other.sums + torch.from_numpy(noise) - 2)
        known[None] = other.sums.tolist()
    steps.preferences.note(replace(table, sums=sums, unrelated=other))
    return known


def check(errors, count):
    assert len(errors) == count
    assert not {case: one for case, one in errors.items() if not one <= 1e-10}


@pytest.mark.parametrize(
    "kinds",  # a session's test has the others
    [("dpo", "simpo", "kto"), pytest.param(tuple(KINDS), marks=SLOW)],
    ids=["some", "all"],
)
def test_gradients_are_those_of_one_rank_that_holds_all_pairs(run_ranks, tmp_path, kinds):
    prefix = prepared(write_rows(tmp_path / "rows.jsonl", 8))
    errors = run_ranks(3, errors_of, preference_arguments(prefix), kinds, (0,))[0]
    check(errors, len(kinds))


LAYOUTS = {
    "tp2": (2, {"tensor_model_parallel_size": 2, "make_vocab_size_divisible_by": 64}),
    "tp2-sp-pp2": (
        4,
        {
            "tensor_model_parallel_size": 2,
            "sequence_parallel": True,
            "pipeline_model_parallel_size": 2,
            "make_vocab_size_divisible_by": 64,
        },
    ),
    "pp2-v2": (
        4,
        {
            "pipeline_model_parallel_size": 2,
            "num_layers": 4,
            "num_virtual_stages_per_pipeline_rank": 2,
        },
    ),
    "pp2-parts": (4, {"pipeline_model_parallel_size": 2, "hdp_sequence_parts": 4}),
    "streams": (2, {"hdp_long_sequence": "stream", "hdp_tokens_per_rank": 48}),
}


@SLOW
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(run_ranks, tmp_path, layout):
    ranks, flags = LAYOUTS[layout]
    prefix = prepared(write_rows(tmp_path / "rows.jsonl", 8))
    arguments = preference_arguments(prefix, **({"hdp_tokens_per_rank": 200} | flags))
    check(run_ranks(ranks, errors_of, arguments, tuple(KINDS), (None,))[0], 5)


@SLOW
def test_labelled_answers(run_ranks, tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", 8, labelled=True)
    check(run_ranks(3, errors_of, preference_arguments(path), ("kto",), (None, 0, 1))[0], 3)


def of_one_side_less(judged):
    """Loses what the last answer learns, as a pair cut by a micro-batch would."""

    def with_fault(*args):
        found = judged(*args)
        found.own_loss.weights[-1] = 0
        return found

    return with_fault


def of_no_divergence(judged):
    """Forgets what kto measures against."""
    return lambda table, *rest: judged(replace(table, unrelated=None), *rest)


@SLOW
def test_a_side_that_is_lost_is_seen(run_ranks, tmp_path):
    prefix = prepared(write_rows(tmp_path / "rows.jsonl", 8))
    arguments = preference_arguments(prefix)
    errors = run_ranks(2, errors_of, arguments, ("dpo", "kto"), (None,), of_one_side_less)[0]
    errors |= run_ranks(2, errors_of, arguments, ("kto",), (0,), of_no_divergence)[0]
    assert len(errors) == 3
    assert all(one > 1e-4 for one in errors.values()), errors


@SLOW
def test_a_corrupt_side_takes_its_pair_out(run_ranks, tmp_path):
    """Whichever rank reads it; the others of the step are trained as they are."""
    prefix = prepared(write_rows(tmp_path / "rows.jsonl", 8))
    begin = int(TokenFile(prefix).begins[5])
    with open(f"{prefix}.bin", "r+b") as file:
        file.seek(2 * begin)
        file.write(np.array([60_000], dtype=np.uint16).tobytes())
    (tmp_path / "cache" / f"{prefix.rpartition('/')[-1]}.sums").unlink()
    arguments = preference_arguments(prefix)
    kinds = ("dpo", "simpo", "kto")
    check(run_ranks(3, errors_of, arguments, kinds, (None, 0), None, (5,))[0], 6)


def curve(arguments, computes=True):
    """Body of a rank: figures of every step; `computes`: whether the reference may run."""
    with pytest.MonkeyPatch.context() as patch:
        if not computes:
            patch.setattr(HdpSteps, "answers", None)
        found = pretrain(arguments)
    names = ("step", "loss", "grad_norm", "chosen_reward", "rejected_reward")
    figures = np.array([[getattr(one, name) for name in names] for one in found])
    last = found[-1]
    has_accuracy = last.validation_loss is not None and arguments.hdp_objective != "kto"
    assert not has_accuracy or 0 <= last.validation_reward_accuracy <= 1
    return figures, [one.validation_loss for one in found], last.reward_accuracy


def test_a_run_and_its_reference(run_ranks, tmp_path):
    """The same on one rank and on two; the reference is computed once for all of them."""
    path, base, folder = (
        write_rows(tmp_path / "rows.jsonl", 24),
        tmp_path / "base",
        tmp_path / "run",
    )
    arguments = preference_arguments(path, "orpo", train_iters=1, save=base)
    run_ranks(1, curve, replace(arguments, hdp_tokens_per_rank=400))
    sums = folder / "reference-log-probs.npz"
    mine = {"pretrained_checkpoint": base, "hdp_reference_checkpoint": base, "split": "3,1,0"}
    mine |= {"eval_iters": 2, "eval_interval": 2, "train_iters": 6, "lr_decay_iters": 6}
    mine = preference_arguments(path, **mine)
    expected, evaluated, accuracy = run_ranks(1, curve, replace(mine, hdp_tokens_per_rank=400))[0]
    assert expected[0, 1] == pytest.approx(np.log(2), abs=1e-12), "it begins as its reference"
    assert expected[-1, 1] < 0.6 and accuracy > 0.8
    assert [one is None for one in evaluated] == [True, False] * 3
    first, *_ = run_ranks(2, curve, replace(mine, train_iters=3, save=folder))[0]
    rest, more, _ = run_ranks(2, curve, replace(mine, load=folder, save=folder))[0]
    assert np.abs(np.concatenate((first, rest)) - expected).max() <= 1e-9
    assert np.allclose(more[::2], evaluated[3::2], rtol=0, atol=1e-9)
    again = replace(mine, hdp_reference_checkpoint=None, hdp_reference_log_probs=sums)
    again = replace(again, train_iters=2, hdp_tokens_per_rank=400)
    found, *_ = run_ranks(1, curve, again, False)[0]
    assert np.abs(found - expected[:2]).max() <= 1e-9


def test_the_command_of_the_page_is_taken():
    (command,) = [one for one in all_commands() if "pairs.jsonl" in one.text]
    _, argv = split(command.text)
    found = parse_arguments(argv[argv.index("megatron_hdp.pretrain_gpt") + 1 :])
    assert (found.hdp_objective, found.long_documents) == ("dpo", "error")


def refusal(arguments):
    """Body of a rank: the sentence that a run ends with."""
    try:
        pretrain(arguments)
    except ValueError as error:
        return str(error)
    return None


@SLOW
def test_references_that_do_not_fit(run_ranks, tmp_path):
    """One sentence; what was there stays as it was."""
    path, bases = write_rows(tmp_path / "rows.jsonl", 16), [tmp_path / "a", tmp_path / "b"]
    whole = preference_arguments(path, "orpo", train_iters=1, hdp_tokens_per_rank=400)
    for seed, base in enumerate(bases):
        run_ranks(1, curve, replace(whole, save=base, seed=seed))
    sums, other = tmp_path / "sums.npz", write_rows(tmp_path / "others.jsonl", 16, seed=1)
    mine = {"hdp_objective": "dpo", "pretrained_checkpoint": bases[0], "train_iters": 1}
    mine |= {"hdp_reference_checkpoint": bases[0], "hdp_reference_log_probs": sums}
    mine = replace(whole, **mine)
    run_ranks(1, curve, mine)
    kept = sums.read_bytes()
    damaged, alone = tmp_path / "damaged.npz", replace(mine, hdp_reference_checkpoint=None)
    damaged.write_bytes(kept[:200])
    labelled = write_rows(tmp_path / "labelled.jsonl", 16, labelled=True)
    labelled = prepared(labelled, "labelled")
    texts = gradients.write_corpus(tmp_path, [30, 20])
    runs = [
        ("another model", replace(mine, hdp_reference_checkpoint=bases[1])),
        ("found no log-probabilities of some", replace(alone, data_path=(str(other),))),
        ("found no log-probabilities of some", replace(alone, train_iters=2)),
        ("found no such file", replace(alone, hdp_reference_log_probs=tmp_path / "none.npz")),
        ("found no file of reference log-probab", replace(mine, hdp_reference_log_probs=damaged)),
        ("found no checkpoint", replace(mine, hdp_reference_checkpoint=tmp_path / "none")),
        ("found a source of labelled", replace(mine, data_path=(labelled,))),
        ("found a source of tokens", replace(mine, data_path=(texts,))),
        ("add --hdp-objective", replace(mine, hdp_objective=None, data_path=(labelled,))),
    ]
    for words, arguments in runs:
        found = run_ranks(1, refusal, arguments)[0]
        assert found is not None and words in found, (words, found)
        assert sums.read_bytes() == kept
    longer = replace(mine, train_iters=2, lr_decay_iters=2)
    assert len(run_ranks(1, curve, longer)[0][0]) == 2, "what the file lacks is computed"
    assert (
        len(run_ranks(1, curve, replace(longer, hdp_reference_checkpoint=None), False)[0][0]) == 2
    )


@SLOW
def test_adapters_measure_against_their_base(run_ranks, tmp_path):
    path, base = write_rows(tmp_path / "rows.jsonl", 16), tmp_path / "base"
    whole = preference_arguments(path, "orpo", train_iters=1)
    run_ranks(2, curve, replace(whole, save=base))
    adapters = {"lora_rank": 2, "lora_alpha": 8.0, "pretrained_checkpoint": base}
    mine = replace(whole, hdp_objective="dpo", train_iters=3, lr_decay_iters=3, **adapters)
    found, *_ = run_ranks(2, curve, replace(mine, save=tmp_path / "run"))[0]
    assert found[0, 1] == pytest.approx(np.log(2), abs=1e-12)
    assert found[-1, 1] < found[0, 1]
    given = replace(mine, hdp_reference_checkpoint=base)
    assert np.abs(run_ranks(2, curve, given)[0][0] - found).max() <= 1e-12
    resumed = replace(mine, load=tmp_path / "run", train_iters=5)
    more, *_ = run_ranks(2, curve, resumed)[0]
    assert more[0, 1] < found[0, 1] - 1e-3, "the reference has no adapters"


@SLOW
def test_experts_on_other_ranks(run_ranks, tmp_path):
    """What their routers add is a mean over tokens, whatever the objective divides by."""
    path = write_rows(tmp_path / "rows.jsonl", 24)
    flags = gradients.EXPERTS | {"hdp_tokens_per_rank": 400}
    alone = preference_arguments(path, "simpo", **flags)
    expected, *_ = run_ranks(1, curve, alone)[0]
    apart = replace(alone, expert_model_parallel_size=2, hdp_tokens_per_rank=128)
    found, *_ = run_ranks(2, curve, apart)[0]
    assert np.abs(found - expected).max() <= 1e-9


@SLOW
def test_the_data_plane_gives_the_same_steps(run_ranks, tmp_path):
    pytest.importorskip("ray", reason="no Ray: pip install 'megatron-hdp[ray]'")
    path, base = write_rows(tmp_path / "rows.jsonl", 24), tmp_path / "base"
    run_ranks(2, curve, preference_arguments(path, "orpo", train_iters=1, save=base))
    data = tmp_path / "data.yaml"
    data.write_text(f"sources:\n  a: {{path: {path}, format: pairs}}\nvalidation: {{a: 4}}\n")
    mine = {"hdp_data": data, "data_path": (), "pretrained_checkpoint": base}
    mine |= {"hdp_reference_checkpoint": base, "eval_iters": 1, "eval_interval": 2}
    local = preference_arguments(path, "kto", **mine)
    expected = run_ranks(2, curve, local)[0]
    found = run_ranks(2, curve, replace(local, hdp_loaders="ray"), timeout_s=900)[0]
    assert np.array_equal(found[0], expected[0]) and found[1:] == expected[1:]


def stopped(arguments):
    """Body of a rank: steps of a run whose first rank is asked to end while the reference runs."""
    answers = HdpSteps.answers

    def asked(self, position, *following):
        if dist.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return answers(self, position, *following)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HdpSteps, "answers", asked)
        return len(pretrain(arguments))


@SLOW
def test_a_reference_that_is_interrupted(run_ranks, tmp_path):
    """What it has said is kept; the run that follows computes the rest."""
    path, base = write_rows(tmp_path / "rows.jsonl", 24), tmp_path / "base"
    run_ranks(2, curve, preference_arguments(path, "orpo", train_iters=1, save=base))
    mine = {"pretrained_checkpoint": base, "hdp_reference_checkpoint": base, "train_iters": 3}
    mine = preference_arguments(path, lr_decay_iters=3, **mine)
    expected, *_ = run_ranks(2, curve, mine)[0]
    kept = replace(mine, save=tmp_path / "run")
    assert run_ranks(2, stopped, kept) == [0, 0]
    (known,) = ReferenceSums.read(tmp_path / "run" / "reference-log-probs.npz")._sums.values()
    assert np.isfinite(known).sum() == 16
    assert np.array_equal(run_ranks(2, curve, kept)[0][0], expected)
