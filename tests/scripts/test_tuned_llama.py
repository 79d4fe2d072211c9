"""A tiny Llama is tuned by adapters on chats and on pairs, exported to PEFT's files and merged."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_tutorial(tmp_path):
    folder = tmp_path / "out"
    environment = {**os.environ, "PYTHON": sys.executable, "OUT": str(folder)}
    environment |= {"STEPS": "8", "PYTHONPATH": str(ROOT)}
    command = ["bash", str(ROOT / "scripts/tuned_llama.sh")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    losses = {}
    for name in ("base", "answers", "preferred"):
        lines = (folder / f"{name}.jsonl").read_text().splitlines()
        losses[name] = [json.loads(line)["loss"] for line in lines]
        assert len(losses[name]) == 8
    assert losses["base"][-1] < losses["base"][0] - 0.5
    assert losses["preferred"][0] == pytest.approx(0.6931, abs=1e-4)  # nothing preferred yet
    assert losses["preferred"][-1] < 0.65
    assert "What is abc? " in done.stdout
    assert (folder / "losses.png").stat().st_size > 10_000
    adapters = load_file(folder / "peft" / "adapter_model.safetensors")
    before, after = (
        load_file(folder / one / "model.safetensors") for one in ("answering-llama", "tuned-llama")
    )
    of_a = [name for name in adapters if ".lora_A." in name]
    assert len(of_a) == 2 * 7  # each linear layer of both layers
    for name in of_a:
        weight = name.removeprefix("base_model.model.").replace(".lora_A.", ".")
        added = adapters[name.replace(".lora_A.", ".lora_B.")] @ adapters[name]
        torch.testing.assert_close(after[weight], before[weight] + added, rtol=1e-5, atol=1e-5)
