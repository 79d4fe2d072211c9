"""Bridge's loop with experts and latent attention: balancing losses, adapters."""

import numpy as np
import pytest

from tests.bridge.loop import require_bridge, trained, write_rows
from tests.bridge.test_data import of_texts, write_texts
from tests.bridge.test_layouts import EXPERTS, HDP, LONG, require_same
from tests.support.mla import PlainCoreAttention

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
LENGTH = 400
BALANCED = {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.5}
LATENT = {
    "multi_latent_attention": True,
    "num_query_groups": 4,
    **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_head_dim": 12, "qk_pos_emb_head_dim": 4},
    **{"v_head_dim": 12, "qk_layernorm": True, "rope_type": "rope"},
}


class TEDotProductAttention(PlainCoreAttention):
    """Stands for TransformerEngine's: Megatron's local one takes no heads of two sizes."""


def latent_layers(config):
    """Megatron's local layers with latent attention, which Bridge's own spec does not ask for."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    spec = get_gpt_layer_local_spec(
        multi_latent_attention=True, qk_layernorm=True, normalization=config.normalization
    )
    spec.submodules.self_attention.submodules.core_attention = TEDotProductAttention
    return spec


LATENT["transformer_layer_spec"] = latent_layers
LINEAR = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
MODELS = {  # ranks, the model, what of it has adapters, how it lies over half of the ranks
    "experts": (2, EXPERTS, LINEAR, {}),
    "expert-parallel": (4, EXPERTS, LINEAR, {"expert_model_parallel_size": 2}),
    "latent": (
        *(2, LATENT),
        ["linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj"]
        + ["linear_proj", "linear_fc1"],
        {},
    ),
}


@pytest.fixture
def folder(tmp_path):
    """Of rows, with a tokenizer."""
    require_bridge()
    write_rows(tmp_path)
    return tmp_path


def of_documents(folder):
    """Samples of one text each, whose last token predicts nothing: HDP sees the same tokens."""
    return of_texts(folder, LENGTH, eod_mask_loss=True)


def test_balancing_losses(run_ranks, folder):
    """Of samples without padding, on two ranks with and without HDP."""
    write_texts(folder, LENGTH)
    how = {"steps": 4, "data": of_documents, "seq_length": LENGTH, **EXPERTS, **BALANCED, **LONG}
    expected = run_ranks(2, trained, folder, **how)[0]
    for found in run_ranks(2, trained, folder, {"hdp_tokens_per_rank": 300}, sharded=True, **how):
        np.testing.assert_allclose(found["steps"], expected["steps"], rtol=2e-5)


@pytest.mark.parametrize("name", MODELS)
def test_adapters(run_ranks, folder, name, tmp_path):
    """Against half of the ranks without HDP, which draw the same ones, from the same weights."""
    num_ranks, model, targets, layout = MODELS[name]
    weights = str(tmp_path / "weights")
    run_ranks(1, trained, folder, steps=1, save=weights, **model, **LONG)
    lora = {"dim": 4, "target_modules": targets}
    how = {"steps": 4, "samples": 8, "pretrained": weights, "lora": lora, **model, **LONG}
    expected = run_ranks(num_ranks // 2, trained, folder, **layout, **how)[-1]
    for one in run_ranks(num_ranks, trained, folder, HDP, sharded=True, **layout, **how):
        require_same(one, expected)
        assert one["trained"] == one["reduced"] < one["weights"] / 3
