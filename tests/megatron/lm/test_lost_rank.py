"""Megatron-LM's own loop loses ranks and wins others: losses, norms and weights stay the same.

Needs MEGATRON_LM_PATH, see `test_training`.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from megatron_hdp.exit_codes import ExitCode
from megatron_hdp.megatron.checkpoint.folder import TRACKER
from tests.megatron.lm.runs import (
    CHECKOUT,
    HDP,
    LENGTHS,
    MARKS,
    OVERLAPPED,
    SHARDED,
    STAGES,
    TENSOR,
    drive,
    offloading,
    planned,
    require_same_states,
    scalars,
    wanted,
)
from tests.megatron.lm.test_models import ACROSS, BALANCED
from tests.support.gradients import write_corpus
from tests.training.epoch_traces import read_trace, require_whole

PATIENCE_S = 1700.0  # a busy machine takes ten times as long as a quiet one
pytestmark = [*MARKS[:-1], pytest.mark.timeout(1800), pytest.mark.slow]

STEPS = 6
SURVIVAL = "megatron_hdp.megatron.lm.survival"
LOOP = "megatron.training.training"
VOTE = 2 * 3
"""Which call of `largest` is the vote of step 3: each step has one before it begins, too."""


def dies_in(function, calls, behind=False, module=SURVIVAL):
    return {"function": function, "step": calls, "behind": behind, "module": module}


MOMENTS = {
    "in the step": dies_in(
        "HdpSteps.run", 4, module="megatron_hdp.megatron.step.hdp_steps"
    ),  # one is of an evaluation
    "before the vote": dies_in("largest", VOTE),
    "behind the vote": dies_in("largest", VOTE, behind=True),
    "behind the commit": dies_in("LmSurvival.apply", 3, behind=True),
    "before the log": dies_in("training_log", 3, module=LOOP),
    "behind the log": dies_in("training_log", 3, behind=True, module=LOOP),
    "in evaluation": dies_in("evaluate", 2, module=LOOP),
    "while saving": dies_in("save", 2, module="megatron.core.dist_checkpointing"),
    "before the next step": dies_in("largest", VOTE + 1),
}
VICTIMS = {"in the step": 0, "behind the commit": 3, "before the log": 3, "while saving": 0}


def surviving(folder, name, changes=(), ranks=4, tokens="100", steps=STEPS, seldom=False, **more):
    (folder / name).mkdir()
    metrics = ["--metrics-path", str(folder / name / "metrics.jsonl")]
    flags = [*HDP, tokens, *metrics, *changes]
    if seldom:  # evaluations and checkpoints; no trace
        flags += ["--eval-interval", "1000", "--save-interval", "1000", "--lr", "1e-3"]
        flags += ["--hdp-survive"] if "survives" in more else []
    elif "survives" in more:
        trace = ["--hdp-trace", str(folder / name / "trace"), "--hdp-trace-steps", "2-6"]
        flags += ["--hdp-survive", *trace]
    return planned(folder, name, ranks, flags, steps=steps, save=f"{name}/saved", **more)


def lines_of(folder, name):
    text = (folder / name / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def require_same_run(folder, name, expected="one", within=1e-10, states_within=1e-6):
    """In float64 all but Megatron's loss is, whose gradient rounds to float32."""
    found, lines = lines_of(folder, name), lines_of(folder, expected)
    assert [one["step"] for one in found] == [one["step"] for one in lines] == [1, 2, 3, 4, 5, 6]
    for one, other in zip(found, lines, strict=True):
        assert one["consumed_tokens"] == other["consumed_tokens"]
        assert (one["validation_loss"] is None) == (one["step"] % 2 == 1)
        for key in ("loss", "grad_norm", "validation_loss", "learning_rate"):
            if other[key] is not None:
                assert one[key] == pytest.approx(other[key], rel=within), (one["step"], key)
    folders = f"{name}/saved", f"{expected}/saved"
    require_same_states(folder, *folders, iteration=STEPS, rel=states_within)


def log_of(folder, name):
    return "".join(path.read_text() for path in sorted(folder.glob(f"log {name}.[0-9]*")))


def require_lines_once(folder, name):
    text = log_of(folder, name)
    for step in range(1, STEPS + 1):
        assert text.count(f" iteration {step:8d}/{STEPS:8d} |") == 1, step
        assert text.count(f"hybrid data parallelism, iteration {step}: ") == 1, step
        assert f"consumed samples: {8 * step:12d} |" in text


def require_traced(folder, name, num_members, goes_back=False):
    """The trace holds all steps, how members came into epochs, and who was lost and joined."""
    trace = read_trace(folder / name / "trace" / "steps-2-6.json")
    epochs = [one["args"] for one in trace.epochs()]
    lost = {member for one in epochs for member in one["lost"]}
    joined = {member for one in epochs for member in one["joined"]}
    require_whole(trace, set(range(num_members)) - lost, STEPS - 1, goes_back)
    for member in joined:
        assert trace.lane(member, "recovery") and trace.lane(member, "compute")
    return lost, joined


