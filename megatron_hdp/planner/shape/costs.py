"""What a micro-batch costs an HDP rank, counted from the model's shape."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megatron_hdp.planner import CostModel
from megatron_hdp.planner.shape.latent_rings import RingWays
from megatron_hdp.planner.shape.model import ModelShape

_AGAIN = 1 / 3  # a forward's share of forward and backward, of what is trained


def cost_model_of_shape(
    shape: ModelShape,
    *,
    value_bytes: int,
    tensor_ranks: int = 1,
    active_parameters: float | None = None,
    recomputed_attention: float = 0.0,
    recomputed_layers: float = 0.0,
    recomputed_modules: Sequence[str] = (),
    **others: Any,
) -> CostModel:
    """The cost model of an HDP rank that reaches 400 TFLOP/s on each of its GPUs.

    Training, ``check``, ``simulate`` and ``plan --model`` all plan with it. The embedding is looked
    up and costs nothing; the output layer multiplies every token. Attention costs what keys and
    values that travel cost; `ring_ways` knows the other way.

    Args:
        shape: of the model; its vocabulary is padded.
        value_bytes: bytes of a value that travels.
        tensor_ranks: GPUs that share each layer.
        active_parameters: parameters that multiply a token, where they are not the shape's and all
            of them are trained.
        recomputed_attention: share of the layers whose attention runs once more in backward.
        recomputed_layers: share of the layers whose other products do.
        recomputed_modules: what does in every layer, by Megatron's names; attention is not looked
            for.
        others: further fields of `CostModel`, those of one GPU.
    """
    parameters = shape.active_parameters if active_parameters is None else active_parameters
    worked = shape.worked_parameters if active_parameters is None else active_parameters
    once = CostModel.of_tensor_ranks(
        tensor_ranks,
        num_layers=shape.num_layers,
        hidden_size=shape.attention_width / shape.num_layers,
        num_parameters=worked,
        expert_parameters=shape.worked_expert_parameters,
        **shape.ring_costs(value_bytes),
        **others,
    )
    inside = parameters - shape.expert_parameters - shape.output_parameters
    mlps = sum(layer.recomputed_matrices(recomputed_modules) for layer in shape.all_layers)
    again = _AGAIN * (recomputed_layers * inside + mlps)
    of_experts = _AGAIN * recomputed_layers * shape.expert_parameters
    return replace(
        once,
        a=once.a * (1 + _AGAIN * recomputed_attention),
        b=once.b * (1 + again / (worked - shape.worked_expert_parameters)),
        b_experts=once.b_experts * (1 + of_experts / (shape.worked_expert_parameters or 1)),
    )


def ring_ways(
    shape: ModelShape,
    cost_model: CostModel,
    *,
    value_bytes: int,
    tensor_ranks: int,
    some_made: bool = True,
) -> RingWays:
    """What rings of a model with multi-latent attention cost if keys and values or latents travel.

    Args:
        shape: a model whose attention has a latent.
        cost_model: of an HDP rank.
        value_bytes: bytes of a value that travels.
        tensor_ranks: of an HDP rank; they share keys and values, and each sends the whole latent.
        some_made: whether keys and values of some heads may travel beside the latent.
    """
    dense = shape.worked_parameters - shape.worked_expert_parameters
    up = "self_attention.linear_kv_up_proj."
    learning = [one.needs_input(up) for one in shape.all_layers if one.attention.kv_rank]
    return RingWays.of(
        cost_model,
        kv_bytes_per_token=shape.travelling_size * value_bytes,
        latent_bytes_per_token=shape.latent_size * value_bytes * tensor_ranks,
        projection_share=shape.latent_matrices / dense,
        trained_share=sum(learning) / len(learning),
        made_bytes_per_token=shape.made_size * value_bytes if some_made else 0.0,
    )
