"""Between steps of verl's engine: checkpoints, the host's memory, refusals."""

import pytest
import torch

from tests.verl.engines import HOW, engine_of, is_there, save_llama
from tests.verl.test_engine import VOCABULARY, batch_of, loss_of


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_phases(run_ranks, tmp_path, monkeypatch):
    """A step behind a checkpoint or a stay on the host is that of an engine that had neither."""
    if not is_there():
        pytest.skip(HOW)
    monkeypatch.setenv("VERL_ENGINE_VENDOR", "hdp")
    save_llama(tmp_path / "model", vocabulary=VOCABULARY)
    for found in run_ranks(2, phases, str(tmp_path), timeout_s=800):
        assert found["resumed"] == found["went on"] and found["went on"] != found["first"]
        assert found["from the host"] == found["first"]
        assert found["on the host"] == 0, "bytes of parameters and gradients on the device"
        for words, told in found["refused"].items():
            assert words in told


def step(engine):
    """(loss, norm of the gradient, a sum of the weights) of a step."""
    with engine.train_mode():
        engine.optimizer_zero_grad()
        out = engine.forward_backward_batch(batch_of("ppo"), loss_of("ppo"))
        norm = float(engine.optimizer_step())
        engine.lr_scheduler_step()
        total = sum(one.double().abs().sum().item() for one in engine.module[0].parameters())
    return out["loss"], norm, total


def phases(folder):
    """Body of a rank."""
    stock = torch.empty
    torch.empty = lambda *shape, pin_memory=False, **how: stock(*shape, **how)  # there is no GPU
    model, saved = f"{folder}/model", f"{folder}/saved"
    engine = engine_of(model, lr=1e-3)
    found = {"refused": refused(engine)}
    found["first"] = step(engine)
    engine.save_checkpoint(saved, global_step=1)
    found["went on"] = step(engine)
    resumed = engine_of(model, lr=1e-3)
    resumed.load_checkpoint(saved, del_local_after_load=False)
    found["resumed"] = step(resumed)
    moved = engine_of(model, lr=1e-3, offload=True)
    found["on the host"] = on_device(moved)
    found["refused"]["found parameters on the host"] = told(
        lambda: moved.forward_backward_batch(batch_of("ppo"), None, forward_only=True)
    )
    with moved.eval_mode():
        moved.infer_batch(batch_of("ppo"))
    found["on the host"] += on_device(moved)
    found["from the host"] = step(moved)
    found["on the host"] += on_device(moved)
    return found


def on_device(engine):
    """Bytes of the buffers that verl empties."""
    return sum(
        one.storage().nbytes()
        for chunk in engine.module
        for buffer in chunk.buffers
        for one in (buffer.param_data, buffer.grad_data)
    )


def told(call):
    """What a call was refused with."""
    with pytest.raises(ValueError) as error:
        call()
    return str(error.value)


def refused(engine):
    """By words that are expected: what batches were refused with."""
    from verl.utils import tensordict_utils as tu

    found = {}
    for name in ("distillation_use_topk", "calculate_sum_pi_squared", "enable_routing_replay"):
        data = batch_of("ppo")
        tu.assign_non_tensor(data, **{name: True})
        found[f"found {name} in the batch"] = told(lambda data=data: engine.infer_batch(data))
    data = batch_of("ppo")
    data["routed_experts"] = data["input_ids"]
    found["found routed_experts in the batch"] = told(lambda: engine.infer_batch(data))
    return found
