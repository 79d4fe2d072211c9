"""Pipelines in a stock Megatron-LM, virtual and uneven stages too: losses and states of one rank.

Needs what test_training.py needs. Megatron draws other weights in another layout, so runs resume
from the checkpoint of one rank, or start from its weights.
"""

import json
from collections import Counter
from functools import partial

import pytest

from tests.megatron.lm.runs import (
    HDP,
    IN_PARTS,
    MARKS,
    MODEL,
    OVERLAPPED,
    RECOMPUTED,
    SHARDED,
    STAGES,
    TENSOR,
    drive,
    offloading,
    pictures,
    planned,
    require_rerun,
    require_same,
    require_same_bits,
    require_same_states,
    scalars,
    wanted,
    weights,
)
from tests.megatron.lm.test_models import EXPERTS
from tests.megatron.lm.test_training import GPT

pytestmark = MARKS

EIGHT = MODEL.replace("--num-layers 2", "--num-layers 8")
TIED = GPT.replace("--num-layers 6", "--num-layers 8")
FOUR_WITH_EXPERTS = EXPERTS.replace("--num-layers 2", "--num-layers 4")
PIPELINE, GROUPS = (
    "--pipeline-model-parallel-size",
    "--microbatch-group-size-per-virtual-pipeline-stage",
)
VIRTUAL = ["--num-virtual-stages-per-pipeline-rank", "2"]
CHUNKS = [*STAGES, *VIRTUAL]
SMALL_CHUNKS = [*STAGES, "--num-layers-per-virtual-pipeline-stage", "1"]
LAYOUT = "--pipeline-model-parallel-layout"
FROM_ONE = {  # by name: ranks, capacity, flags
    "virtual": (4, 160, [*OVERLAPPED, *RECOMPUTED, *SMALL_CHUNKS]),
    "parts": (4, 160, [*OVERLAPPED, *STAGES, *IN_PARTS]),
    "parts tensor": (4, 256, [*OVERLAPPED, *STAGES, *TENSOR, *IN_PARTS]),
    "four stages": (4, 256, [*SHARDED, PIPELINE, "4", *VIRTUAL]),
    "tensor": (4, 256, [*OVERLAPPED, *CHUNKS, *TENSOR]),
    "first": (4, 160, [*SHARDED, *STAGES, "--decoder-first-pipeline-num-layers", "2"]),
    "last with chunks": (
        4,
        160,
        [*OVERLAPPED, *CHUNKS, "--decoder-last-pipeline-num-layers", "6"],
    ),
    "accounted": (
        3,
        256,
        [*SHARDED, PIPELINE, "3", "--account-for-embedding-in-pipeline-split"],
    ),
    "layout with chunks": (4, 160, [*OVERLAPPED, *STAGES, LAYOUT, "E|ttt|tttt|tL"]),
    "a stage without layers": (3, 256, [*SHARDED, PIPELINE, "3", LAYOUT, "Etttt|tttt|L"]),
}
FROM_VIRTUAL = {
    "again": FROM_ONE["virtual"],
    "plain": (4, 160, [*SHARDED, *STAGES]),
    "larger": (4, 160, [*OVERLAPPED, *CHUNKS]),
    "alone": (1, 256, SHARDED),
}


def common_plan(folder):
    one = planned(folder, "one", 1, [*HDP, "256", *SHARDED], model=EIGHT, steps=6, save="one")
    return [one, resumed(folder, "virtual", FROM_ONE["virtual"], "one", 2)]


def resumed(folder, name, how, source, step, more=()):
    """A run from another one's checkpoint."""
    ranks, capacity, flags = how
    flags = [*HDP, str(capacity), *flags, "--ckpt-step", str(step), *more]
    return planned(folder, name, ranks, flags, model=EIGHT, steps=6, load=source, save=name)


@pytest.fixture(scope="module")
def more(runs, request):
    """The layouts that were selected besides."""
    plan = [
        resumed(runs, name, FROM_ONE[name], "one", 2)
        for name in wanted(request, FROM_ONE)
        if name != "virtual"
    ]
    for name in wanted(request, FROM_VIRTUAL):
        shown = pictures(runs, "5-6", "5") if name == "larger" else []
        plan.append(resumed(runs, name, FROM_VIRTUAL[name], "virtual", 4, shown))
    if plan:
        drive(runs, plan)
    return runs


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "virtual" else pytest.mark.slow)
        for name in (*FROM_ONE, *FROM_VIRTUAL)
    ],
)
def test_losses_and_states_of_one_rank_from_checkpoints_of_any_layout(more, name):
    found, one = scalars(more, name), scalars(more, "one")
    steps = (3, 4, 5, 6) if name in FROM_ONE else (5, 6)
    require_same(found, one, rel=2e-5, steps=steps)  # rounding grows in gradients from step to step
    for tag in ("lm loss", "lm loss validation"):
        assert found[tag] == pytest.approx(
            {step: value for step, value in one[tag].items() if step >= steps[0]}, rel=1e-6
        )
    rel = 5e-5 if "parts" in name else 1e-5  # sums over parts round more
    require_same_states(more, name, "one", iteration=6, rel=rel)


