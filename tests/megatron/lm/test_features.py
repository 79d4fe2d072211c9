"""What users of Megatron-LM switch on goes together with HDP, on a real checkout.

Needs what test_training.py needs. Runs start with the same weights where no checkpoint is named.
"""

import importlib.util
import json
from functools import partial

import pytest
import torch

from megatron_hdp.planner import CostModel
from tests.megatron.lm.runs import (
    HDP,
    LENGTHS,
    MARKS,
    TENSOR,
    drive,
    planned,
    require_same,
    scalars,
    weights,
)
from tests.support.gradients import write_corpus

pytestmark = [*MARKS, pytest.mark.slow]

GPT = """--num-layers 6 --hidden-size 32 --num-attention-heads 4 --group-query-attention
--num-query-groups 2 --seq-length 256 --max-position-embeddings 256 --position-embedding-type rope
--attention-dropout 0 --hidden-dropout 0"""
SHARDED = [
    "--use-distributed-optimizer",
    "--overlap-grad-reduce",
    "--overlap-param-gather",
    "--ddp-bucket-size",
    "5000",
    "--dist-ckpt-optim-fully-reshardable",
    "--recompute-granularity",
    "full",
    "--recompute-method",
    "uniform",
    "--recompute-num-layers",
    "1",
]
SOON = ["--stall-timeout-seconds", "3"]
HAS_WANDB = importlib.util.find_spec("wandb") is not None


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """All runs of this file."""
    folder = tmp_path_factory.mktemp("megatron-lm")
    write_corpus(folder, LENGTHS)
    cost = CostModel(
        a=1e-6, b=1e-3, kv_bytes_per_token=1, activation_bytes_per_token=1e3, num_layers=3
    )
    (folder / "cost.json").write_bytes(cost.to_json())
    run = partial(planned, folder)
    metrics = ["--metrics-path", str(folder / "metrics.jsonl")]
    pictures = ["--hdp-trace", str(folder / "trace"), "--hdp-trace-steps", "2-3"]
    pictures += ["--hdp-plot-plan", str(folder / "plan.png"), "--hdp-plot-step", "2"]
    wandb = ["--wandb-project", "tests", "--wandb-exp-name", "bf16", "--wandb-save-dir"]
    wandb = [*wandb, str(folder / "wandb")] if HAS_WANDB else []
    offload = ["--hdp-offload", "auto", "--hdp-cost-model", str(folder / "cost.json")]
    stages = ["--pipeline-model-parallel-size", "2", *offload, "--ckpt-step", "2"]
    half = ["--use-distributed-optimizer", "--bf16"]
    drive(
        folder,
        [
            run("one", 1, [*HDP, "256"], save="one"),
            run("sharded", 2, [*HDP, "160", *SHARDED, *metrics, *pictures], save="sharded"),
            run(
                "sharded again",
                2,
                [*HDP, "160", *SHARDED, *metrics, "--ckpt-step", "2"],
                load="sharded",
                save="sharded again",
            ),
            run("tensor", 2, [*HDP, "256", *TENSOR, "--ckpt-step", "2"], load="one"),
            run("bf16 one", 1, [*HDP, "256", "--bf16", *wandb]),
            run("bf16 two", 2, [*HDP, "160", *half, "--async-save"], save="bf16"),
            run("gpt", 1, [*HDP, "256", "--async-save"], model=GPT, save="gpt"),
            run("gpt stages", 4, [*HDP, "100", *stages], model=GPT, load="gpt"),
            run("nan", 2, [*HDP, "160"], save="nan", nan_after=16, exits=[16, 16]),
            run("nan again", 2, [*HDP, "160"], load="nan", nan_after=16, exits=[16, 16]),
            run("dead", 2, [*HDP, "160", *SOON], fault="1:3:kill", exits=[3, -9]),
            run("stopped", 2, [*HDP, "160", *SOON], fault="1:3:stop", exits=[3, None]),
            run("other seed", 1, [*HDP, "256", "--seed", "8"], model=GPT, load="gpt", exits=[1]),
            run("without", 1, [], model=GPT, load="gpt", exits=[1]),
        ],
    )
    return folder


