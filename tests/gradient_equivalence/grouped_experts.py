"""Megatron's grouped experts under HDP, over stand-ins for TransformerEngine's layers.

The module is Megatron's `TEGroupedMLP`. TransformerEngine's layer of several weights, which needs a
GPU, is stood in for by plain products of the same interface.
"""

import re
from contextlib import ExitStack, contextmanager
from functools import partial
from unittest import mock

import torch
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe import experts
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.spec_utils import ModuleSpec

from megatron_hdp.megatron.model import building, initialisation
from megatron_hdp.megatron.releases import submodules_of
from tests.gradient_equivalence.case import emptied_outputs
from tests.support import gradients

_WEIGHT = re.compile(r"\.experts\.(linear_fc[12])\.weight(\d+)$")


class GroupedLinear(torch.nn.Module):
    """A weight for each expert; takes the experts' tokens one after another."""

    def __init__(self, num_gemms, input_size, output_size, *, config, is_expert, **_):
        super().__init__()
        spread = is_expert and config.expert_model_parallel_size > 1
        for number in range(num_gemms):
            empty = torch.empty(output_size, input_size, dtype=config.params_dtype)
            weight = torch.nn.Parameter(empty)
            weight.allreduce = not spread  # Megatron's mark for gradients of experts
            self.register_parameter(f"weight{number}", weight)

    def weights(self):
        return [*self.parameters()]

    def forward(self, tokens, counts):
        parts = zip(tokens.split(counts), self.weights(), strict=True)
        return torch.cat([part @ weight.t() for part, weight in parts]), None


def grouped(specification, linear):
    """Makes a layer's experts grouped ones, after HDP has changed the rest."""
    BALANCE(specification)
    layer = submodules_of(specification.submodules.mlp)
    if hasattr(experts, "GroupedMLPSubmodules"):  # from megatron-core 0.17
        submodules = experts.GroupedMLPSubmodules(linear_fc1=linear, linear_fc2=linear)
        layer.experts = partial(TEGroupedMLP, submodules=submodules)
    else:
        submodules = MLPSubmodules(linear_fc1=linear, linear_fc2=linear)
        layer.experts = ModuleSpec(TEGroupedMLP, submodules=submodules)


def named_alike(model):
    """Each parameter by the name that it has in a model whose experts run one by one."""
    first = initialisation._first_expert(model)
    for name, parameter in PARAMETERS(model):
        yield (
            _WEIGHT.sub(
                lambda m: f".experts.local_experts.{first + int(m[2])}.{m[1]}.weight", name
            ),
            parameter,
        )


def grouped_settings(arguments):
    """Says so in the configuration, which Megatron checks."""
    return MOE_SETTINGS(arguments) | {"moe_grouped_gemm": arguments.hybrid_data_parallel}


BALANCE, PARAMETERS = building.balance_by_sequence, initialisation.global_parameters
MOE_SETTINGS = building.moe_settings


def grouped_experts(linear):
    """What makes experts grouped ones under HDP; the reference has Megatron's."""

    @contextmanager
    def around():
        with ExitStack() as stack:
            for module in (initialisation, gradients):
                stack.enter_context(mock.patch.object(module, "global_parameters", named_alike))
            balance = partial(grouped, linear=linear)
            stack.enter_context(mock.patch.object(building, "balance_by_sequence", balance))
            stack.enter_context(mock.patch.object(building, "moe_settings", grouped_settings))
            stack.enter_context(emptied_outputs())
            yield

    return around
