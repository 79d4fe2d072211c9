"""Megatron-Bridge itself builds a model, a session trains it, Bridge exports it to transformers."""

import importlib.machinery
import importlib.util
import sys
import types
import typing
import warnings

import numpy as np
import pytest
import torch
import transformers

from megatron_hdp.megatron.cpu import shim
from megatron_hdp.megatron.model.building import SequenceParallelNorm
from megatron_hdp.session import HdpSession

HOW = "Megatron-Bridge is not installed: do as tests/bridge/requirements.txt says"
ON_CPU = {
    **dict.fromkeys(("use_cpu_initialization", "calculate_per_token_loss"), True),
    **dict.fromkeys(("gradient_accumulation_fusion", "masked_softmax_fusion"), False),
    **dict.fromkeys(("bias_dropout_fusion", "bias_activation_fusion"), False),
    **dict.fromkeys(("apply_rope_fusion", "persist_layer_norm", "bf16", "fp16"), False),
    "params_dtype": torch.float32,
    "seq_length": 4096,
}


class Absent(types.ModuleType):
    """Stands for a part of TransformerEngine, which Bridge imports even where there is none."""

    __path__, __version__ = (), "0.0"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        found = vars(self)[name] = type(name, (torch.nn.Module,), {})
        return found


def bridge_of():
    """The real AutoBridge."""
    if not hasattr(typing, "override"):  # Python 3.11
        typing.override = lambda function: function
    shim.apply()
    import megatron.core.models.hybrid.hybrid_layer_specs
    import megatron.core.models.hybrid.hybrid_model
    import megatron.core.optimizer  # noqa: F401

    parts = [f"transformer_engine{end}" for end in ("", ".pytorch", ".pytorch.ops")]
    for name in parts:
        sys.modules[name] = found = Absent(name)
        found.__spec__ = importlib.machinery.ModuleSpec(name, None)
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, found)
    from megatron.bridge import AutoBridge
    from megatron.bridge.peft import utils

    utils.HAVE_TE = False  # what stood for it has no layers
    for name in parts:
        del sys.modules[name]
    return AutoBridge


def local_layers(config):
    """Bridge's local layers; with norms that know sequence parallelism, where it is on."""
    from megatron.bridge.models.gpt_provider import local_layer_spec
    from megatron.core.transformer import transformer_block

    spec = local_layer_spec(config)
    if config.sequence_parallel:
        parts = spec.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = SequenceParallelNorm
        transformer_block.LayerNormImpl = SequenceParallelNorm  # the last one
    return spec


def exported(folder):
    """(log-probabilities of the session, those of transformers, exports equal after release)."""
    warnings.simplefilter("ignore")
    auto_bridge = bridge_of()
    from megatron.core.distributed import DistributedDataParallelConfig

    bridge = auto_bridge.from_hf_pretrained(folder)
    provider = bridge.to_megatron_provider(load_weights=True)
    for name, value in {**ON_CPU, "transformer_layer_spec": local_layers}.items():
        setattr(provider, name, value)
    provider.finalize()
    provider.initialize_model_parallel(seed=1)
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=False)
    model = provider.provide_distributed_model(ddp_config=ddp, use_cpu_initialization=True)
    session = HdpSession.of_model(model, vocab_size=128, seq_length=4096, hdp_tokens_per_rank=256)
    tokens = [np.random.default_rng(7).integers(0, 128, n) for n in (300, 40, 70)]
    session.step(tokens)
    with torch.no_grad():
        for parameter in model[0].parameters():
            parameter -= 0.1 * parameter.main_grad
    found = [one[1:].sum().item() for one in session.log_probs(tokens)]

    def weights():
        export = bridge.export_hf_weights(model, cpu=True, show_progress=False)
        return {name: tensor.clone() for name, tensor in export}

    held = weights()
    session.release()
    again = weights()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs.load_state_dict(held)
    expected = []
    with torch.no_grad():
        for ids in map(torch.tensor, tokens):
            logits = theirs(ids[None]).logits[0, :-1].double().log_softmax(-1)
            expected.append(logits.gather(1, ids[1:, None]).sum().item())
    return found, expected, all(torch.equal(held[name], again[name]) for name in held)


@pytest.mark.slow
def test_weights_go_back_to_transformers(run_ranks, tmp_path):
    if importlib.util.find_spec("megatron.bridge") is None:
        pytest.skip(HOW)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128}
    config = transformers.LlamaConfig(**sizes, **heads, tie_word_embeddings=False)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    for found, expected, same in run_ranks(2, exported, str(tmp_path)):
        assert found == pytest.approx(expected, abs=1e-3) and same
