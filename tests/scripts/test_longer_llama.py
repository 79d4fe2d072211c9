"""A tiny Llama learns longer contexts and to answer, from transformers and back, in two minutes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_tutorial(tmp_path):
    folder = tmp_path / "out"
    environment = {**os.environ, "PYTHON": sys.executable, "OUT": str(folder)}
    environment |= {"STEPS": "3", "PYTHONPATH": str(ROOT)}
    command = ["bash", str(ROOT / "scripts/longer_llama.sh")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    losses = {}
    for name in ("longer", "answers"):
        lines = (folder / f"{name}.jsonl").read_text().splitlines()
        losses[name] = [json.loads(line)["loss"] for line in lines]
    assert len(losses["longer"]) == 3 == len(losses["answers"])
    assert losses["longer"] == sorted(losses["longer"], reverse=True)
    said = done.stdout.splitlines()
    assert said[-2].endswith("16384 positions, base 500000, scaling llama3")
    assert said[-1].startswith("What is abc? ")
    before, after = folder / "llama", folder / "longer-llama"
    weights = [load_file(one / "model.safetensors") for one in (before, after)]
    shapes = [{name: one.shape for name, one in held.items()} for held in weights]
    assert shapes[0] == shapes[1]
    configs = [json.loads((one / "config.json").read_text()) for one in (before, after)]
    changed = {key for key in configs[0] | configs[1] if configs[0].get(key) != configs[1].get(key)}
    assert changed == {"max_position_embeddings", "rope_parameters"}
    assert (after / "tokenizer.json").read_bytes() == (before / "tokenizer.json").read_bytes()