@pytest.mark.parametrize(("name", "steps"), [("sharded", (1, 2, 3, 4)), ("tensor", (3, 4))])
def test_optimizers_recomputation_and_sequence_parallel_change_nothing(runs, name, steps):
    require_same(scalars(runs, name), scalars(runs, "one"), rel=2e-6, steps=steps)


def test_the_distributed_optimizer_resumes_bit_for_bit(runs):
    whole, again = weights(runs, "sharded"), weights(runs, "sharded again")
    assert whole.keys() == again.keys()
    assert sum(key.startswith("optimizer.state.exp_avg_sq.") for key in whole) == 9  # of weights
    assert all(torch.equal(whole[key], again[key]) for key in whole)
    loss = scalars(runs, "sharded")["lm loss"]
    assert scalars(runs, "sharded again")["lm loss"] == {3: loss[3], 4: loss[4]}


def test_bf16(runs):
    require_same(scalars(runs, "bf16 two"), scalars(runs, "bf16 one"), rel=1e-2)
    assert weights(runs, "bf16")  # it was saved asynchronously


def test_a_tied_model_continues_on_stages_with_offload(runs):
    stages = scalars(runs, "gpt stages")
    require_same(stages, scalars(runs, "gpt"), rel=2e-6, steps=(3, 4))
    assert max(stages["hdp/offloaded-bytes"].values()) > 0


def test_our_writers_write(runs):
    lines = [json.loads(line) for line in (runs / "metrics.jsonl").read_text().splitlines()]
    loss = scalars(runs, "sharded")["lm loss"]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]  # the last two by the resumed run
    assert [line["loss"] for line in lines] == pytest.approx([loss[step] for step in (1, 2, 3, 4)])
    validated = scalars(runs, "sharded")["lm loss validation"]
    assert [line["validation_loss"] for line in lines] == pytest.approx(
        [None, validated[2], None, validated[4]]
    )
    tokens = [line["tokens"] for line in lines]
    assert [line["consumed_tokens"] for line in lines] == [sum(tokens[: i + 1]) for i in range(4)]
    events = json.loads((runs / "trace" / "steps-2-3.json").read_text())["traceEvents"]
    names = {event["name"] for event in events}
    assert {"step 2", "step 3", "gradient sync", "optimizer step"} <= names
    assert (runs / "plan.png").stat().st_size > 1000


@pytest.mark.skipif(not HAS_WANDB, reason="needs wandb: pip install wandb")
def test_wandb_gets_the_figures_of_hdp(runs):
    (record,) = (runs / "wandb").glob("wandb/offline-run-*/*.wandb")
    assert record.read_bytes().count(b"hdp/planned-efficiency") >= 4


def test_the_rerun_machine_runs_the_same_step_again(runs):
    text = (runs / "log nan.0").read_text()
    true = [line for line in text.splitlines() if line.startswith("instead of ")]
    assert len(true) == 2 and true[0] == true[1]
    assert "unexpected result is reproducible within the tolerance (nan = nan)" in text
    again = (runs / "log nan again.0").read_text()
    assert true[0] in again and "Got rescheduled on the same GPU" in again


@pytest.mark.parametrize("name", ["dead", "stopped"])
def test_a_rank_that_does_not_answer_ends_the_job(runs, name):
    text = (runs / f"log {name}.0").read_text()
    assert "error on rank 0: " in text and "rank 1 (host" in text and "died or was stopped" in text
    assert "of step 3" in text


def test_another_order_of_the_data_is_refused(runs):
    text = (runs / "log other seed.0").read_text()
    assert "--seed: found 8, expected 7. Give the flags of that run, or add --finetune" in text
    text = (runs / "log without.0").read_text()
    assert "found a run without --hybrid-data-parallel, expected one with it" in text
