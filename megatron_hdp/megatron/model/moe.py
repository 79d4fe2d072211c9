"""Mixture of experts under HDP: Megatron's layer with a router that knows whose the tokens are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_hdp.megatron.model.attention import HdpPackedSeqParams
from megatron_hdp.megatron.model.router import HdpRouter
from megatron_hdp.megatron.model.taking import take_over_class
from megatron_hdp.megatron.options import TrainingArguments, layer_frequency
from megatron_hdp.megatron.releases import submodules_of

_OF_CONFIG = (
    *("moe_ffn_hidden_size", "moe_shared_expert_intermediate_size", "moe_shared_expert_gate"),
    "moe_shared_expert_overlap",
    *("moe_router_topk", "moe_router_score_function", "moe_router_num_groups"),
    *("moe_router_group_topk", "moe_router_topk_scaling_factor", "moe_router_pre_softmax"),
    *("moe_router_enable_expert_bias", "moe_router_bias_update_rate", "moe_z_loss_coeff"),
    *("moe_router_load_balancing_type", "moe_aux_loss_coeff", "moe_token_dispatcher_type"),
    *("expert_model_parallel_size", "expert_tensor_parallel_size"),
)


def moe_settings(arguments: TrainingArguments) -> dict[str, Any]:
    """What ``TransformerConfig`` needs to know of the experts; nothing for a plain model."""
    if arguments.num_experts is None:
        return {}
    return {name: getattr(arguments, name) for name in _OF_CONFIG} | {
        "num_moe_experts": arguments.num_experts,
        "moe_layer_freq": layer_frequency(arguments.moe_layer_freq),
        "moe_router_dtype": "fp64" if arguments.fp64 else arguments.moe_router_dtype,
    }


def activation_settings(arguments: TrainingArguments) -> dict[str, Any]:
    """What it needs to know of gated units, in experts or plain MLPs."""
    if not (arguments.swiglu or arguments.quick_geglu):
        return {}
    return {
        "activation_func": torch.nn.functional.silu if arguments.swiglu else quick_gelu,
        "gated_linear_unit": True,
        "activation_func_clamp_value": arguments.activation_func_clamp_value,
        "glu_linear_offset": arguments.glu_linear_offset,
    }


def balance_by_sequence(spec: ModuleSpec) -> None:
    """Makes a layer specification with Megatron's MoE one that is right under HDP."""
    spec.module = HdpMoeTransformerLayer
    submodules_of(spec.submodules.mlp).router = HdpRouter


@contextmanager
def without_shared_experts(mixture: MoELayer) -> Iterator[None]:
    """Within the block a mixture of experts gives what its routed experts give."""
    dispatcher = mixture.token_dispatcher  # runs them itself where they overlap its exchange
    found = mixture.use_shared_expert, dispatcher.shared_experts
    mixture.use_shared_expert, dispatcher.shared_experts = False, None
    try:
        yield
    finally:
        mixture.use_shared_expert, dispatcher.shared_experts = found


class ExpertLinear(RowParallelLinear):
    """The second matrix of an expert with a bias.

    Megatron's MLP adds the bias to its output in place. Where one rank has a whole expert, that
    output is a view, which autograd lets nobody change.
    """

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See ``RowParallelLinear.forward``; the output is its own memory."""
        output, bias = super().forward(input_)
        return output.clone(), bias


def let_biases_be_added(layer: TransformerLayer) -> None:
    """Makes experts with biases, of a layer that Megatron has built, ones that can run.

    Megatron also marks such a bias as one that all tensor-parallel ranks hold: it would add up the
    gradients of different experts, and count those of one rank in the norm.
    """
    experts: Any = getattr(layer.mlp, "experts", None)
    if type(experts) is not SequentialMLP or not layer.config.add_bias_linear:
        return
    for expert in experts.local_experts:
        if type(expert.linear_fc2) is RowParallelLinear:
            expert.linear_fc2.__class__ = ExpertLinear
            bias = expert.linear_fc2.bias
            bias.sequence_parallel = False
            bias.tensor_model_parallel, bias.partition_dim, bias.partition_stride = True, 0, 1


# TransformerEngine's is known by its name: Megatron may not have it
_EXPERTS = ("SequentialMLP", "TEGroupedMLP")


class HdpMoeTransformerLayer(TransformerLayer):
    """Megatron's layer, which hands the micro-batch on to its router as well."""

    @classmethod
    def adopt(cls, stock: TransformerLayer) -> None:
        """Makes a layer with experts that Megatron has built one of this class.

        Raises:
            ValueError: it is not the layer, the router or the kind of experts that HDP knows.
        """
        experts = type(stock.mlp.experts).__name__
        if experts not in _EXPERTS:
            raise ValueError(
                f"layer {stock.layer_number}: found experts of {experts}, expected "
                f"{' or '.join(_EXPERTS)}: use Megatron's own layer specification"
            )
        take_over_class(stock, TransformerLayer, cls, ("forward",))
        HdpRouter.adopt(stock.mlp.router)

    def forward(self, *args: Any, packed_seq_params: HdpPackedSeqParams, **kwargs: Any) -> Any:
        """See ``TransformerLayer.forward``."""
        with self.mlp.router.routes(packed_seq_params):
            return super().forward(*args, packed_seq_params=packed_seq_params, **kwargs)
