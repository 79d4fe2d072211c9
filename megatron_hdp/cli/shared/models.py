"""What ranks cost: a model's name or YAML file (``--model``), or measured coefficients."""

import argparse
import dataclasses
from pathlib import Path

from megatron_hdp.cli.shared.numbers import read_speeds
from megatron_hdp.megatron.options import shape_in
from megatron_hdp.options import HdpOptions
from megatron_hdp.planner import CostModel
from megatron_hdp.planner.experts import exchanged_bytes_per_token
from megatron_hdp.planner.network import Nccl, following
from megatron_hdp.planner.shape import BYTES_PER_VALUE, MODELS, Model, model_of
from megatron_hdp.simulator.units import short

_YAML_SUFFIXES = (".yaml", ".yml")


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
    path = Path(name)
    if not path.is_file():
        raise ValueError(
            f"--model {path}: no such file; expected one of {', '.join(MODELS)} or a .yaml file"
        )
    return Model.of_shape(shape_in(path))


def describe(name: str, model: Model) -> str:
    """Return what the model costs, in a few words."""
    in_experts = model.shape.expert_parameters
    experts = f", {short(in_experts)} in experts" if in_experts else ""
    return (
        f"{name}  ({short(model.active_parameters)} parameters a token{experts}, "
        f"{model.kv_bytes_per_token:,} B of K and V a token)"
    )


def with_expert_share(cost_model: CostModel, share: float) -> CostModel:
    """Return the cost model with this share of its linear time in experts.

    Raises:
        ValueError: the share is not within 0 and 1.
    """
    if not 0 <= share <= 1:
        raise ValueError(f"--expert-share is {share:g}; expected 0 to 1")
    linear = cost_model.linear_s_per_token
    return dataclasses.replace(cost_model, b=(1 - share) * linear, b_experts=share * linear)


def exchanged_bytes(arguments: argparse.Namespace, num_tokens: int) -> float:
    """Return what ranks send each other for experts in a step; 0 where no model says it."""
    if not arguments.model:
        return 0.0
    return num_tokens * exchanged_bytes_per_token(
        values_per_token=find_model(arguments.model).shape.sent_to_experts,
        value_bytes=BYTES_PER_VALUE,
        expert_ranks=arguments.expert_parallel_size,
    )


def cost_model_of(arguments: argparse.Namespace) -> tuple[CostModel, str]:
    """Return the cost model with the ranks' speeds and nodes, and what it stands for, in words.

    Raises:
        ValueError: flags that do not go together, or a file that cannot be used.
    """
    if arguments.cost_model and arguments.model:
        raise ValueError(
            f"found --cost-model {arguments.cost_model} and --model {arguments.model}; expected "
            "one of them: drop --model to plan with the measured coefficients"
        )
    changes: dict[str, object] = {}
    if arguments.cost_model:
        cost_model, costs_of = CostModel.from_json(arguments.cost_model), arguments.cost_model
    else:
        name = arguments.model or "llama-7b"
        model = find_model(name)
        cost_model, costs_of = model.cost_model(), describe(name, model)
        changes["num_layers"] = max(1, model.shape.num_layers // arguments.pipeline_stages)
    if arguments.ranks_per_node is not None:
        changes["ranks_per_node"] = arguments.ranks_per_node
    if arguments.double_rings != "auto":
        changes["double_rings"] = arguments.double_rings == "on"
    elif arguments.pipeline_stages > 1 and arguments.sequence_parts != 1:
        changes["double_rings"] = True
    if arguments.rank_speeds is not None:
        changes["rank_speeds"] = read_speeds(arguments.rank_speeds, arguments.ranks)
    cost_model = dataclasses.replace(cost_model, **changes)  # type: ignore[arg-type]
    if cost_model.channels or not arguments.cost_model:  # else, nobody knows of how many GPUs
        nccl = Nccl.installed(HdpOptions.hdp_ring_max_ctas)
        cost_model = following(cost_model, nccl, arguments.ranks)
    return cost_model, costs_of
