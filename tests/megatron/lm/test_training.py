"""A stock Megatron-LM checkout trains with HDP; its loop, checkpoints and logs stay its own.

Needs MEGATRON_LM_PATH and what that checkout's pretrain_gpt.py imports (docs/megatron-lm.md,
"What the checkout needs").
"""

import json
from functools import partial

import pytest
import torch

from tests.megatron.lm.runs import (
    CHECKOUT,
    HDP,
    LENGTHS,
    MARKS,
    MODEL,
    SCRIPT,
    TRAINING,
    drive,
    planned,
    scalars,
    weights,
)
from tests.megatron.lm.test_patch_files import patched_script
from tests.support.drawn import first_rows
from tests.support.gradients import write_corpus
from tests.support.megatron_formula import formula_of

pytestmark = MARKS

STOCK = "checkpoints stock"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """All runs of this file, made by one process that imports Megatron once."""
    folder = tmp_path_factory.mktemp("megatron-lm")
    write_corpus(folder, LENGTHS)
    pipelines = [*HDP, "160", "--pipeline-model-parallel-size", "2"]
    # Megatron pads the vocabulary to a multiple of both, here to 384 as without tensor parallelism
    tensor = [*HDP, "256", "--tensor-model-parallel-size", "2"]
    tensor += ["--make-vocab-size-divisible-by", "64"]
    run = partial(planned, folder)
    plan = [
        run("stock", 1, [], plugin=False, save=STOCK),
        run("off", 1, [], save="checkpoints off"),
        run("one", 1, [*HDP, "256", "--finetune"], load=STOCK),
        run("two", 2, [*HDP, "160", "--finetune"], load=STOCK, save="whole"),
        run("pipelines", 4, [*pipelines, "--finetune"], load=STOCK),
        run("tensor", 2, [*tensor, "--finetune"], load=STOCK),
        run(
            "first half",
            2,
            [*HDP, "160", "--finetune", "--exit-interval", "2"],
            load=STOCK,
            save="halves",
        ),
        run(
            "patched",
            1,
            [*HDP, "256", "--finetune"],
            plugin=False,
            script=patched_script(SCRIPT, folder),
            load=STOCK,
        ),
        run("second half", 2, [*HDP, "160"], load="halves", save="halves"),
        run("older", 1, [*HDP, "256", "--finetune"], load=STOCK, save="older", older=True),
        run("older, resumed", 1, [*HDP, "256", "--ckpt-step", "2"], load="older"),
        own_command(folder),
        run("help", 1, ["--help"], command=True),
        run("refused", 1, [*HDP, "160", "--context-parallel-size", "2"], command=True, exits=[2]),
    ]
    drive(folder, plan)
    return folder


def own_command(folder):
    """The project's own command, which takes the weights of Megatron-LM's checkpoint."""
    steps = TRAINING[TRAINING.index("--lr ") : TRAINING.index("--split")].split()
    return {
        "name": "own",
        "ranks": 2,
        "own": True,
        "arguments": [
            *MODEL.split(),
            *steps,
            *[*HDP, "160", "--global-batch-size", "8", "--train-iters", "4", "--finetune"],
            *["--make-vocab-size-divisible-by", "384", "--split", "90,10,0"],
            *["--load", str(folder / STOCK), "--data-path", str(folder / "corpus")],
            *["--metrics-path", str(folder / "own.jsonl")],
        ],
        "log": str(folder / "log own"),
    }


def test_without_the_flag_all_is_stock_bit_for_bit(runs):
    stock, off = weights(runs, STOCK), weights(runs, "checkpoints off")
    assert len(stock) > 20 and stock.keys() == off.keys()
    assert all(torch.equal(stock[key], off[key]) for key in stock)
    of_stock, of_off = scalars(runs, "stock"), scalars(runs, "off")
    for tag in ("lm loss", "grad-norm", "learning-rate", "lm loss validation"):
        assert of_stock[tag] == of_off[tag] and len(of_stock[tag]) >= 2
    assert not any(tag.startswith("hdp/") for tag in of_off)