def test_pipelines_ran_different_counts(runs):
    """Also where each is padded to a multiple of the stages."""
    found = scalars(runs, "virtual")
    fewest, most = (found[f"hdp/micro-batches-{which}"] for which in ("min", "max"))
    assert any((fewest[step] + 1) // 2 < (most[step] + 1) // 2 for step in most)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["again"])
def test_it_resumes_bit_for_bit(more, name):
    require_same_bits(more, name, "virtual", 6)
    loss = scalars(more, "virtual")["lm loss"]
    assert scalars(more, name)["lm loss"] == {5: loss[5], 6: loss[6]}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["larger"])
def test_traces_show_every_pass_through_a_chunk(more, name):
    events = json.loads((more / "trace" / "steps-5-6.json").read_text())["traceEvents"]
    passes = Counter(
        (one["pid"], one["name"]) for one in events if one["name"].startswith("forward ")
    )
    assert passes and not any(count % 2 for count in passes.values()), passes
    assert (more / "plan.png").stat().st_size > 1000


@pytest.fixture(scope="module")
def others(runs):
    """What users switch on besides, with virtual stages."""
    virtual = [*HDP, "160", *OVERLAPPED, *CHUNKS]
    tied = [*HDP, "100", *CHUNKS, *RECOMPUTED, *offloading(runs, 4), "--ckpt-step", "2"]
    half = [*virtual, "--bf16", "--finetune", "--async-save"]
    across = [*HDP, "160", "--finetune", *OVERLAPPED, *SMALL_CHUNKS]
    across += ["--expert-model-parallel-size", "2"]
    run = partial(planned, runs, model=EIGHT, steps=6)
    experts = partial(planned, runs, model=FOUR_WITH_EXPERTS, steps=6)
    nan = {"nan_after": 24, "exits": [16] * 4}
    drive(
        runs,
        [
            run("bf16 one", 1, [*HDP, "256", "--bf16", "--finetune"], load="one"),
            run("bf16 virtual", 4, half, load="one", save="bf16"),
            run("tied", 1, [*HDP, "256"], model=TIED, save="tied"),
            run("tied virtual", 4, tied, model=TIED, load="tied"),
            experts("experts first", 1, [*HDP, "256"], save="experts"),
            experts("experts", 1, [*HDP, "256", "--finetune"], load="experts"),
            experts("experts apart", 4, across, load="experts"),
            run("nan", 4, [*virtual, "--ckpt-step", "2"], load="one", save="nan", **nan),
            run("nan again", 4, virtual, load="nan", **nan),
            run("groups", 2, [*virtual, GROUPS, "3"], command=True, exits=[2, 2]),
            run("one by one", 2, [*virtual, "--no-overlap-p2p-communication"], exits=[1, 1]),
        ],
    )
    return runs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("found", "expected", "rel", "steps"),
    [
        ("bf16 virtual", "bf16 one", 1e-2, (1, 2, 3, 4, 5, 6)),
        ("tied virtual", "tied", 4e-6, (3, 4, 5, 6)),
        ("experts apart", "experts", 1e-5, (1, 2, 3, 4, 5, 6)),
    ],
)
def test_what_users_switch_on_has_the_losses_of_one_rank(others, found, expected, rel, steps):
    virtual, one = scalars(others, found), scalars(others, expected)
    require_same(virtual, one, rel=rel, steps=steps)
    if found == "tied virtual":
        assert max(virtual["hdp/offloaded-bytes"].values()) > 0
    if found == "bf16 virtual":
        assert weights(others, "bf16", 6)  # it was saved asynchronously


@pytest.mark.slow
def test_the_rerun_machine_runs_the_same_step_again(others):
    require_rerun(others)


@pytest.mark.slow
def test_other_groups_are_refused_by_their_flag(others):
    shown = (others / "log groups.0").read_text()
    (line,) = (line for line in shown.splitlines() if line.startswith("megatron_hdp: "))
    assert f"error: {GROUPS}: found 3, expected 2" in line


@pytest.mark.slow
def test_what_megatron_refuses_is_refused_by_megatron(others):
    shown = (others / "log one by one.0").read_text()
    assert "p2p communication overlap is disabled, pipeline-model-parallel size should be" in shown
