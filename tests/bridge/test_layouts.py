"""Bridge's `finetune` from weights that one rank saved, under HDP over layouts of ranks."""

import numpy as np
import pytest
import torch

from tests.bridge.loop import require_bridge, trained, write_rows

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
HDP, LONG = {"hdp_tokens_per_rank": 256}, {"timeout_s": 500}
EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 64}
EXPERTS |= {"moe_router_load_balancing_type": "none", "moe_token_dispatcher_type": "alltoall"}
DEEP = {"num_layers": 4}
TENSOR = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
STAGES = {"pipeline_model_parallel_size": 2, "pipeline_dtype": torch.float32}
REPEATED = {"recompute_granularity": "full", "recompute_method": "uniform"}
REPEATED |= {"recompute_num_layers": 1}
LAYOUTS = {  # ranks, the model, how it lies over ranks
    "experts": (2, EXPERTS, {}),
    "expert-parallel": (4, EXPERTS, {"expert_model_parallel_size": 2}),
    "sequence-parallel": (4, {}, TENSOR),
    "virtual-stages": (4, DEEP, STAGES | {"virtual_pipeline_model_parallel_size": 2}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of rows, and of checkpoints that `pretrained` writes."""
    require_bridge()
    found = tmp_path_factory.mktemp("bridge")
    write_rows(found / "rows")
    return found


@pytest.fixture(scope="module")
def begun(run_ranks, folder):
    """Weights that one rank has trained without HDP, by model."""
    found = {}

    def saved(model):
        key = str(sorted(model))
        if key not in found:
            found[key] = str(folder / f"weights-{len(found)}")
            run_ranks(1, trained, folder / "rows", steps=1, save=found[key], **model, **LONG)
        return found[key]

    return saved


def require_same(found, expected):
    """Losses of all steps and the first gradient's norm; Adam lets later ones part."""
    losses = [[loss for _, loss, _ in one["steps"]] for one in (found, expected)]
    assert len(losses[0]) == 4
    np.testing.assert_allclose(*losses, rtol=1e-5)
    np.testing.assert_allclose(found["steps"][0], expected["steps"][0], rtol=1e-5)
    np.testing.assert_allclose(found["steps"], expected["steps"], rtol=5e-4)
    np.testing.assert_allclose(found["validation"], expected["validation"], rtol=1e-5)


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(run_ranks, folder, begun, name):
    """Against one rank without HDP, from the same weights."""
    num_ranks, model, layout = LAYOUTS[name]
    how = {"steps": 4, "samples": 8, "pretrained": begun(model), **model, **LONG}
    (expected,) = run_ranks(1, trained, folder / "rows", **how)
    found = run_ranks(num_ranks, trained, folder / "rows", HDP, sharded=True, **layout, **how)
    require_same(found[-1], expected)


def test_adapters(run_ranks, folder, begun, tmp_path):
    """Bridge's own LoRA, recomputed; its checkpoints of adapters alone resume bit for bit."""
    hdp = {"options": HDP, "sharded": True, **REPEATED}
    how = {"steps": 4, "samples": 8, "pretrained": begun({}), "lora": {"dim": 4}, **LONG}
    (expected,) = run_ranks(1, trained, folder / "rows", **how)
    found = run_ranks(2, trained, folder / "rows", save=str(tmp_path), **hdp, **how)
    again = run_ranks(2, trained, folder / "rows", load=str(tmp_path), **hdp, **how)
    for whole, resumed in zip(found, again, strict=True):
        require_same(whole, expected)
        assert resumed["steps"] == whole["steps"][2:]
        assert whole["trained"] == whole["reduced"] < whole["weights"] / 5


def test_adapters_over_tensor_ranks(run_ranks, folder, begun):
    """With sequence parallelism, against two such ranks without HDP, which draw the same ones."""
    how = {"steps": 4, "samples": 8, "pretrained": begun({}), "lora": {"dim": 4}, **LONG}
    expected = run_ranks(2, trained, folder / "rows", **TENSOR, **how)
    found = run_ranks(4, trained, folder / "rows", HDP, sharded=True, **TENSOR, **how)
    require_same(found[-1], expected[-1])


def test_bfloat16(run_ranks, folder, begun, tmp_path):
    """Rounded as it is; the resumed half, bit for bit."""
    how = {"steps": 4, "samples": 8, "precision": "bf16_mixed", **LONG}
    (expected,) = run_ranks(1, trained, folder / "rows", pretrained=begun({}), **how)
    hdp = {"options": HDP, "sharded": True}
    found = run_ranks(
        2, trained, folder / "rows", pretrained=begun({}), save=str(tmp_path), **hdp, **how
    )
    again = run_ranks(2, trained, folder / "rows", load=str(tmp_path), **hdp, **how)
    for whole, resumed in zip(found, again, strict=True):
        np.testing.assert_allclose(whole["steps"], expected["steps"], rtol=2e-2)
        assert resumed["steps"] == whole["steps"][2:]
