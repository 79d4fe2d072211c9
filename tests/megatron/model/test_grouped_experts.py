"""Megatron's grouped experts under HDP: the gradients of experts that run one by one.

The module is Megatron's `TEGroupedMLP`. TransformerEngine's layer of several weights, which needs a
GPU, is stood in for by plain products of the same interface.
"""

import re
from contextlib import ExitStack
from functools import partial
from unittest import mock

import pytest
import torch
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe import experts
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_hdp.megatron.model import building, initialisation
from megatron_hdp.megatron.model.moe import HdpMoeTransformerLayer
from megatron_hdp.megatron.releases import submodules_of
from tests.megatron.model.test_moe import LENGTHS, ROOM, TOLERANCE, planned
from tests.support import gradients
from tests.support.gradients import errors_of, moe_arguments, write_corpus

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


class ForgetfulLinear(GroupedLinear):
    """The planted fault: the last expert's weight gets no gradient."""

    def weights(self):
        *weights, last = self.parameters()
        return [*weights, last.detach() + 0 * last]


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


BALANCE, PARAMETERS = building.balance_by_sequence, initialisation.global_parameters


def grouped_errors_of(cases, linear):
    """Body of a rank: `errors_of` with grouped experts under HDP; the reference has Megatron's."""
    with ExitStack() as stack:
        for module in (initialisation, gradients):
            stack.enter_context(mock.patch.object(module, "global_parameters", named_alike))
        balance = partial(grouped, linear=linear)
        stack.enter_context(mock.patch.object(building, "balance_by_sequence", balance))
        return errors_of(cases)


def largest_error(run_ranks, ranks, cases, linear=GroupedLinear):
    return max(run_ranks(ranks, grouped_errors_of, cases, linear)[0])


@pytest.mark.parametrize(
    "ranks, expert_ranks",
    [pytest.param(3, 1, marks=pytest.mark.slow), (4, 2)],
    ids=["together", "two-domains"],
)
def test_gradients(run_ranks, tmp_path, ranks, expert_ranks):
    prefix = write_corpus(tmp_path, LENGTHS)
    arguments = moe_arguments(prefix, expert_model_parallel_size=expert_ranks, **ROOM)
    assert largest_error(run_ranks, ranks, [planned(arguments, ranks)]) <= TOLERANCE


def test_experts_without_a_token(run_ranks, tmp_path):
    arguments = moe_arguments(
        write_corpus(tmp_path, [5, 3]),
        expert_model_parallel_size=2,
        hdp_strategy="naive",
        overlap_grad_reduce=True,
        ddp_bucket_size=1,
    )
    assert largest_error(run_ranks, 4, [(arguments, None)]) <= TOLERANCE


def test_a_planted_fault_fails_the_check(run_ranks, tmp_path):
    arguments = moe_arguments(write_corpus(tmp_path, [5, 30]))
    assert largest_error(run_ranks, 1, [(arguments, None)], ForgetfulLinear) > 1e-6


class GroupedMLP(torch.nn.Module):
    """Megatron 0.16's experts by another package's kernel have this name."""


@pytest.mark.parametrize("kind", [SequentialMLP, TEGroupedMLP, GroupedMLP])
def test_other_kinds_of_experts_are_refused(kind):
    layer = TransformerLayer.__new__(TransformerLayer)
    torch.nn.Module.__init__(layer)
    layer.layer_number, layer.mlp = 3, torch.nn.Module()
    layer.mlp.router, layer.mlp.experts = TopKRouter.__new__(TopKRouter), kind.__new__(kind)
    with mock.patch("megatron_hdp.megatron.model.router.HdpRouter.adopt") as adopt:
        if kind is not GroupedMLP:
            HdpMoeTransformerLayer.adopt(layer)
            assert adopt.called and type(layer) is HdpMoeTransformerLayer
            return
        expected = "knows SequentialMLP or TEGroupedMLP in .*, layer 3 has GroupedMLP in Transf"
        with pytest.raises(ValueError, match=expected):
            HdpMoeTransformerLayer.adopt(layer)
    assert type(layer) is TransformerLayer
