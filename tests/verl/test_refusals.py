"""What HDP's engines of verl refuse by name, in verl's own configurations and batches."""

import pytest
import torch

from tests.session.test_bridge import bridge_of
from tests.verl.engines import HOW, is_there, on_cpu
from tests.verl.test_engine import batch_of

SETTINGS = {  # of the engine: what is told
    "use_fused_kernels": (True, "found use_fused_kernels, which HDP does not know: switch it off"),
    "use_megatron_fsdp": (True, "found use_megatron_fsdp, which HDP does not know"),
    "dynamic_context_parallel": (True, "found dynamic_context_parallel, which HDP does not know"),
    "qat": ("qat", "found qat, which HDP does not know: switch it off"),
    "router_replay": ("R3", "found router_replay, which HDP does not know: set its mode to disabl"),
    "max_token_len_per_gpu": (None, "found no max_token_len_per_gpu in the engine's configurat"),
}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_refusals(run_ranks, monkeypatch):
    if not is_there():
        pytest.skip(HOW)
    monkeypatch.setenv("VERL_ENGINE_VENDOR", "hdp")
    (found,) = run_ranks(1, refused, timeout_s=500)
    expected = {name: words for name, (_, words) in SETTINGS.items()}
    expected |= {
        "mtp": "found mtp, whose layers HDP would not train as verl's settings say: switch it off",
        "lora": "found lora_rank, which is for FSDP: set the rank of lora",
        "images": "found multi_modal_inputs in the batch, which HDP does not know: leave it out",
        "padded": "found padded input_ids, expected nested ones: set use_remove_padding",
        "positions": "found positions of sequence 1 that are not 0, 1, 2 ..., which HDP does not",
    }
    assert found.keys() == expected.keys()
    for name, words in expected.items():
        assert found[name].startswith(words), name


def refused():
    """Body of a rank: by name, what was refused; of all of them the other part is plain."""
    bridge_of()
    on_cpu()
    from types import SimpleNamespace as Of

    from verl.workers.config import McoreEngineConfig
    from verl.workers.config.engine import EngineRouterReplayConfig, QATEngineConfig

    from megatron_hdp.verl.engine import HdpEngine
    from megatron_hdp.verl.rows import require_known

    def of_model(lora=0, mtp=False):
        return Of(lora_rank=lora, mtp=Of(enable=mtp))

    def told(call, *given):
        with pytest.raises(ValueError) as error:
            call(*given)
        return str(error.value)

    found = {}
    plain = McoreEngineConfig(max_token_len_per_gpu=64)
    for name, made in (("mtp", of_model(mtp=True)), ("lora", of_model(lora=8))):
        found[name] = told(HdpEngine, made, plain, None, None)
    for name, (value, _) in SETTINGS.items():
        if name == "qat":
            value = QATEngineConfig(enable=True)
        elif name == "router_replay":
            value = EngineRouterReplayConfig(mode=value)
        settings = {"max_token_len_per_gpu": 64, "max_seqlen_per_dp_cp_rank": 64, name: value}
        found[name] = told(HdpEngine, of_model(), McoreEngineConfig(**settings), None, None)
    data = batch_of("ppo")
    require_known(data)
    data["multi_modal_inputs"] = torch.zeros(len(data))
    found["images"] = told(require_known, data)
    data = batch_of("ppo")
    rows = [one.clone() for one in data["position_ids"].unbind()]
    rows[1] += 1
    data["position_ids"] = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    found["positions"] = told(require_known, data)
    data["input_ids"] = torch.nested.to_padded_tensor(data["input_ids"], 0)
    found["padded"] = told(require_known, data)
    return found
