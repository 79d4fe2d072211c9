"""The training command: the loss falls, a GPU's curve is the CPU's, a run resumes, it is timed."""

import json
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import orjson
import pytest

from megatron_hdp.data import TokenWriter
from megatron_hdp.processes.ports import free_port
from scripts.gpu.several_ranks import one_gpu_environment

ROOT = Path(__file__).parents[2]
STEPS, SAVED = 6, 3
TIMEOUT_S = 180
ON_GPU = pytest.param("cuda", marks=pytest.mark.gpu)
TEXT = Path(shlex.__file__).read_bytes()  # any text will do

MODEL = """
    --num-layers 2 --hidden-size 128 --num-attention-heads 2 --seq-length 256 --tokenizer-type byte
    --hidden-dropout 0 --attention-dropout 0 --global-batch-size 8 --lr 2e-3 --init-method-std 0.05
    --log-interval 1 --split 9,1,0 --lr-decay-iters 100 --num-query-groups 1
"""
HDP = "--hybrid-data-parallel --hdp-tokens-per-rank 512"
OPTIMIZER = "--use-distributed-optimizer --overlap-grad-reduce"
BF16 = "--bf16 --swiglu --normalization RMSNorm --disable-bias-linear"
KINDS = {
    "hdp-fp32": f"{HDP} {OPTIMIZER}",
    "hdp-bf16": f"{HDP} {OPTIMIZER} {BF16}",
    "hdp-recomputed": f"{HDP} --bf16 --recompute-granularity full --recompute-method uniform "
    "--recompute-num-layers 1",
    "hdp-experts": f"{HDP} --bf16 --num-experts 4 --disable-bias-linear",
    "stock-fp32": f"{OPTIMIZER}",
    "stock-bf16": f"{OPTIMIZER} {BF16}",
}


@dataclass(frozen=True)
class Command:
    """A run that has been started."""

    processes: list[subprocess.Popen[bytes]]
    outputs: list[Path]
    metrics_path: Path

    def finish(self, timeout_s: float) -> list[dict]:
        """The metrics of every step; fails the test with all ranks' output if one failed."""
        try:
            codes = [process.wait(timeout_s) for process in self.processes]
        finally:
            self.kill()
        text = "\n".join(path.read_text(errors="replace")[-6000:] for path in self.outputs)
        assert not any(codes), f"exit codes {codes}:\n{text}"
        return [orjson.loads(line) for line in self.metrics_path.read_bytes().splitlines()]

    def kill(self) -> None:
        """Ends what is still running."""
        for process in self.processes:
            process.kill()
            process.wait()


def start(flags: list[str], folder: Path, device: str, num_ranks: int = 1) -> Command:
    """Starts ``pretrain_gpt`` on ranks, all on the first GPU ("cuda") or none ("cpu")."""
    folder.mkdir(parents=True)
    metrics_path, port = folder / "metrics.jsonl", free_port()
    command = [sys.executable, "-m", "megatron_hdp.pretrain_gpt", *flags]
    command += ["--metrics-path", str(metrics_path)]
    processes, outputs = [], [folder / f"output-{rank}" for rank in range(num_ranks)]
    common = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *module_paths(device)]),
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
    }
    for rank, path in enumerate(outputs):
        environment = common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        environment |= _device(device, rank, num_ranks)
        how = {"env": environment, "stderr": subprocess.STDOUT}
        with path.open("wb") as output:
            processes.append(subprocess.Popen(command, stdout=output, **how))
    return Command(processes, outputs, metrics_path)


def module_paths(device: str) -> list[str]:
    """Where this process finds modules; on a CPU without a TransformerEngine that was carried."""
    paths = [path for path in sys.path if path]
    if device == "cuda":
        return paths
    return [path for path in paths if not Path(path, "transformer_engine").exists()]


def _device(device: str, rank: int, num_ranks: int) -> dict[str, str]:
    if device == "cpu":
        return {"CUDA_VISIBLE_DEVICES": ""}
    return {} if num_ranks == 1 else {"LOCAL_RANK": "0"} | one_gpu_environment(rank)


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "corpus"
    rng = np.random.default_rng(3)
    with TokenWriter(path, 257) as writer:
        for length in [256, 256, *rng.integers(3, 256, 60).tolist()]:
            begin = int(rng.integers(0, len(TEXT) - length))
            writer.add(np.frombuffer(TEXT, np.uint8)[begin : begin + length].astype(np.int64))
    return str(path)


def flags(prefix, kind, more=""):
    return shlex.split(f"{MODEL} --data-path {prefix} {KINDS[kind]} {more}")


