"""verl's adapters, which are Megatron-Bridge's, over HDP's ranks, against transformers on one."""

import numpy as np
import pytest
import torch
import transformers

from tests.verl.engines import HOW, engine_of, is_there, save_llama
from tests.verl.test_engine import VOCABULARY, batch_of, by_transformers, loss_of

LORA = {"type": "lora", "rank": 4, "alpha": 8, "dropout": 0.0}
SCALE = 2.0  # alpha / rank


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_adapters(run_ranks, tmp_path, monkeypatch):
    """Loss, gradient and log-probabilities, and those of the model without its adapters."""
    if not is_there():
        pytest.skip(HOW)
    monkeypatch.setenv("VERL_ENGINE_VENDOR", "hdp")
    save_llama(tmp_path, vocabulary=VOCABULARY)
    found = run_ranks(2, trained, str(tmp_path), timeout_s=800)
    base = by_transformers(str(tmp_path), ["ppo"])["ppo"]
    merged = with_adapters(str(tmp_path), found[0]["adapters"])
    wanted = by_transformers(str(tmp_path), ["ppo"], merged)["ppo"]
    assert np.abs(base["log_probs"] - wanted["log_probs"]).max() > 0.1
    for one in found:
        assert one["loss"] == pytest.approx(wanted["loss"], rel=1e-5, abs=1e-6)
        assert one["norm"] == pytest.approx(wanted["norm"], rel=1e-4)
        assert np.abs(one["log_probs"] - wanted["log_probs"]).max() < 1e-4
        assert np.abs(one["without"] - base["log_probs"]).max() < 1e-4
        assert "found peft.dropout = 0.5, expected 0" in one["refused"]


def trained(folder):
    """Body of a rank: a step with adapters that are not 0, the weights of these."""
    engine = engine_of(folder, lora=LORA)
    draw = torch.Generator().manual_seed(3)
    for parameter in engine.module[0].parameters():
        if parameter.requires_grad:
            parameter.data.normal_(0, 0.3, generator=draw)
    engine.optimizer.reload_model_params()
    found = {}
    with engine.train_mode():
        engine.optimizer_zero_grad()
        out = engine.forward_backward_batch(batch_of("ppo"), loss_of("ppo"), forward_only=False)
        found["loss"], found["norm"] = sum(out["loss"]), float(engine.optimizer_step())
    found["log_probs"] = out["model_output"]["log_probs"].values().numpy()
    with engine.eval_mode(), engine.disable_adapter():
        out = engine.infer_batch(batch_of("ppo"))
    found["without"] = out["model_output"]["log_probs"].values().numpy()
    weights, config = engine.get_per_tensor_param(base_sync_done=True)
    found["adapters"] = {name: one.detach().clone() for name, one in weights}
    assert config["r"] == LORA["rank"]
    with pytest.raises(ValueError) as error:
        engine_of(folder, lora=LORA | {"dropout": 0.5})
    found["refused"] = str(error.value)
    return found


def with_adapters(folder, adapters):
    """(weights of linear layers with their adapters in them, each adapter once)."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    leaves, pairs = {}, {}
    for name, given in adapters.items():
        leaf = given.double().requires_grad_()
        leaf = leaves.setdefault(given.numpy().tobytes(), leaf)  # of q, k and v one A
        layer, _, kind = name.removeprefix("base_model.model.").rpartition(".lora_")
        pairs.setdefault(layer, {})[kind[0]] = leaf
    assert len(pairs) == 2 * 7, "of two layers, all linear ones"
    weights = {
        f"{layer}.weight": model.get_parameter(f"{layer}.weight") + SCALE * one["B"] @ one["A"]
        for layer, one in pairs.items()
    }
    return weights, list(leaves.values())
