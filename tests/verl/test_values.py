"""verl's critic over HDP's ranks, by verl's own loss, against transformers on one."""

from functools import partial

import numpy as np
import pytest
import torch
import transformers

from tests.verl.engines import HOW, engine_of, is_there, save_llama
from tests.verl.test_engine import LENGTHS, VOCABULARY, batch_of, plain

LAYOUTS = {
    "ranks alone": (2, {}),
    "tensor": (4, {"tensor": 2}),
    "sequence": (4, {"tensor": 2, "sequence": True}),
    "pipeline": (4, {"pipeline": 2}),
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_and_gradients_are_those_of_one_rank(run_ranks, tmp_path, monkeypatch, layout):
    if not is_there():
        pytest.skip(HOW)
    monkeypatch.setenv("VERL_ENGINE_VENDOR", "hdp")
    save_llama(tmp_path, vocabulary=VOCABULARY)
    num_ranks, how = LAYOUTS[layout]
    for found in run_ranks(num_ranks, trained, str(tmp_path), how, timeout_s=800):
        wanted = by_transformers(str(tmp_path), found["head"])
        assert max(found["degrees"]) == 2 > min(found["degrees"]), "rings, and ranks alone"
        assert np.abs(found["values"] - wanted["values"]).max() < 1e-4
        assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
        assert found["norm"] == pytest.approx(wanted["norm"], rel=1e-4)
        assert found["metrics"] == pytest.approx(wanted["metrics"], rel=1e-3, abs=1e-5)
        assert found["pairs"] == pytest.approx(wanted["pairs"], rel=1e-4)
        assert "found a call for log-probabilities of a model whose head" in found["refused"]


def batch():
    """Rollouts with old values and returns."""
    data, draw = batch_of("ppo"), np.random.default_rng(1)

    def drawn():
        rows = [torch.as_tensor(draw.normal(0, 1, n).astype("f4")) for _, n in LENGTHS]
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)

    data["values"], data["returns"] = drawn(), drawn()
    return data


def loss():
    """verl's own."""
    from verl.workers.config import CriticConfig
    from verl.workers.utils.losses import value_loss

    how = {"strategy": "megatron", "ppo_micro_batch_size_per_gpu": 1, "cliprange_value": 0.5}
    return partial(value_loss, CriticConfig(**how))


def pairs(model_output, data, dp_group):
    """A reward model's: of two sequences that follow each other the first should score more."""
    values = model_output["values"]
    last = values.values()[values.offsets()[1:] - 1]
    value = -torch.nn.functional.logsigmoid(last[0::2] - last[1::2]).mean()
    return value, {"pairs": value.item()}


def trained(folder, how):
    """Body of a rank."""
    from verl.utils import tensordict_utils as tu

    engine = engine_of(folder, kind="value_model", **how)
    assert type(engine).__name__ == "HdpValueEngine"
    data = batch()
    tokens = [one.numpy() for one in data["input_ids"].unbind()]
    found = {"degrees": np.diff(engine.session.plan(tokens).rank_offsets).tolist()}
    heads = [one for name, one in engine.module[0].named_parameters() if "output_layer" in name]
    given = heads[0].detach().clone() if heads else torch.zeros(1, 64)
    if how:  # the first stage has no head
        torch.distributed.broadcast(given, 3)
    found["head"] = given.numpy()
    with engine.eval_mode():
        out = engine.infer_batch(data)
    found["values"] = out["model_output"]["values"].values().numpy()
    with engine.train_mode():
        engine.optimizer_zero_grad()
        out = engine.forward_backward_batch(data, loss(), forward_only=False)
        found["norm"] = float(engine.optimizer_step())
        tu.assign_non_tensor(data, force_group_size=2)
        engine.optimizer_zero_grad()
        of_pairs = engine.forward_backward_batch(data, pairs, forward_only=False)
        found["pairs"] = sum(of_pairs["loss"]), float(engine.optimizer_step())
    found["loss"], found["metrics"] = sum(out["loss"]), plain(out["metrics"])
    with pytest.raises(ValueError) as error:
        engine.session.log_probs(tokens)
    found["refused"] = str(error.value)
    return found


def by_transformers(folder, head):
    """The same in float64."""
    from verl.utils import tensordict_utils as tu
    from verl.utils.py_functional import append_to_dict

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).model
    head = torch.tensor(head, dtype=torch.float64, requires_grad=True)
    data = batch()
    values = torch.cat(
        [
            (model(one[None]).last_hidden_state[0] @ head.T)[:, 0]
            for one in data["input_ids"].unbind()
        ]
    )
    num = data["loss_mask"].values().sum().item()
    tu.assign_non_tensor(data, batch_num_tokens=num, dp_size=1, num_micro_batch=1)
    nested = torch.nested.nested_tensor_from_jagged(values, data["input_ids"].offsets())
    value, metrics = loss()(model_output={"values": nested}, data=data, dp_group=None)
    by_name, weights = {}, [*model.parameters(), head]
    append_to_dict(by_name, metrics)
    of_pairs, _ = pairs({"values": nested}, data, None)

    def norm(of):
        parts = torch.autograd.grad(of, weights, retain_graph=True)
        return torch.stack([one.norm() for one in parts]).norm().item()

    found = {"loss": value.item(), "norm": norm(value), "metrics": plain(by_name)}
    found["pairs"] = of_pairs.item(), norm(of_pairs)
    return found | {"values": values.detach().numpy()}