@pytest.fixture(scope="module")
def weights(prefix, tmp_path_factory):
    """A checkpoint of a CPU's initial weights: a GPU's generator would give others."""
    folder = tmp_path_factory.mktemp("weights")
    more = f"--train-iters 1 --lr 0 --weight-decay 0 --save {folder}/saved"
    start(flags(prefix, "hdp-fp32", more), folder / "run", "cpu").finish(TIMEOUT_S)
    return folder / "saved"


@pytest.fixture(scope="module")
def from_weights(prefix, weights, tmp_path_factory):
    """Whole runs in float32 from those weights by device: each saves half-way and is traced."""
    done = {}

    def run(device, num_ranks=1):
        if (device, num_ranks) not in done:
            folder = tmp_path_factory.mktemp(f"{device}-{num_ranks}")
            more = (
                f"--train-iters {STEPS} --pretrained-checkpoint {weights} --save {folder}/saved "
                f"--save-interval {SAVED} --hdp-trace {folder}/trace --hdp-trace-steps 2 "
                f"--eval-iters 1 --eval-interval {STEPS} --hdp-tokens-per-rank "
                f"{512 if num_ranks == 1 else 160}"  # less than the longest sequence: rings
            )
            command = start(flags(prefix, "hdp-fp32", more), folder / "run", device, num_ranks)
            done[device, num_ranks] = folder, command.finish(TIMEOUT_S)
        return done[device, num_ranks]

    return run


def losses(metrics):
    return np.array([step["loss"] for step in metrics])


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.slow), ON_GPU])
def test_the_curve_is_that_of_the_cpu(from_weights, device):
    _, metrics = from_weights(device)
    _, reference = from_weights("cpu")
    assert len(metrics) == STEPS and losses(metrics)[-1] < losses(metrics)[0] - 0.3
    np.testing.assert_allclose(losses(metrics), losses(reference), rtol=2e-3)
    np.testing.assert_allclose(losses(metrics)[0], losses(reference)[0], rtol=1e-5)
    assert metrics[-1]["validation_loss"] == pytest.approx(
        reference[-1]["validation_loss"], rel=2e-3
    )


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.slow), ON_GPU])
def test_two_ranks_have_the_curve_of_one(from_weights, device):
    """On one GPU; NCCL takes them for two machines, see `one_gpu_environment`."""
    _, metrics = from_weights(device, 2)
    _, reference = from_weights("cpu")
    np.testing.assert_allclose(losses(metrics), losses(reference), rtol=2e-3)
    assert any(step["ring_bytes"] for step in metrics)


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.slow), ON_GPU])
def test_a_run_resumes_where_it_stopped(prefix, from_weights, tmp_path, device):
    folder, whole = from_weights(device)
    more = f"--train-iters {STEPS} --load {folder}/saved --ckpt-step {SAVED}"
    rest = start(flags(prefix, "hdp-fp32", more), tmp_path / "run", device).finish(TIMEOUT_S)
    assert [step["step"] for step in rest] == list(range(SAVED + 1, STEPS + 1))
    np.testing.assert_allclose(losses(rest), losses(whole)[SAVED:], rtol=1e-4)


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.slow), ON_GPU])
def test_times_are_those_of_the_device(from_weights, device):
    """Work lies inside the step that launched it, in the trace and in the step's figures."""
    folder, metrics = from_weights(device)
    trace = json.loads((folder / "trace" / "steps-2.json").read_bytes())
    bars = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    whole = next(event for event in bars if event["name"] == "step 2")
    work = [e for e in bars if e["name"].startswith(("forward", "backward"))]
    assert len(work) >= 2
    seconds = metrics[1]["seconds"]
    assert 0 < whole["dur"] / 1e6 <= seconds
    assert all(event["ts"] >= 0 and event["ts"] + event["dur"] <= seconds * 1e6 for event in work)
    for step in metrics:
        assert 0 < step["makespan_s"] <= step["seconds"]
        assert 0 <= step["sync_s"] <= step["seconds"]
    if device == "cpu":
        busy_s = sum(event["dur"] for event in work) / 1e6
        assert busy_s == pytest.approx(metrics[1]["makespan_s"], rel=0.2)


@pytest.fixture(scope="module")
def others(prefix, tmp_path_factory):
    """Every other kind on the GPU, all started at once: most of their time is starting."""
    folder = tmp_path_factory.mktemp("others")
    more = f"--train-iters {STEPS}"
    commands = {
        kind: start(
            flags(prefix, kind, f"{more} --save {folder}/{kind}-saved --async-save"),
            folder / kind,
            "cuda",
        )
        for kind in KINDS
        if kind != "hdp-fp32"
    }
    yield commands
    for command in commands.values():
        command.kill()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "hdp-fp32"])
def test_the_loss_falls(others, kind):
    """Also saves asynchronously at its end, through a process that shares the GPU's memory."""
    found = losses(others[kind].finish(TIMEOUT_S))
    assert len(found) == STEPS and np.isfinite(found).all()
    assert found[-1] < found[0] - 0.3