@pytest.fixture(scope="module")
def moments(tmp_path_factory):
    folder = tmp_path_factory.mktemp("moments")
    write_corpus(folder, LENGTHS)
    plan = [surviving(folder, "one", ranks=1, tokens="256", fp64=True)]
    for name, fault in MOMENTS.items():
        fault = {str(VICTIMS.get(name, 1)): fault}
        plan.append(surviving(folder, name, survives=fault, fp64=True))
    drive(folder, plan, timeout_s=PATIENCE_S)
    return folder


@pytest.mark.parametrize("name", MOMENTS)
def test_a_rank_dies(moments, name):
    require_same_run(moments, name)
    require_lines_once(moments, name)
    assert require_traced(moments, name, 4) == ({VICTIMS.get(name, 1)}, set())
    assert "epoch 1: 3 HDP ranks" in (moments / f"log {name}.said").read_text()


JOINS = {"survives": {"3": MOMENTS["before the vote"]}, "replaces": True, "waits_at": 5}
VIRTUAL = [*STAGES, "--num-layers", "4", "--num-virtual-stages-per-pipeline-rank", "2"]
EXPERTS = [*BALANCED.split(), "--moe-z-loss-coeff", "1e-3"]
MTP = ["--mtp-num-layers", "1"]
PLANE = "data plane"
LAYOUTS = {  # flags, tokens of a rank, flags and ranks of the run that loses nothing, HDP ranks
    "plain": ([], "100", [], 1, 1),
    "sharded": (OVERLAPPED, "100", SHARDED, 1, 1),
    "tensor": (TENSOR, "256", [], 1, 1),
    "stages": ([*SHARDED, *STAGES], "256", [*SHARDED, *STAGES], 2, 1),
    "virtual": (VIRTUAL, "256", VIRTUAL, 2, 1),
    "experts": (EXPERTS, "100", EXPERTS, 1, 1),
    "across": ([*EXPERTS, *ACROSS], "160", [*EXPERTS, *ACROSS], 2, 2),
    "mtp": (MTP, "100", MTP, 1, 1),
    PLANE: (["--hdp-loaders", "ray"], "100", [], 1, 1),
    "offload": (["--num-layers", "4"], "70", ["--num-layers", "4"], 1, 1),
}
"""The last: how many HDP ranks leave and join together."""
WITHOUT_RAY = [name for name in LAYOUTS if name != PLANE]


def run_layouts(folder, names):
    write_corpus(folder, LENGTHS)
    plan = []
    for name in names:
        flags, tokens, alone, ranks, _ = LAYOUTS[name]
        if name == "offload":
            flags = [*flags, *offloading(folder, 4)]
        plan.append(surviving(folder, f"{name} alone", alone, ranks=ranks, tokens="256"))
        plan.append(surviving(folder, name, flags, tokens=tokens, **JOINS))
    drive(folder, plan, timeout_s=PATIENCE_S)


def require_lost_and_joined(folder, name):
    require_same_run(folder, name, f"{name} alone", within=1e-5, states_within=1e-4)
    require_lines_once(folder, name)
    lost, joined = require_traced(folder, name, 4, "sharded" in name or "stages" in name)
    assert 3 in lost and joined
    said = (folder / f"log {name}.said").read_text()
    assert (
        "epoch 1: " in said and "epoch 2: " in said and f"{LAYOUTS[name][4]} HDP ranks join" in said
    )


@pytest.fixture(scope="module")
def layouts(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("layouts")
    run_layouts(folder, wanted(request, WITHOUT_RAY))
    return folder


@pytest.mark.parametrize("name", WITHOUT_RAY)
def test_a_rank_dies_and_another_joins(layouts, name):
    require_lost_and_joined(layouts, name)
    if name == "offload":  # three ranks have room for the longest sequence no other way
        assert max(scalars(layouts, name)["hdp/offloaded-bytes"].values()) > 0


def test_a_rank_dies_beside_the_data_plane(tmp_path):
    pytest.importorskip("ray", reason="no Ray: pip install 'megatron-hdp[ray]'")
    run_layouts(tmp_path, [PLANE])
    require_lost_and_joined(tmp_path, PLANE)


@pytest.mark.skipif("HDP_TEST_KILLS" not in os.environ, reason="asked for by HDP_TEST_KILLS=20")
@pytest.mark.parametrize("how", ["whole", "sharded"])
def test_twenty_deaths_and_as_many_joins(tmp_path, how):
    """Whoever lives through them holds no more in the end than steps alone make it hold."""
    write_corpus(tmp_path, LENGTHS)
    longer = {"steps": 400, "seldom": True}  # a slow machine replaces no rank in six of them
    plan = [surviving(tmp_path, "one", tokens="256", ranks=1, **longer)]
    flags, metrics = ([], OVERLAPPED)[how == "sharded"], str(tmp_path / how / "metrics.jsonl")
    more = {"survives": {}, "replaces": True, "deaths": metrics}
    plan.append(surviving(tmp_path, how, flags, tokens="100", **longer, **more))
    drive(tmp_path, plan, timeout_s=PATIENCE_S)
    found, expected = lines_of(tmp_path, how), lines_of(tmp_path, "one")
    assert [one["step"] for one in found] == list(range(1, 401))
    for one, other in zip(found, expected, strict=True):  # in float32, and rounding grows
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-3), one["step"]
    deaths, memory, descriptors = json.loads((tmp_path / f"log {how}.grown").read_text())
    print(f"{deaths} deaths, behind the first 6: {memory:.0f} bytes, {descriptors} descriptors")
    assert deaths == 20 and memory < 4e6 and descriptors < 10


