"""The ranks that a command plans for, and what they cost: flags, and the cost model they give."""

import argparse
import dataclasses
from typing import TYPE_CHECKING

from megatron_hdp.cli.shared.numbers import whole

if TYPE_CHECKING:
    from megatron_hdp.planner import CostModel

_MODELS = "llama-7b, -13b, -30b, -70b, mistral-8x7b, -8x22b"


def add_ranks(group: "argparse._ArgumentGroup") -> None:
    """Declare the ranks and their costs."""
    add = group.add_argument
    add("--ranks", type=whole(1, 2**20), required=True, metavar="N", help="HDP ranks")
    add(
        "--tokens-per-rank",
        type=whole(1, 2**40),
        required=True,
        metavar="C",
        help="capacity: the most tokens that one rank holds in a micro-batch",
    )
    add(
        "--pipeline-stages",
        type=whole(1, 1024),
        default=1,
        metavar="P",
        help="pipeline stages of a rank (default: 1)",
    )
    add(
        "--virtual-stages",
        type=whole(1, 1024),
        default=1,
        metavar="V",
        help="model chunks on each stage; above 1 the schedule is interleaved (default: 1)",
    )
    add(
        "--stage-weights",
        type=_weights,
        default=None,
        metavar="W,W,...",
        help="relative time of each of the P x V virtual stages in the model's order (default: all "
        "equal)",
    )
    add(
        "--model",
        metavar="NAME|FILE.yaml",
        help=f"{_MODELS}, or a YAML file of training's flags with the model's shape (default: "
        "llama-7b)",
    )
    add(
        "--cost-model",
        metavar="FILE",
        help="JSON file with measured coefficients, instead of --model",
    )
    add(
        "--ranks-per-node",
        type=whole(1, 2**20),
        metavar="K",
        help="HDP ranks of a node (default: the cost model's, or 8)",
    )
    add(
        "--rank-speeds",
        metavar="FILE",
        help="text file with the speed of one rank per line; 1 is full speed",
    )


def _weights(text: str) -> tuple[float, ...]:
    """Numbers with commas between them."""
    try:
        return tuple(float(one) for one in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"found {text!r}; expected numbers with commas between them, as 1,1,1,0.8"
        ) from None


def with_expert_share(cost_model: "CostModel", share: float) -> "CostModel":
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
    from megatron_hdp.cli.shared.models import find_model
    from megatron_hdp.planner.experts import exchanged_bytes_per_token
    from megatron_hdp.planner.shape import BYTES_PER_VALUE

    if not arguments.model:
        return 0.0
    return num_tokens * exchanged_bytes_per_token(
        values_per_token=find_model(arguments.model).shape.sent_to_experts,
        value_bytes=BYTES_PER_VALUE,
        expert_ranks=arguments.expert_parallel_size,
    )


def cost_model_of(arguments: argparse.Namespace) -> "tuple[CostModel, str]":
    """Return the cost model with the ranks' speeds and nodes, and what it stands for, in words.

    Raises:
        ValueError: flags that do not go together, or a file that cannot be used.
    """
    from megatron_hdp.cli.shared.models import describe, find_model
    from megatron_hdp.cli.shared.numbers import read_speeds
    from megatron_hdp.planner import CostModel

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
    if arguments.rank_speeds is not None:
        changes["rank_speeds"] = read_speeds(arguments.rank_speeds, arguments.ranks)
    return dataclasses.replace(cost_model, **changes), costs_of  # type: ignore[arg-type]
