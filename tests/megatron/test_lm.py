"""A stock Megatron-LM checkout trains with HDP; its loop, checkpoints and logs stay its own.

Needs MEGATRON_LM_PATH and what that checkout's pretrain_gpt.py imports (README, "A stock
Megatron-LM checkout").
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.gradients import write_corpus
from tests.megatron_formula import formula_of
from tests.test_patches import patched_script

CHECKOUT = os.environ.get("MEGATRON_LM_PATH", "")
SCRIPT = Path(CHECKOUT, "pretrain_gpt.py")
ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.megatron_lm,
    pytest.mark.skipif(not CHECKOUT, reason="set MEGATRON_LM_PATH to a Megatron-LM checkout"),
    pytest.mark.timeout(900),
]

MODEL = """--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 256
--max-position-embeddings 256 --position-embedding-type rope --swiglu --normalization RMSNorm
--disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0
--hidden-dropout 0"""
TRAINING = """--micro-batch-size 1 --global-batch-size 8 --lr 1e-2 --min-lr 1e-4
--lr-decay-iters 10 --lr-decay-style cosine --clip-grad 1.0 --seed 7 --split 90,10,0
--tokenizer-type NullTokenizer --vocab-size 300 --log-interval 1 --eval-iters 1 --eval-interval 2
--save-interval 2 --num-workers 0 --log-throughput"""
ON_CPU = """--distributed-backend gloo --transformer-impl local --no-persist-layer-norm
--no-masked-softmax-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion
--no-gradient-accumulation-fusion --use-cpu-initialization
--no-create-attention-mask-in-dataloader"""
HDP = ["--hybrid-data-parallel", "--hdp-tokens-per-rank"]
STOCK = "checkpoints stock"
LENGTHS = np.clip(np.random.default_rng(0).lognormal(4, 1, 120), 8, 256).astype(int)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """All runs of this file, made by one process that imports Megatron once."""
    folder = tmp_path_factory.mktemp("megatron-lm")
    write_corpus(folder, LENGTHS)
    pipelines = [*HDP, "160", "--pipeline-model-parallel-size", "2"]
    # Megatron pads the vocabulary to a multiple of both, here to 384 as without tensor parallelism
    tensor = [*HDP, "256", "--tensor-model-parallel-size", "2"]
    tensor += ["--make-vocab-size-divisible-by", "64"]
    plan = [
        _run(folder, "stock", 1, [], plugin=False, save=STOCK),
        _run(folder, "off", 1, [], save="checkpoints off"),
        _run(folder, "one", 1, [*HDP, "256", "--finetune"], load=STOCK),
        _run(folder, "two", 2, [*HDP, "160", "--finetune"], load=STOCK, save="whole"),
        _run(folder, "pipelines", 4, [*pipelines, "--finetune"], load=STOCK),
        _run(folder, "tensor", 2, [*tensor, "--finetune"], load=STOCK),
        _run(
            folder,
            "first half",
            2,
            [*HDP, "160", "--finetune", "--exit-interval", "2"],
            load=STOCK,
            save="halves",
        ),
        _run(
            folder,
            "patched",
            1,
            [*HDP, "256", "--finetune"],
            plugin=False,
            script=patched_script(SCRIPT, folder),
            load=STOCK,
        ),
        _run(folder, "second half", 2, [*HDP, "160"], load="halves", save="halves"),
    ]
    (folder / "runs.json").write_text(json.dumps(plan))
    done = subprocess.run(
        [sys.executable, "-m", "tests.megatron.lm_driver", CHECKOUT, str(folder / "runs.json")],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "OMP_NUM_THREADS": "1",
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # Megatron asks for it with tensor parallelism
            "TORCHDYNAMO_DISABLE": "1",
            "PYTHONWARNINGS": "ignore",
        },
        capture_output=True,
        text=True,
        timeout=850,
    )
    logs = {one["name"]: one["log"] for one in plan}
    tails = [f"{name}: {Path(log + '.0').read_text()[-3000:]}" for name, log in logs.items()]
    assert done.returncode == 0, "\n".join([done.stdout, done.stderr[-3000:], *tails])
    return folder


def _run(folder, name, ranks, extra, *, plugin=True, script=SCRIPT, save=None, load=None):
    arguments = [*MODEL.split(), *TRAINING.split(), *ON_CPU.split(), *extra]
    arguments += ["--train-iters", "4", "--data-path", str(folder / "corpus")]
    arguments += ["--tensorboard-dir", str(folder / f"tensorboard {name}")]
    if save is not None:
        arguments += ["--save", str(folder / save)]
    if load is not None:
        arguments += ["--load", str(folder / load)]
    log = str(folder / f"log {name}")
    return {
        "name": name,
        "ranks": ranks,
        "plugin": plugin,
        "script": str(script),
        "arguments": arguments,
        "log": log,
    }


def scalars(folder, name):
    """TensorBoard's scalars of a run: tag -> {iteration: value}."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / f"tensorboard {name}"))
    events.Reload()
    tags = events.Tags()["scalars"]
    # the first of a step: ranks here end at once, and what comes after training may be lost
    return {tag: {one.step: one.value for one in events.Scalars(tag)[::-1]} for tag in tags}


def weights(folder, name, iteration=4):
    """The tensors of a run's checkpoint, as they are on disk."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    path = folder / name / f"iter_{iteration:07d}"
    dcp_to_torch_save(str(path), str(folder / "whole.pt"))
    state = torch.load(folder / "whole.pt", weights_only=False)
    return {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}


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
    from megatron_hdp.data import SequenceTable, StepSampler, TokenFile, split_documents

    file = TokenFile(str(runs / "corpus"))
    documents = split_documents(len(file.lengths), "90,10,0")[0]
    table = SequenceTable.build(
        file.lengths, max_length=256, long_sequence="error", documents=documents
    )
    sampler = StepSampler(table.length, seed=7, global_batch_size=8, global_batch_tokens=None)
    lengths = [table.length[sampler.step(8 * i).sequences] for i in range(4)]
    before, state = (
        torch.load(runs / name / "iter_0000004" / "common.pt", weights_only=False)
        for name in (STOCK, "whole")
    )
    formula = formula_of(CHECKOUT)
    args, expected = state["args"], before["num_floating_point_operations_so_far"]
    for length in np.concatenate(lengths).tolist():
        args.seq_length = length
        expected += formula(args, 1)
    assert state["num_floating_point_operations_so_far"] == pytest.approx(expected, rel=1e-9)


def _command(*arguments):
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "PYTHONWARNINGS": "ignore",
    }
    return subprocess.run(
        [sys.executable, "-m", "megatron_hdp", "run", str(SCRIPT), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_help_shows_the_group():
    done = _command("--help")
    assert done.returncode == 0, done.stderr
    assert "Hybrid data parallelism:" in done.stdout
    assert "--hdp-tokens-per-rank" in done.stdout and "--hdp-trace" not in done.stdout


def test_a_refusal_is_one_message():
    done = _command(*MODEL.split(), *TRAINING.split(), *HDP, "160", "--context-parallel-size", "2")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(
        "megatron_hdp: error: --context-parallel-size (found 2) does not go with "
    )
