"""``megatron-hdp data plan``: what it says is what a run draws."""

import json

import numpy as np
import pytest

from megatron_hdp.cli.main import main
from megatron_hdp.data.mixture import BatchSize, Opening, Position, open_corpus, read_data_file
from tests.support.sources import LENGTHS, data_file

PHASES = """schedule:
  - {from: 0, weights: {web: 0.5, chat: 0.2, code: 0.3}, max-length: 64}
  - {from: 20, to: 40, shape: linear, weights: {web: 0.1, chat: 0.6, code: 0.3}, max-length: 128}
"""
CUT = dict.fromkeys(LENGTHS, "long-sequence: split")


def run(path, *arguments):
    return main(["data", "plan", str(path), *map(str, arguments)])


def planned(folder, path, *arguments):
    output = folder / "plan.json"
    assert run(path, *arguments, "--output", output) == 0
    return json.loads(output.read_text())


def drawn(path, steps, seq_length=128, seed=1234, **batch):
    """The steps of a run, drawn without the command."""
    opening = Opening(
        max_length=seq_length, long_sequence="error", tokenizer=None, cache_folder=None
    )
    corpus = open_corpus(read_data_file(path).training, opening)
    mixture = corpus.mixture(corpus.orders(), BatchSize(**batch), seed)
    found, position = [], Position()
    while len(found) < steps and not mixture.is_over(position):
        found.append(mixture.step(position))
        position = found[-1].after
    return corpus, found


@pytest.mark.parametrize(
    ("flags", "batch"),
    [
        (["--hdp-global-batch-tokens", 700], {"tokens": 700}),
        (["--global-batch-size", 24, "--seed", 7], {"sequences": 24, "seed": 7}),
    ],
)
@pytest.mark.parametrize("unit", ["tokens", "loss-tokens", "sequences"])
def test_it_draws_what_a_run_draws(folder, flags, batch, unit):
    path = data_file(folder, f"weight-unit: {unit}\n{PHASES}", **CUT)
    found = planned(folder, path, "--steps", 60, *flags)
    corpus, steps = drawn(path, 60, **batch)
    assert [(one["from"], one["to"]) for one in found["phases"]] == [(0, 20), (20, 60)]
    assert (found["steps"], found["tokens"]) == (60, steps[-1].after.tokens)
    for phase, mine in zip(found["phases"], (steps[:20], steps[20:]), strict=True):
        lengths = np.concatenate([one.lengths for one in mine])
        weights = {
            "tokens": lengths,
            "loss-tokens": np.concatenate([one.num_loss_tokens for one in mine]),
            "sequences": np.ones_like(lengths),
        }[unit]
        sources = np.concatenate([one.sources for one in mine])
        for i, source in enumerate(corpus.sources):
            share = weights[sources == i].sum() / weights.sum()
            assert phase["shares"][source.name] == pytest.approx(share, rel=1e-12)
            first, last = mine[0].before.of(source.name), mine[-1].after.of(source.name)
            epochs = (last.rows - first.rows) / source.num_rows
            assert phase["epochs"][source.name] == pytest.approx(epochs, rel=1e-12)
        assert (phase["longest"], phase["tokens"]) == (lengths.max(), lengths.sum())
        assert phase["mean_length"] == pytest.approx(lengths.mean(), rel=1e-12)
    after = steps[-1].after
    amounts = np.array([after.of(name).amount for name in corpus.names])
    since = list(found["phases"][-1]["shares_since_start"].values())
    assert since == pytest.approx((amounts / amounts.sum()).tolist(), rel=1e-12)


def test_a_case_by_hand(folder):
    """``web`` has 181 tokens in 8 rows, ``code`` 226 in 4: two epochs of each, then all is over."""
    twice = dict.fromkeys(("web", "code"), "max-epochs: 2")
    path = data_file(folder, "", names=["web", "code"], **twice)
    found = planned(folder, path, "--steps", 100, "--global-batch-size", 5)
    (phase,) = found["phases"]
    assert (found["steps"], found["steps_wanted"], phase["to"]) == (5, 100, 5)  # 24 rows
    assert phase["epochs"] == {"web": 2.0, "code": 2.0}
    assert phase["shares"] == pytest.approx({"web": 181 / 407, "code": 226 / 407})
    assert set(found["exhausted"]) == {"web", "code"}
    assert max(found["exhausted"].values()) == 5
    assert (found["tokens"], found["sequences"], found["seq_length"]) == (2 * 407, 24, 100)