BESIDE = ["--async-save", "--use-persistent-ckpt-worker"]
if (
    CHECKOUT
    and "async_strategy" in Path(CHECKOUT, "megatron/training/checkpointing.py").read_text()
):
    BESIDE += ["--async-strategy", "mcore"]
SAVING = {  # faults by member
    "under way": {"0": MOMENTS["in the step"]},  # of step 2, in step 3
    "joins": {"3": MOMENTS["before the vote"]},
}


@pytest.fixture(scope="module")
def saving(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saving")
    write_corpus(folder, LENGTHS)
    plan = [surviving(folder, "one", ranks=1, tokens="256")]
    for name in wanted(request, SAVING):
        joins = {"replaces": True, "waits_at": 5} if name == "joins" else {}
        more = {"survives": SAVING[name], "saves_beside": True, **joins}
        plan.append(surviving(folder, name, BESIDE, **more))
    drive(folder, plan, timeout_s=PATIENCE_S)
    return folder


@pytest.mark.parametrize("name", SAVING)
def test_a_save_under_way_is_made_again(saving, name):
    require_same_run(saving, name, within=1e-5, states_within=1e-4)
    require_lines_once(saving, name)
    saved = saving / name / "saved"
    assert (saved / TRACKER).read_text() == str(STEPS)
    left = sorted(one for one in saved.iterdir() if one.is_dir())
    assert [one.name for one in left][-1] == "iter_0000006"
    assert all((one / ".metadata").is_file() for one in left), left
    text = log_of(saving, name)
    assert "scheduled an async checkpoint save" in text
    if name == "under way":
        assert "the save of iteration 2 is given up" in text and left[0].name == "iter_0000002"


def test_a_full_disk_behind_a_death_ends_the_job(tmp_path):
    """The checkpoint before stays: it is to be started again."""
    write_corpus(tmp_path, LENGTHS)
    fault = {"2": MOMENTS["before the vote"]}  # of step 3
    exits = [ExitCode.BLAMES_ANOTHER] * 3
    plan = [surviving(tmp_path, "full", survives=fault, no_room_for=4, exits=exits, steps=8)]
    drive(tmp_path, plan, timeout_s=PATIENCE_S)
    words = "the checkpoint could not be saved (rank 0: Worker failure: "
    assert words in log_of(tmp_path, "full")
    assert (tmp_path / "full" / "saved" / TRACKER).read_text() == "2"
    assert [one["step"] for one in lines_of(tmp_path, "full")] == [1, 2, 3, 4]


def test_the_command_loses_a_rank(tmp_path):
    write_corpus(tmp_path, LENGTHS)
    run = surviving(tmp_path, "command", survives={}, seldom=True, steps=60)
    launch = [sys.executable, "-m", "megatron_hdp.cli.main", "launch", "--nproc-per-node", "4"]
    command = [*launch, "-m", "megatron_hdp", "run", run["script"], *run["arguments"]]
    metrics, log = tmp_path / "command" / "metrics.jsonl", tmp_path / "log"
    environment = {**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": "1", "TORCHDYNAMO_DISABLE": "1"}
    with log.open("w") as output:
        job = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
    try:
        while not metrics.exists() or len(metrics.read_text().splitlines()) < 2:
            assert job.poll() is None, log.read_text()[-3000:]
            time.sleep(0.02)
        psutil.Process(job.pid).children()[1].kill()
        assert job.wait(PATIENCE_S) == ExitCode.DONE, log.read_text()[-3000:]
    finally:
        job.kill()
    assert "was killed by SIGKILL" in log.read_text()
    assert [one["step"] for one in lines_of(tmp_path, "command")] == list(range(1, 61))
