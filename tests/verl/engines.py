"""verl's engines over models that Megatron-Bridge builds, on CPUs."""

import importlib.util
import os
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.bridge.loop import Absent
from tests.session.test_bridge import bridge_of, local_layers

HOW = (
    "verl or Megatron-Bridge is not installed: do as tests/verl/requirements.txt and "
    "tests/bridge/requirements.txt say"
)
OVERRIDES = dict.fromkeys(
    (
        *("gradient_accumulation_fusion", "masked_softmax_fusion", "bias_dropout_fusion"),
        *("bias_activation_fusion", "apply_rope_fusion", "persist_layer_norm"),
        *("moe_grouped_gemm", "moe_permute_fusion"),
    ),
    False,
) | {"use_cpu_initialization": True, "attention_backend": "local"}


def is_there():
    """Whether verl and Megatron-Bridge are installed."""
    return None not in map(importlib.util.find_spec, ("verl", "megatron.bridge"))


def save_llama(
    folder: str | Path, hidden: int = 64, layers: int = 2, vocabulary: int = 128
) -> None:
    """A LLaMA with random weights, as transformers saves it."""
    config = transformers.LlamaConfig(**_sizes(hidden, layers, vocabulary))
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def save_experts(folder: str | Path, vocabulary: int = 128) -> None:
    """A Qwen3 of four experts, two of them for each token."""
    config = transformers.Qwen3MoeConfig(
        **_sizes(64, 2, vocabulary), num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64
    )
    config.norm_topk_prob, config.head_dim = True, 16
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(folder)


def _sizes(hidden: int, layers: int, vocabulary: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": vocabulary,
        "tie_word_embeddings": False,
    }


def know_local_layers() -> None:
    """Bridge knows Qwen3's experts by TransformerEngine's names alone; tells it one more."""
    from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
    from megatron.bridge.models.conversion.param_mapping import AutoMapping
    from megatron.bridge.models.qwen.qwen3_moe_bridge import Qwen3MoEBridge

    stock, norm = Qwen3MoEBridge.mapping_registry, "layers.*.input_layernorm.weight"
    Qwen3MoEBridge.mapping_registry = lambda self: MegatronMappingRegistry(
        *stock(self).mappings, AutoMapping(f"decoder.{norm}", f"model.{norm}")
    )


def engine_of(
    folder: str,
    lr: float = 0.0,
    tokens: int = 512,
    tensor: int = 1,
    pipeline: int = 1,
    virtual: int | None = None,
    experts: int = 1,
    sequence: bool = False,
    lora: dict[str, Any] | None = None,
    kind: str = "language_model",
    **overrides: Any,
) -> Any:
    """The engine that verl's registry gives, over a model that Bridge builds.

    Args:
        folder: of the model, as transformers saved it.
        lr: of the optimizer; with 0 weights stay.
        tokens: capacity of a rank.
        tensor: ranks of each tensor-parallel group.
        pipeline: stages.
        virtual: model chunks of a stage.
        experts: ranks over which experts lie.
        sequence: whether tensor-parallel ranks share tokens.
        lora: of the model's configuration.
        kind: ``language_model`` or ``value_model``.
        overrides: further keys of ``override_transformer_config``; but ``offload`` is verl's two
            options of this name.
    """
    warnings.simplefilter("ignore")
    os.environ["VERL_USE_EXTERNAL_MODULES"] = "megatron_hdp.verl"  # as the entry point does
    bridge_of()
    if importlib.util.find_spec("megatron.energon") is None:  # which is imported, and not used
        sys.meta_path.insert(0, Absent())
    know_local_layers()
    on_cpu()
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import HFModelConfig, McoreEngineConfig, McoreOptimizerConfig
    from verl.workers.engine import EngineRegistry

    model = HFModelConfig(path=folder, load_tokenizer=False, lora=lora or {})
    object.__setattr__(model, "model_type", kind)
    tokenizer = types.SimpleNamespace(pad_token_id=0, save_pretrained=lambda folder: None)
    object.__setattr__(model, "tokenizer", tokenizer)
    offload = overrides.pop("offload", False)
    engine = McoreEngineConfig(
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        virtual_pipeline_model_parallel_size=virtual,
        expert_model_parallel_size=experts,
        context_parallel_size=1,
        sequence_parallel=sequence,
        param_offload=offload,
        optimizer_offload=offload,
        max_token_len_per_gpu=tokens,
        override_transformer_config=OVERRIDES
        | {"transformer_layer_spec": local_layers}
        | overrides,
    )
    object.__setattr__(engine, "dtype", "float32")
    optimizer = McoreOptimizerConfig(lr=lr, total_training_steps=100, lr_decay_steps=100)
    made = EngineRegistry.new(
        kind,
        "megatron",
        model_config=model,
        engine_config=engine,
        optimizer_config=optimizer,
        checkpoint_config=CheckpointConfig(),
    )
    made.initialize()
    return made


def on_cpu():
    """What verl asks of a GPU, on a machine without one."""
    zero = lambda *given: 0  # noqa: E731
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "set_device"):
        setattr(torch.cuda, name, zero)
    for name in ("max_memory_reserved", "empty_cache", "synchronize", "reset_peak_memory_stats"):
        setattr(torch.cuda, name, zero)
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.mem_get_info = lambda *given: (1, 2)
    torch.cuda.manual_seed = torch.manual_seed
    torch.cuda.device_count = lambda: 1
