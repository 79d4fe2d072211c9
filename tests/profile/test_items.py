"""What items cost in an encoder, measured and read again."""

import json

import numpy as np
import pytest
import torch

from megatron_hdp.encoders import Qwen3VLEncoder, described_encoder
from megatron_hdp.media import ItemCostModel
from megatron_hdp.profile import items as measuring
from tests.profile.test_profile import CONFIG, started
from tests.support.vision_models import MODELS, encoder_of
from tests.training.media_runs import write_encoder
from tests.training.test_pictures import CONFIG as VISION

transformers = pytest.importorskip("transformers", reason="pip install 'megatron-hdp[tokenizers]'")
COSTS = {"patch_s": 2e-6, "patch2_s": 3e-10, "pack_s": 1e-3, "gathered_s_per_patch": 1e-8}


@pytest.mark.parametrize("name", MODELS)
def test_costs_are_what_calls_take(name, monkeypatch):
    """Seconds by a formula in the place of a clock: it is found again, from samples that run."""
    encoder = encoder_of(name)
    seen = []

    def taken(one, items, device):
        if len(seen) < 2:
            CALL_S(one, items, device)  # samples are items of this encoder
        sizes = np.array([one.patches(item) for item in items], dtype=np.float64)
        seen.append(len(items))
        return COSTS["patch_s"] * sizes.sum() + COSTS["patch2_s"] * (sizes**2).sum() + 1e-3

    monkeypatch.setattr(measuring, "_call_s", taken)
    found = measuring.measured_items(encoder, torch.device("cpu"), 100.0)
    for item in encoder.samples():
        n = encoder.patches(item)
        expected = COSTS["patch_s"] * n + COSTS["patch2_s"] * n**2 + 1e-3
        told = found.patch_s * n + found.patch2_s * n**2 + found.pack_s
        if n <= encoder.patches_per_pack:
            assert told == pytest.approx(expected, rel=0.25)
    assert {1, 4} >= set(seen) and found.forward_share == 0.25


CALL_S = measuring._call_s


def test_costs_come_from_a_file(tmp_path):
    path, folder = tmp_path / "costs.json", tmp_path
    config = {"model_type": "qwen3_vl", "vision_config": MODELS["qwen3-vl"][2]["vision_config"]}
    (folder / "config.json").write_text(json.dumps(config))
    path.write_bytes(ItemCostModel(**COSTS).to_json())
    encoder = described_encoder(folder, costs=path)
    assert encoder.cost == ItemCostModel(**COSTS)
    for weight in encoder.parameters():
        weight.requires_grad_(False)
    assert encoder.cost.patch_s == COSTS["patch_s"] / 4 and encoder.cost.forward_share == 1
    assert described_encoder(folder).cost != encoder.cost
    for data, words in (
        ({"patches": 1}, "unknown key 'patches'"),
        ({"patch2_s": 1.0}, "'patch_s' is missing"),
        ({"patch_s": "fast"}, "found 'fast', expected seconds"),
        ({"patch_s": -1.0}, "expected a number from 0 on"),
    ):
        path.write_text(json.dumps(data))
        with pytest.raises(ValueError, match=words):
            described_encoder(folder, costs=path)


@pytest.mark.slow
def test_a_profile_measures_them_too(tmp_path):
    """And a run with the file plans by it."""
    folder = write_encoder(tmp_path / "model", Qwen3VLEncoder, VISION)
    output = tmp_path / "costs.json"
    (tmp_path / "run.yaml").write_text(f"config: {CONFIG}\nhdp-encoder: {folder}\n")
    words = ("--config", tmp_path / "run.yaml", "--output", output, "--force")
    done = started(*words, "--budget-seconds", 4)
    assert done.returncode == 0, done.stderr
    found = ItemCostModel.from_json(tmp_path / "costs.items.json")
    assert f"written to {tmp_path / 'costs.items.json'}" in done.stdout
    by_shape = described_encoder(folder).cost
    assert found.patch_s > 10 * by_shape.patch_s, "a core is no GPU"