def test_what_is_held_out_is_not_drawn(folder):
    path = data_file(folder, "validation: {web: 3}", names=["web"], web="max-epochs: 4")
    found = planned(folder, path, "--steps", 99, "--global-batch-size", 1)
    assert found["steps"] == found["exhausted"]["web"] == 4 * 5
    assert found["tokens"] == 4 * sum(LENGTHS["web"][:5])
    assert found["phases"][0]["epochs"] == {"web": 4.0}


def test_a_source_that_ends_and_one_that_never_does(folder, capsys):
    path = data_file(folder, PHASES, **{**CUT, "code": "long-sequence: split, max-epochs: 3"})
    found = planned(folder, path, "--steps", 60, "--hdp-global-batch-tokens", 300)
    _, steps = drawn(path, 60, tokens=300)
    ended = [one.after.steps for one in steps if one.after.of("code").rows == 3 * 4]
    assert found["exhausted"] == {"web": None, "chat": None, "code": ended[0]}
    assert 1 < ended[0] < 60
    assert f"runs out: code with step {ended[0]}; web, chat never" in capsys.readouterr().out


def test_a_schedule_by_tokens(folder):
    schedule = "schedule:\n  - {from: 0, weights: {web: 1}}\n  - {from: 2K, weights: {chat: 1}}"
    path = data_file(folder, schedule, names=["web", "chat"])
    found = planned(folder, path, "--steps", 9, "--hdp-global-batch-tokens", 500)
    _, steps = drawn(path, 9, seq_length=64, tokens=500)
    assert found["unit"] == "tokens"
    first, second = found["phases"]
    assert (first["from"], first["to"]) == (0, 2000)
    assert (second["from"], second["to"]) == (2000, steps[-1].after.tokens)
    assert first["steps"] == sum(one.before.tokens < 2000 for one in steps)
    assert (first["shares"]["web"], second["shares"]["web"]) == (1.0, 0.0)


def test_phases_that_are_not_reached_are_left_out(folder):
    path = data_file(folder, PHASES, **CUT)
    (phase,) = planned(folder, path, "--steps", 20, "--global-batch-size", 4)["phases"]
    assert (phase["from"], phase["to"]) == (0, 20)


@pytest.mark.parametrize("more", ["", "schedule: [{from: 0, max-length: 64}]"])
def test_the_context_length_is_found(folder, capsys, more):
    path = data_file(folder, more, names=["web", "chat"])
    found = planned(folder, path, "--steps", 3, "--global-batch-size", 4)
    assert found["seq_length"] == 64
    assert "--seq-length is not given: 64, the" in capsys.readouterr().err
    found = planned(folder, path, "--steps", 3, "--global-batch-size", 4, "--seq-length", 100)
    assert found["seq_length"] == 100
    assert "--seq-length" not in capsys.readouterr().err


MIXES = """
def mix(weights, position, losses):
    return {"web": 0.1, "code": 0.9} if position.steps < 10 else weights

def follow(weights, position, losses):
    return {"web": 0.1, "code": 0.9} if losses else weights

def plan(planner, position):
    return planner.plan(position)
"""
SIZE = ("--steps", 30, "--global-batch-size", 9)


def with_code(folder, named):
    (folder / "mine.py").write_text(MIXES)
    return data_file(folder, f"{PHASES}\nprimitives: {{{named}}}", **CUT)


