"""What a config.json must hold before a table computes with it: numbers where numbers belong."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from megatron_hdp.megatron.options import TrainingArguments
from megatron_hdp.options import OptionError, check_value, declared

_SIZES = {
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings"),
    *("moe_intermediate_size", "n_routed_experts", "num_experts", "num_local_experts"),
    *("num_experts_per_tok", "n_group", "topk_group", "sliding_window", "q_lora_rank"),
    *("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"),
    "original_max_position_embeddings",
}
_COUNTS = {"first_k_dense_replace", "num_nextn_predict_layers", "n_shared_experts"}
_NUMBERS = {
    *("rms_norm_eps", "initializer_range", "router_aux_loss_coef", "routed_scaling_factor"),
    *("swiglu_limit", "partial_rotary_factor", "rope_theta", "factor", "beta_fast", "beta_slow"),
    *("mscale", "mscale_all_dim", "low_freq_factor", "high_freq_factor"),
}
_SWITCHES = {
    *("tie_word_embeddings", "attention_bias", "mlp_bias", "use_qk_norm", "norm_topk_prob"),
    *("use_sliding_window", "truncate"),
}
_OF_POSITIONS = ("rope_parameters", "rope_scaling")
_OPTIONS = {item.name: (item, kind) for item, kind in declared(TrainingArguments)}


def check_config(config: Mapping[str, Any]) -> None:
    """Refuses a value of another type than tables take; null and what they do not know may be.

    Raises:
        ValueError: names the key.
    """
    for key, value in config.items():
        if value is None:
            continue
        if key in _SIZES or key in _COUNTS:
            least = int(key in _SIZES)
            _require(type(value) is int and value >= least, key, value, f"a number from {least} on")
        elif key in _NUMBERS:
            is_number = type(value) in (int, float) and math.isfinite(value)
            _require(is_number, key, value, "a finite number")
        elif key in _SWITCHES:
            _require(type(value) is bool, key, value, "true or false")
        elif key in _OF_POSITIONS:
            _require(isinstance(value, dict), key, value, "an object or null")
            check_config(value)


def check_flags(flags: Mapping[str, Any]) -> None:
    """Refuses flags that training would refuse.

    Raises:
        ValueError: names flag, value and range, or flags that training does not know.
    """
    if unknown := sorted(flags.keys() - _OPTIONS):
        names = ", ".join("--" + name.replace("_", "-") for name in unknown)
        raise ValueError(
            f"found a model that needs {names}, expected one that training knows: it would be "
            "another model without"
        )
    for name, value in flags.items():
        try:
            check_value(*_OPTIONS[name], value)
        except OptionError as error:
            raise ValueError(f"found a model that no training takes: {error}") from None


def _require(condition: bool, key: str, value: Any, expected: str) -> None:
    if not condition:
        raise ValueError(f"found {key} {value!r:.60}, expected {expected}: fetch it again")
