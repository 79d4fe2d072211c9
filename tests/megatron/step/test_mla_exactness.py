"""The gold test of multi-latent attention: gradients equal those of one rank, whatever the plan."""

from dataclasses import replace
from unittest import mock

import pytest
import torch

from megatron_hdp.megatron import parallel
from megatron_hdp.megatron.model import HdpMlaSelfAttention
from megatron_hdp.planner import RingWays
from megatron_hdp.runtime.ring.latent import _Projection
from tests.megatron.step.test_exactness import LENGTHS, drawn_lengths
from tests.support.gradients import EXPERTS, hdp_step, write_corpus
from tests.support.mla import errors_of_kind, mla_arguments
from tests.support.random_plans import random_plan

TOLERANCE = 1e-10
CAPACITY = {"hdp_tokens_per_rank": 128, "seq_length": 200, "max_position_embeddings": 200}
NO_QUERY_LATENT = {"q_lora_rank": None, "qk_layernorm": False, "rope_type": "rope"}
NO_QUERY_LATENT |= {"rotary_scaling_factor": 1.0, "mscale_all_dim": 0.0}


def cases_of(folder, ranks, num_plans=2, **overrides):
    """One random plan after another, and a strategy's own."""
    prefix = write_corpus(folder, LENGTHS)
    arguments = mla_arguments(prefix, **CAPACITY | overrides)
    lengths = drawn_lengths(arguments, LENGTHS)
    plans = [
        random_plan(lengths, ranks=ranks, tokens_per_rank=128, seed=seed)
        for seed in range(num_plans)
    ]
    return [(arguments, plan) for plan in (None, *plans)]


def check(run_ranks, tmp_path, ranks, replicas, **overrides):
    in_step = overrides.get("expert_model_parallel_size", 1) > 1  # random plans are not
    num_plans = 0 if in_step else 2
    errors = run_ranks(ranks, errors_of_kind, cases_of(tmp_path, replicas, num_plans, **overrides))[
        0
    ]
    assert max(errors) <= TOLERANCE, errors


WAYS = ("kv", "latent")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("overrides", [{}, NO_QUERY_LATENT], ids=["yarn", "no-query-latent"])
def test_gradients_equal_one_rank(run_ranks, tmp_path, overrides, way):
    check(run_ranks, tmp_path, 3, 3, hdp_mla_ring=way, **overrides)


def bytes_of_ways(arguments, plan):
    """Body of a rank: bytes that all ranks send around rings, by what travels."""
    parallel.initialise(arguments)
    return [hdp_step(replace(arguments, hdp_mla_ring=way), plan=plan)[0].ring_bytes for way in WAYS]