@pytest.mark.parametrize("name", ["two", "pipelines", "tensor"])
def test_any_number_of_ranks_gives_the_losses_of_one(runs, name):
    one, other = scalars(runs, "one"), scalars(runs, name)
    assert max(one["lm loss"]) == 4
    for tag in ("lm loss", "grad-norm", "lm loss validation"):
        assert list(other[tag]) == list(one[tag])
        for step, value in one[tag].items():
            assert other[tag][step] == pytest.approx(value, rel=2e-6)


def test_saved_and_resumed_equals_uninterrupted(runs):
    whole, halves = weights(runs, "whole"), weights(runs, "halves")
    assert whole.keys() == halves.keys()
    assert all(torch.equal(whole[key], halves[key]) for key in whole)
    loss = scalars(runs, "two")["lm loss"]
    assert scalars(runs, "first half")["lm loss"] == {1: loss[1], 2: loss[2]}
    assert scalars(runs, "second half")["lm loss"] == {3: loss[3], 4: loss[4]}
    text = (runs / "log second half.1").read_text()
    assert "consumed samples:           24" in text and "consumed samples:           32" in text


def test_a_run_of_an_older_release_keeps_its_order(runs):
    older, resumed = scalars(runs, "older"), scalars(runs, "older, resumed")
    assert older["lm loss"][3] != pytest.approx(scalars(runs, "one")["lm loss"][3], rel=1e-4)
    for tag in ("lm loss", "lm loss validation"):
        assert resumed[tag] == {step: older[tag][step] for step in resumed[tag]}
    assert sorted(resumed["lm loss"]) == [3, 4] and list(resumed["lm loss validation"]) == [4]
    log = (runs / "log older, resumed.0").read_text()
    assert log.count("began with version 1 of the order of the data") == 1


def test_the_projects_own_command_gives_the_same_losses(runs):
    loss, grad_norm = (scalars(runs, "two")[tag] for tag in ("lm loss", "grad-norm"))
    lines = [json.loads(line) for line in (runs / "own.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    for line in lines:
        assert line["loss"] == pytest.approx(loss[line["step"]], rel=1e-6)
        assert line["grad_norm"] == pytest.approx(grad_norm[line["step"]], rel=1e-5)


def test_a_patched_checkout_is_the_same_run(runs):
    one, patched = scalars(runs, "one"), scalars(runs, "patched")
    for tag in ("lm loss", "grad-norm", "lm loss validation", "hdp/ring-bytes"):
        assert patched[tag] == one[tag]


def test_its_writers_get_the_figures_of_hdp(runs):
    found = scalars(runs, "two")
    assert found["hdp/sequences"] == {step: 8.0 for step in (1, 2, 3, 4)}
    assert found["hdp/tokens"] == scalars(runs, "one")["hdp/tokens"]
    assert 0 < found["hdp/planned-efficiency"][1] <= 1
    assert found["batch-size"][1] == 8


def test_operations_are_those_of_each_length(runs):
    """What checkpoints add up is Megatron's formula, sequence by sequence."""
    from megatron.core import dist_checkpointing

    from megatron_hdp.data import TokenFile
    from megatron_hdp.data.tables import split_documents

    file = TokenFile(str(runs / "corpus"))
    documents = split_documents(len(file.lengths), "90,10,0")[0]
    lengths = file.lengths[documents.start : documents.stop]
    lengths = lengths[first_rows(len(lengths), 7, 4 * 8)]
    before, state = (
        dist_checkpointing.load_common_state_dict(str(runs / name / "iter_0000004"))
        for name in (STOCK, "whole")
    )
    formula = formula_of(CHECKOUT)
    args, expected = state["args"], before["num_floating_point_operations_so_far"]
    for length in lengths.tolist():
        args.seq_length = length
        expected += formula(args, 1)
    assert state["num_floating_point_operations_so_far"] == pytest.approx(expected, rel=1e-9)


def test_help_shows_the_group(runs):
    shown = (runs / "log help.0").read_text()
    assert "Hybrid data parallelism:" in shown
    assert "--hdp-tokens-per-rank" in shown and "--hdp-trace DIR" in shown
    assert "--hdp-global-batch-tokens" not in shown


def test_a_refusal_is_one_message(runs):
    shown = (runs / "log refused.0").read_text()
    (line,) = (line for line in shown.splitlines() if "error" in line.lower())
    assert line.startswith(
        "megatron_hdp: error: --context-parallel-size (found 2) does not go with "
    )
    assert "Traceback" not in shown
