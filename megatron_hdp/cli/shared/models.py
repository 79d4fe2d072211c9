"""``--model``: a model's name, or a YAML file of Megatron's flags that gives its shape."""

from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_hdp.options import (
    OptionError,
    OptionParser,
    add_options,
    check_values,
    from_namespace,
    option,
    yaml_to_argv,
)
from megatron_hdp.planner.models import (
    MODELS,
    Model,
    active_parameters,
    expert_parameters,
    model_of,
)

_YAML_SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True, kw_only=True)
class ShapeOptions:
    """Shape of a model."""

    num_layers: int = option(None, minimum=1, required=True, help="Transformer layers.")
    hidden_size: int = option(None, minimum=1, required=True, help="Hidden size.")
    num_attention_heads: int = option(None, minimum=1, required=True, help="Attention heads.")
    group_query_attention: bool = option(False, help="Share keys and values between heads.")
    num_query_groups: int | None = option(None, minimum=1, help="Key and value heads.")
    kv_channels: int | None = option(None, minimum=1, help="Size of a head.")
    ffn_hidden_size: int | None = option(None, minimum=1, help="MLP size.")
    swiglu: bool = option(False, help="Gated linear units with SiLU instead of GELU.")
    num_experts: int | None = option(None, minimum=1, help="Experts of a layer.")
    moe_router_topk: int = option(2, minimum=1, help="Experts that a token visits.")
    moe_ffn_hidden_size: int | None = option(None, minimum=1, help="MLP size of an expert.")
    vocab_size: int = option(0, minimum=0, help="Entries of the vocabulary.")


def find_model(name: str) -> Model:
    """Return the model that ``--model`` names.

    Keys of a YAML file that say nothing about the shape are left out.

    Raises:
        ValueError: neither a known name nor a usable file.
    """
    if not name.endswith(_YAML_SUFFIXES):
        try:
            return model_of(name)
        except ValueError as error:
            raise ValueError(f"--model: {error}, or the path of a .yaml file") from None
    return _model_of_shape(_read_shape(Path(name)), name)


def describe(name: str, model: Model) -> str:
    """Return what the model costs, in a few words."""
    experts = f", {_short(model.expert_parameters)} in experts" if model.expert_parameters else ""
    return (
        f"{name}  ({_short(model.active_parameters)} parameters a token{experts}, "
        f"{model.kv_bytes_per_token:,} B of K and V a token)"
    )


def _short(number: float) -> str:
    for unit, scale in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= scale:
            return f"{number / scale:.3g}{unit}"
    return f"{number:.0f}"


def _read_shape(path: Path) -> ShapeOptions:
    if not path.is_file():
        raise ValueError(
            f"--model {path}: no such file; expected one of {', '.join(MODELS)} or a .yaml file"
        )
    parser = OptionParser(add_help=False)
    add_options(parser, ShapeOptions)
    namespace: Namespace = parser.parse_args(yaml_to_argv(path, parser, skip_others=True))
    shape = from_namespace(ShapeOptions, namespace)
    try:
        check_values(shape)
    except OptionError as error:
        raise OptionError(f"{path}: {error}") from None
    return shape


def _model_of_shape(shape: ShapeOptions, path: str) -> Model:
    """Fill in what Megatron derives, in Megatron's way."""
    heads, hidden = shape.num_attention_heads, shape.hidden_size
    if shape.kv_channels is None and hidden % heads:
        raise ValueError(
            f"{path}: hidden-size {hidden} is not a multiple of num-attention-heads {heads}: "
            "change one of them or give kv-channels"
        )
    grouped = shape.group_query_attention or shape.num_query_groups is not None
    groups = (shape.num_query_groups or 1) if grouped else heads
    if heads % groups:
        raise ValueError(
            f"{path}: num-attention-heads {heads} is not a multiple of num-query-groups {groups}: "
            "change one of them"
        )
    sizes: dict[str, Any] = {
        "num_layers": shape.num_layers,
        "num_attention_heads": heads,
        "num_query_groups": groups,
        "kv_channels": shape.kv_channels or hidden // heads,
    }
    ffn_hidden_size = shape.ffn_hidden_size or _default_ffn_size(hidden, shape.swiglu)
    mlp: dict[str, Any] = {
        "hidden_size": hidden,
        "ffn_hidden_size": (shape.num_experts and shape.moe_ffn_hidden_size) or ffn_hidden_size,
        "gated": shape.swiglu,
        "experts_per_token": min(shape.moe_router_topk, shape.num_experts or 1),
    }
    parameters = active_parameters(
        **sizes, **mlp, num_experts=shape.num_experts or 0, vocab_size=shape.vocab_size
    )
    experts = sent = 0
    if shape.num_experts:
        experts = expert_parameters(num_layers=shape.num_layers, **mlp)
        sent = shape.num_layers * hidden * mlp["experts_per_token"]
    return Model(
        **sizes,
        active_parameters=parameters,
        expert_parameters=experts,
        expert_values_per_token=sent,
    )


def _default_ffn_size(hidden_size: int, gated: bool) -> int:
    return max(hidden_size * 8 // 3 // 64 * 64, 64) if gated else 4 * hidden_size