def test_what_travels_is_counted(run_ranks, tmp_path):
    _, _, (arguments, plan) = cases_of(tmp_path, 3)
    tokens = 0  # of members, once for each hop
    for i in range(plan.num_micro_batches):
        degree = int(plan.rank_offsets[i + 1] - plan.rank_offsets[i])
        rows = plan.sequences[plan.sequence_offsets[i] : plan.sequence_offsets[i + 1]]
        lengths = plan.lengths[rows].tolist() if degree > 1 else []
        tokens += (degree - 1) * sum(-(-n // (2 * degree)) * 2 * degree for n in lengths)
    assert tokens > 0
    values = {"kv": 4 * (6 + 4 + 5), "latent": 10 + 4}  # of a token in a layer
    expected = [3 * arguments.num_layers * tokens * values[way] * 8 for way in WAYS]
    assert run_ranks(3, bytes_of_ways, arguments, plan)[0] == expected


def errors_of_both_in_a_step(cases):
    """Body of a rank: errors, and how often the cost model let what travel."""
    said = []

    def latent_in_turn(self, lengths, ring):
        said.append(sum(lengths) // 12 % 2 == 0)  # members of a ring agree
        return said[-1]

    with mock.patch.object(RingWays, "latent_is_faster", latent_in_turn):
        errors = errors_of_kind(cases)
    return errors, sum(said), len(said)


def test_rings_of_a_step_may_differ(run_ranks, tmp_path):
    """Under auto the cost model is asked for each ring; gradients of both ways add up."""
    cases = cases_of(tmp_path, 3, hdp_mla_ring="auto")[1:]
    errors, latents, total = run_ranks(3, errors_of_both_in_a_step, cases)[0]
    assert 0 < latents < total
    assert max(errors) <= TOLERANCE, errors


FULL_RECOMPUTE = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
TP2_SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
LAYOUTS = {  # ranks, HDP ranks, overrides
    "tp2-without-norms": (4, 2, {"tensor_model_parallel_size": 2, "qk_layernorm": False}),
    "tp2-sp": (4, 2, TP2_SP),
    "tp2-sp-no-query-latent": (4, 2, TP2_SP | NO_QUERY_LATENT),
    "pp2": (4, 2, {"pipeline_model_parallel_size": 2}),
    "pp2-v2-full-recompute": (
        4,
        2,
        {
            "pipeline_model_parallel_size": 2,
            "num_layers": 4,
            "num_virtual_stages_per_pipeline_rank": 2,
        }
        | FULL_RECOMPUTE,
    ),
    "tp2-sp-full-recompute": (4, 2, TP2_SP | FULL_RECOMPUTE),
    "experts-apart": (
        4,
        4,
        EXPERTS
        | {"expert_model_parallel_size": 2, "moe_layer_freq": "[0,1]"}
        | {"moe_shared_expert_intermediate_size": 8},
    ),
    "selective-recompute": (3, 3, {"recompute_granularity": "selective"}),
    "distributed-optimizer": (
        3,
        3,
        {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "ddp_bucket_size": 1000},
    ),
}


def pairs():
    for layout in LAYOUTS:
        for way in WAYS:
            marks = () if layout == "tp2-sp" else pytest.mark.slow
            yield pytest.param(layout, way, marks=marks)


@pytest.mark.parametrize("layout, way", list(pairs()))
def test_gradients_of_layouts(run_ranks, tmp_path, layout, way):
    ranks, replicas, overrides = LAYOUTS[layout]
    check(run_ranks, tmp_path, ranks, replicas, hdp_mla_ring=way, **overrides)


def of_own_heads(x, group):
    """A rotated part whose gradient is not summed over tensor-parallel ranks' heads."""
    return x


def by_place_in_the_pack(self, params, dtype):
    """The rotation of tokens whose positions count through the pack."""
    counted = replace(params, positions=torch.arange(len(params.positions)))
    return ROTATION(self, counted, dtype)


def to_the_latent_alone(self, dk, dv, latent):
    """Gradients of latents without that of the part of the keys beside them."""
    found, rotated = GRADIENTS(self, dk, dv, latent)
    return found, torch.zeros_like(rotated)


MODEL = "megatron_hdp.megatron.model.mla"
ROTATION, GRADIENTS = HdpMlaSelfAttention._rotation, _Projection.gradients
FAULTS = {  # overrides, what is replaced by what
    "own-heads": (TP2_SP, (f"{MODEL}.copy_to_tensor_model_parallel_region", of_own_heads)),
    "positions": ({}, (f"{MODEL}.HdpMlaSelfAttention._rotation", by_place_in_the_pack)),
    "rotated-part": (
        {"hdp_mla_ring": "latent"},
        ("megatron_hdp.runtime.ring.latent._Projection.gradients", to_the_latent_alone),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_fails_the_check(run_ranks, tmp_path, fault):
    overrides, planted = FAULTS[fault]
    ranks = 2 * overrides.get("tensor_model_parallel_size", 1)
    cases = cases_of(tmp_path, 2, 1, **overrides)[1:]
    errors = run_ranks(ranks, errors_of_kind, cases, planted)[0]
    assert min(errors) > 1e-6, errors