def test_the_mix_of_a_run_is_drawn(folder, capsys):
    found = planned(folder, with_code(folder, "mix: mine.py:mix"), *SIZE)
    said = f"runs the code that {folder}/data.yaml names: mix: {folder}/mine.py:mix"
    assert said in capsys.readouterr().err
    path = data_file(folder, PHASES, name="plain.yaml", **CUT)
    _, steps = drawn(path, 30, sequences=9)
    plain = planned(folder, path, *SIZE)
    assert plain["tokens"] == steps[-1].after.tokens != found["tokens"]
    shares, others = (one["phases"][0]["shares"]["code"] for one in (found, plain))
    assert others == pytest.approx(0.3, abs=0.1) and shares > 0.5


@pytest.mark.parametrize(
    ("named", "flags", "message"),
    [
        ("mix: nowhere:mix", (), "nowhere:mix, which cannot be imported"),
        ("cost: gone.py:cost", (), "gone.py:cost, which cannot be imported"),
        ("mix: mine.py:follow", (), "asks for the losses of steps, expected one of weights"),
        ("plan: mine.py:plan", (), "mine.py:plan, which draws whole steps"),
        (
            "cost: gone.py:cost",
            ("--no-primitives",),
            "'gone.py:cost' with --no-primitives",
        ),
    ],
)
def test_primitives_that_cannot_be_drawn_are_refused(folder, capsys, named, flags, message):
    assert run(with_code(folder, named), *SIZE, *flags) == 2
    assert message in capsys.readouterr().err


def test_indices_are_shared_by_a_cache(folder, capsys):
    flags = ["--steps", 3, "--global-batch-size", 4]
    path = data_file(folder)
    private = planned(folder, path, *flags)
    cached = planned(folder, path, *flags, "--data-cache-path", folder / "cache")
    spans = (folder / "chat" / "corpus.spans").stat().st_size
    rows = sum(map(len, LENGTHS.values()))
    assert private["index_bytes"] == cached["index_bytes"] == spans + 12 * rows
    assert private["private_index_bytes"] == 12 * rows
    assert len(list((folder / "cache").glob("*.table"))) == 3
    assert private | {"private_index_bytes": 0} == cached


def test_a_step_without_loss_is_told(folder, capsys):
    """A sequence of one token predicts nothing."""
    from tests.support.gradients import write_corpus

    (folder / "ones").mkdir()
    write_corpus(folder / "ones", [1, 1, 1])
    path = data_file(folder, "", names=["ones"])
    found = planned(folder, path, "--steps", 2, "--global-batch-size", 2)
    assert found["first_step_without_loss"] == 1
    assert "step 1 has no token with loss: a run stops there" in capsys.readouterr().out


def test_text_is_prepared_first(folder, capsys):
    (folder / "t.txt").write_text("some words")
    path = data_file(folder, "  t: {path: t.txt}", names=["web"])
    found = planned(folder, path, "--steps", 9, "--global-batch-size", 3)
    assert found["phases"][0]["epochs"] == {"web": 3.0, "t": 3.0}
    assert "source t: prepares" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "arguments", "words"),
    [
        ("sourcess: {}", [], "unknown key 'sourcess': did you mean 'sources'?"),
        ("", ["--seq-length", "50"], "document 2 has 64 tokens, the context length is 50"),
        ("schedule: [{from: 0, max-length: 99}]", ["--seq-length", "64"], "at most --seq-length"),
        ("", ["--output", "plan.yaml"], "expected a name that ends in .json"),
        ("", ["--output", "no/plan.json"], "found no folder no"),
    ],
)
def test_mistakes_are_one_line(folder, capsys, more, arguments, words):
    path = data_file(folder, more, names=["web"])
    assert run(path, "--steps", 3, "--global-batch-size", 4, *arguments) == 2
    lines = capsys.readouterr().err.splitlines()
    lines = [line for line in lines if "is not given" not in line]
    assert len(lines) == 1
    assert lines[0].startswith("megatron-hdp data plan: error: ")
    assert words in lines[0]


@pytest.mark.parametrize(
    "size", [[], ["--global-batch-size", "3", "--hdp-global-batch-tokens", "30"]]
)
def test_a_step_has_one_size(folder, size):
    with pytest.raises(SystemExit) as leaving:
        run(data_file(folder), "--steps", 3, *size)
    assert leaving.value.code == 2
