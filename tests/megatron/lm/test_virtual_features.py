"""Virtual stages in a stock Megatron-LM with what users switch on besides, and its checkpoints.

Needs what test_training.py needs. Runs go on from the checkpoint of one rank, as those of
test_virtual_stages.py, or from its weights.
"""

import json
from collections import Counter
from functools import partial

import pytest
import torch

from megatron_hdp.planner import CostModel
from tests.megatron.lm.runs import (
    HDP,
    LENGTHS,
    MARKS,
    MODEL,
    TENSOR,
    drive,
    planned,
    require_same,
    require_same_states,
    scalars,
    weights,
)
from tests.megatron.lm.test_experts import EXPERTS
from tests.megatron.lm.test_features import GPT
from tests.megatron.lm.test_virtual_stages import OVERLAPPED, RECOMPUTED, SHARDED
from tests.support.gradients import write_corpus

pytestmark = [*MARKS, pytest.mark.slow]

EIGHT = MODEL.replace("--num-layers 2", "--num-layers 8")
TIED = GPT.replace("--num-layers 6", "--num-layers 8")
FOUR_WITH_EXPERTS = EXPERTS.replace("--num-layers 2", "--num-layers 4")
PLAIN = ["--pipeline-model-parallel-size", "2"]
CHUNKS = [*PLAIN, "--num-virtual-stages-per-pipeline-rank", "2"]
SMALL_CHUNKS = [*PLAIN, "--num-layers-per-virtual-pipeline-stage", "1"]
FOUR_STAGES = ["--pipeline-model-parallel-size", "4", *CHUNKS[2:]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """All runs of this file."""
    folder = tmp_path_factory.mktemp("megatron-lm")
    write_corpus(folder, LENGTHS)
    cost = CostModel(
        a=1e-6, b=1e-3, kv_bytes_per_token=1, activation_bytes_per_token=1e3, num_layers=4
    )
    (folder / "cost.json").write_bytes(cost.to_json())
    offload = ["--hdp-offload", "auto", "--hdp-cost-model", str(folder / "cost.json")]
    virtual = [*HDP, "160", *OVERLAPPED, *CHUNKS]
    smaller = [*HDP, "160", *OVERLAPPED, *SMALL_CHUNKS]
    pictures = ["--hdp-trace", str(folder / "trace"), "--hdp-trace-steps", "5-6"]
    pictures += ["--hdp-plot-plan", str(folder / "plan.png"), "--hdp-plot-step", "5"]
    run = partial(planned, folder, model=EIGHT, steps=6)
    nan = {"nan_after": 24, "exits": [16] * 4}
    from_two, from_four = ["--ckpt-step", "2"], ["--ckpt-step", "4"]
    drive(
        folder,
        [
            run("one", 1, [*HDP, "256", *SHARDED], save="one"),
            run("virtual", 4, [*virtual, *from_two], load="one", save="virtual"),
            run("again", 4, [*virtual, *from_four], load="virtual", save="again"),
            run("plain", 4, [*HDP, "160", *SHARDED, *PLAIN, *from_four], load="virtual"),
            run("smaller", 4, [*smaller, *from_four, *pictures], load="virtual"),
            run("alone", 1, [*HDP, "256", *SHARDED, *from_four], load="virtual"),
            run("four stages", 4, [*HDP, "256", *SHARDED, *FOUR_STAGES, *from_two], load="one"),
            run("tensor", 4, [*HDP, "256", *OVERLAPPED, *CHUNKS, *TENSOR, *from_two], load="one"),
            run("bf16 one", 1, [*HDP, "256", "--bf16", "--finetune"], load="one"),
            run(
                "bf16 virtual",
                4,
                [*virtual, "--bf16", "--finetune", "--async-save"],
                load="one",
                save="bf16",
            ),
            run("tied", 1, [*HDP, "256"], model=TIED, save="tied"),
            run(
                "tied virtual",
                4,
                [*HDP, "100", *CHUNKS, *RECOMPUTED, *offload, *from_two],
                model=TIED,
                load="tied",
            ),
            run("experts first", 1, [*HDP, "256"], model=FOUR_WITH_EXPERTS, save="experts"),
            run("experts", 1, [*HDP, "256", "--finetune"], model=FOUR_WITH_EXPERTS, load="experts"),
            run(
                "experts apart",
                4,
                [*HDP, "160", "--finetune", *OVERLAPPED, *SMALL_CHUNKS]
                + ["--expert-model-parallel-size", "2"],
                model=FOUR_WITH_EXPERTS,
                load="experts",
            ),
            run("nan", 4, [*virtual, *from_two], load="one", save="nan", **nan),
            run("nan again", 4, virtual, load="nan", **nan),
        ],
    )
    return folder


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("virtual", (3, 4, 5, 6)),
        ("plain", (5, 6)),
        ("smaller", (5, 6)),
        ("alone", (5, 6)),
        ("four stages", (3, 4, 5, 6)),
        ("tensor", (3, 4, 5, 6)),
    ],
)
def test_losses_of_one_rank_from_checkpoints_of_any_layout(runs, name, steps):
    found, one = scalars(runs, name), scalars(runs, "one")
    require_same(found, one, rel=2e-5, steps=steps)  # rounding grows in gradients from step to step
    for tag in ("lm loss", "lm loss validation"):
        for step, value in found[tag].items():
            assert value == pytest.approx(one[tag][step], rel=1e-6)


