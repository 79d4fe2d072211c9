"""A rank on a GPU is killed, and the others go on: what only GPUs can tell of it."""

import os
import subprocess
import sys
import time

import numpy as np
import orjson
import psutil
import pytest
import torch

from megatron_hdp.exit_codes import ExitCode
from megatron_hdp.runtime.epochs.nccl import UNRUN
from tests.gpu.test_training import ON_GPU, ROOT, TIMEOUT_S, flags, losses, module_paths, prefix

__all__ = ["prefix"]  # a fixture

NUM_RANKS, STEPS = 3, 40
RANK = """
import os, runpy, sys
sys.path.insert(0, {root!r})
from scripts.gpu.several_ranks import one_gpu_environment
if {shares}:
    os.environ.update(one_gpu_environment(int(os.environ["MEGATRON_HDP_MEMBER"])), LOCAL_RANK="0")
sys.argv = ["pretrain_gpt", *sys.argv[1:]]
runpy.run_module("megatron_hdp.pretrain_gpt", run_name="__main__")
"""
"""A rank of a job whose ranks share a GPU says that it is on a host of its own."""


def job(prefix, folder, device, num_ranks):
    """Starts training under an agent, which replaces who dies."""
    folder.mkdir()
    shares = device == "cuda" and torch.cuda.device_count() < num_ranks
    script = folder / "rank.py"
    script.write_text(RANK.format(root=str(ROOT), shares=shares))
    more = f"--hdp-survive --train-iters {STEPS} --lr-decay-iters {STEPS} --hdp-tokens-per-rank 160"
    more += f" --metrics-path {folder}/metrics.jsonl"
    launch = [sys.executable, "-m", "megatron_hdp.cli.main", "launch"]
    command = [*launch, "--nproc-per-node", str(num_ranks), str(script)]
    command += flags(prefix, "hdp-fp32", more)
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    path = os.pathsep.join([str(ROOT), *module_paths(device)])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | hidden
    with (folder / "log").open("w") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env=environment)


def lines(folder):
    path = folder / "metrics.jsonl"
    text = path.read_bytes().rpartition(b"\n")[0] if path.exists() else b""
    return [orjson.loads(line) for line in text.splitlines()]


def finished(process, folder):
    code = process.wait(TIMEOUT_S)
    assert code == ExitCode.DONE, (folder / "log").read_text()[-6000:]
    return lines(folder)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", ON_GPU])
def test_a_killed_rank_changes_no_loss(prefix, tmp_path, device):
    """The seconds from the kill to the next step's end are printed."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    process = job(prefix, whole, device, NUM_RANKS)
    try:
        expected = finished(process, whole)
    finally:
        process.kill()
    process = job(prefix, killed, device, NUM_RANKS)
    try:
        deadline = time.monotonic() + TIMEOUT_S
        while len(lines(killed)) < 5:
            assert process.poll() is None and time.monotonic() < deadline, _log(killed)
            time.sleep(0.01)
        victim = psutil.Process(process.pid).children()[1]
        steps, began = len(lines(killed)), time.monotonic()
        victim.kill()
        while len(lines(killed)) < steps + 2:
            assert process.poll() is None and time.monotonic() < deadline, _log(killed)
            time.sleep(0.01)
        seconds = time.monotonic() - began
        found = finished(process, killed)
    finally:
        process.kill()
    print(f"{seconds:.1f} s from the kill to the end of the second step behind it")
    assert "was killed by SIGKILL" in _log(killed) and "epoch 1" in _log(killed)
    assert (UNRUN in _log(killed)) == (device == "cuda")
    assert [one["step"] for one in found] == list(range(1, STEPS + 1))
    np.testing.assert_allclose(losses(found), losses(expected), rtol=1e-4)


def _log(folder):
    return (folder / "log").read_text()