def test_states_of_one_rank(runs):
    require_same_states(runs, "virtual", "one", iteration=6, rel=1e-5)


def test_it_resumes_bit_for_bit(runs):
    whole, again = (weights(runs, name, 6) for name in ("virtual", "again"))
    assert whole.keys() == again.keys()
    assert all(torch.equal(whole[key], again[key]) for key in whole)
    loss = scalars(runs, "virtual")["lm loss"]
    assert scalars(runs, "again")["lm loss"] == {5: loss[5], 6: loss[6]}


def test_traces_show_every_pass_through_a_chunk(runs):
    events = json.loads((runs / "trace" / "steps-5-6.json").read_text())["traceEvents"]
    passes = Counter(
        (one["pid"], one["name"]) for one in events if one["name"].startswith("forward ")
    )
    assert passes and not any(count % 4 for count in passes.values()), passes
    assert (runs / "plan.png").stat().st_size > 1000


def test_bf16(runs):
    steps = tuple(range(1, 7))
    require_same(scalars(runs, "bf16 virtual"), scalars(runs, "bf16 one"), rel=1e-2, steps=steps)
    assert weights(runs, "bf16", 6)


def test_a_tied_model_with_recomputation_and_offload(runs):
    virtual = scalars(runs, "tied virtual")
    require_same(virtual, scalars(runs, "tied"), rel=4e-6, steps=(3, 4, 5, 6))
    assert max(virtual["hdp/offloaded-bytes"].values()) > 0


def test_experts_across_ranks(runs):
    one, apart = scalars(runs, "experts"), scalars(runs, "experts apart")
    require_same(apart, one, rel=1e-5, steps=tuple(range(1, 7)))
    for tag in ("seq_load_balancing_loss", "z_loss"):  # as Megatron logs them
        for step, value in one[tag].items():
            assert apart[tag][step] == pytest.approx(value, rel=1e-5)


def test_the_rerun_machine_runs_the_same_step_again(runs):
    text = (runs / "log nan.0").read_text()
    true = [line for line in text.splitlines() if line.startswith("instead of ")]
    assert len(true) == 2 and true[0] == true[1]
    assert "unexpected result is reproducible within the tolerance (nan = nan)" in text
    again = (runs / "log nan again.0").read_text()
    assert true[0] in again and "Got rescheduled on the same GPU" in again
