"""Experts under HDP: gradients equal one rank that saw the whole batch, routers' losses as well."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_hdp.megatron import parallel
from megatron_hdp.megatron.execution.executor import HdpExecutor
from megatron_hdp.megatron.model import building
from megatron_hdp.megatron.model.router import HdpRouter
from megatron_hdp.planner import plan
from tests.support.drawn import first_rows
from tests.support.gradients import VOCABULARY, errors_of, moe_arguments, write_corpus
from tests.support.random_plans import random_plan

TOLERANCE = 1e-10
LENGTHS = [1, 2, 30, 100, 64, 65, 7, 200, 129]
ROOM = {"hdp_tokens_per_rank": 128, "seq_length": 200, "max_position_embeddings": 200}
TENSOR = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
TENSOR |= {"expert_tensor_parallel_size": 1}


def planned(arguments, ranks):
    """A run with a plan that no strategy would make: rings of every size, counts that differ."""
    lengths = np.array(LENGTHS)[first_rows(len(LENGTHS), arguments.seed)]
    capacity = arguments.hdp_tokens_per_rank
    plans = (
        random_plan(lengths, ranks=ranks, tokens_per_rank=capacity, seed=seed) for seed in range(20)
    )
    return arguments, next(plan for plan in plans if len(set(counts_of(plan))) > 1)


def counts_of(plan):
    return np.bincount(plan.ranks, minlength=plan.num_ranks)


def check(run_ranks, ranks, cases):
    errors = run_ranks(ranks, errors_of, cases)[0]
    assert max(errors) <= TOLERANCE, errors


# ranks, of them in the HDP dimension, layout
VIRTUAL = {
    "num_layers": 4,
    "pipeline_model_parallel_size": 2,
    "num_virtual_stages_per_pipeline_rank": 2,
}
LAYOUTS = {
    "every-expert-on-every-rank": (3, 3, {}),
    "across-all-ranks": (2, 2, {"expert_model_parallel_size": 2}),
    "two-domains": (4, 4, {"expert_model_parallel_size": 2}),
    "an-expert-a-rank": (4, 4, {"expert_model_parallel_size": 4, "moe_router_topk": 3}),
    "within-tensor-ranks": (4, 2, TENSOR | {"expert_model_parallel_size": 2}),
    "shared-by-tensor-ranks": (4, 2, TENSOR | {"expert_tensor_parallel_size": 2}),
    "across-tensor-and-hdp-ranks": (4, 2, TENSOR | {"expert_model_parallel_size": 4}),
    "shared-and-across": (
        4,
        2,
        TENSOR | {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 2},
    ),
    "all-gathered-within-tensor-ranks": (
        4,
        2,
        TENSOR | {"expert_model_parallel_size": 2, "moe_token_dispatcher_type": "allgather"},
    ),
    "stages": (
        4,
        2,
        {"pipeline_model_parallel_size": 2, "expert_model_parallel_size": 2},
    ),
    "virtual-stages": (4, 2, VIRTUAL),
    "virtual-stages-across-ranks": (4, 2, VIRTUAL | {"expert_model_parallel_size": 2}),
}


def test_gradients_of_plans_for_experts(run_ranks, tmp_path):
    """Two domains of two ranks: rings inside a domain and over both, whole ones beside, padding."""
    arguments = moe_arguments(
        write_corpus(tmp_path, LENGTHS),
        **ROOM | {"hdp_tokens_per_rank": 64, "expert_model_parallel_size": 2},
    )
    lengths = np.array(LENGTHS)[first_rows(len(LENGTHS), arguments.seed)]
    made = plan(lengths, ranks=4, tokens_per_rank=64, expert_parallel_size=2)
    assert made.strategy == "ep-balance"
    assert {2, 4} <= {len(made.micro_batch(m).ranks) for m in range(made.num_micro_batches)}
    apart = replace(made, positions=2 * made.positions)  # every second position is padding
    auto = replace(arguments, hdp_strategy="auto")
    by_name = replace(arguments, hdp_strategy="ep-balance")
    check(run_ranks, 4, [(auto, None), (by_name, None), (auto, made), (auto, apart)])


SLOW = (
    "virtual-stages",
    "virtual-stages-across-ranks",
    "an-expert-a-rank",
    "shared-by-tensor-ranks",
    "all-gathered-within-tensor-ranks",
)


@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in LAYOUTS],
)
def test_gradients_of_layouts(run_ranks, tmp_path, layout):
    ranks, hdp_ranks, overrides = LAYOUTS[layout]
    arguments = moe_arguments(write_corpus(tmp_path, LENGTHS), **(ROOM | overrides))
    cases = [(replace(arguments, hdp_strategy="auto"), None), planned(arguments, hdp_ranks)]
    check(run_ranks, ranks, cases)


@pytest.mark.parametrize(
    "overrides",
    [
        {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        },
        {"moe_router_topk": 1, "moe_router_pre_softmax": True, "overlap_grad_reduce": True},
        {
            "moe_token_dispatcher_type": "allgather",
            "expert_model_parallel_size": 1,
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
        },
        {
            "use_distributed_optimizer": True,
            "overlap_grad_reduce": True,
            "ddp_bucket_size": 1000,
        },
    ],
    ids=["recompute", "top-1-overlapped", "allgather", "distributed-optimizer"],
)
def test_gradients_with_megatron_features(run_ranks, tmp_path, overrides):
    settings = ROOM | {"expert_model_parallel_size": 2} | overrides
    arguments = moe_arguments(write_corpus(tmp_path, LENGTHS), **settings)
    check(run_ranks, 2, [planned(arguments, 2)])


@pytest.mark.parametrize("expert_ranks", [1, 2])
def test_ranks_without_a_sequence_and_experts_without_a_token(run_ranks, tmp_path, expert_ranks):
    """A padding token reaches two experts, the hooks of the other two's gradients fire as well."""
    overlapped = {"overlap_grad_reduce": True, "ddp_bucket_size": 1}
    arguments = moe_arguments(
        write_corpus(tmp_path, [5, 3]),
        expert_model_parallel_size=expert_ranks,
        hdp_strategy="naive",
        **overlapped,
    )
    check(run_ranks, 4, [(arguments, None)])


def test_corrupt_documents_leave_no_trace(run_ranks, tmp_path):
    prefix = write_corpus(tmp_path, LENGTHS, corrupt=[4, 7])
    check(run_ranks, 2, [planned(moe_arguments(prefix, **ROOM), 2)])


def seen_with_padding(self, params):
    tokens = SEEN_HERE(self, params)
    return replace(tokens, sequence_index=tokens.sequence_index.clamp(min=0))


def nothing(*args):
    return None


def finalize_with_doubled_experts(self, num_loss_tokens, model, *args, **kwargs):
    FINALIZE(self, num_loss_tokens, model, *args, **kwargs)
    for chunk in model:
        for buffer in chunk.expert_parallel_buffers:
            buffer.scale_gradients(2.0)


FINALIZE = HdpExecutor._finalize
SEEN_HERE = HdpRouter._seen_here
ROUTER = "megatron_hdp.megatron.model.router.HdpRouter"


@pytest.mark.parametrize(
    "fault",
    [
        (f"{ROUTER}._seen_here", seen_with_padding),
        ("megatron_hdp.runtime.loss.balance._sum_over_holders", nothing),
        (f"{ROUTER}._is_learning", nothing),
        (
            "megatron_hdp.megatron.execution.executor.HdpExecutor._finalize",
            finalize_with_doubled_experts,
        ),
    ],
    ids=["padding-counted", "ring-not-summed", "no-router-loss", "experts-doubled"],
)
def test_a_planted_fault_fails_the_check(run_ranks, tmp_path, fault):
    prefix = write_corpus(tmp_path, LENGTHS)
    case = planned(moe_arguments(prefix, expert_model_parallel_size=2, **ROOM), 2)
    errors = run_ranks(2, errors_of, [case], fault)[0]
    assert min(errors) > 1e-6, errors


def refusals(prefix):
    """Body of a rank: what is said to losses that depend on the plan, and without micro-batch."""
    said = []
    for kind in ("aux_loss", "global_aux_loss"):
        arguments = moe_arguments(prefix, moe_router_load_balancing_type=kind)
        parallel.initialise(arguments)
        parallel.set_seeds(1)
        with pytest.raises(ValueError) as error:
            building.build_gpt(arguments, VOCABULARY)
        said.append(str(error.value))
        parallel.finish()
    arguments = moe_arguments(prefix)
    parallel.initialise(arguments)
    parallel.set_seeds(1)
    router = building.build_gpt(arguments, VOCABULARY).module.decoder.layers[0].mlp.router
    with pytest.raises(RuntimeError) as error:
        router(torch.ones(3, 1, arguments.hidden_size, dtype=torch.float64))
    return [*said, str(error.value)]


def test_what_the_router_refuses(run_ranks, tmp_path):
    aux, global_aux, outside = run_ranks(1, refusals, write_corpus(tmp_path, [5]))[0]
    assert "does not support aux_loss, whose effect depends on the plan; use seq_aux_loss" in aux
    assert "does not support global_aux_loss" in global_aux
    assert "knows no micro-batch" in outside


def initialise(arguments):
    parallel.initialise(arguments)


def parameters_of(runs):
    """Body of a rank: what the cost model takes for the parameters of each model."""
    counts = []
    for run in runs:
        parallel.initialise(run)
        parallel.set_seeds(1)
        counts.append(parallel.num_parameters(building.build_chunks(run, VOCABULARY)))
        parallel.finish()
    return counts


def test_a_token_meets_the_experts_it_goes_to(run_ranks, tmp_path):
    alone = moe_arguments(write_corpus(tmp_path, [5]))
    spread = [
        replace(alone, expert_model_parallel_size=2),
        replace(alone, num_experts=8, moe_router_topk=1, moe_router_pre_softmax=True),
        replace(alone, pipeline_model_parallel_size=2),
        replace(alone, **TENSOR, expert_model_parallel_size=2),
    ]
    first, *others = run_ranks(2, parameters_of, [alone, *spread])[0]
    layers, hidden, expert = 2, 16, 3 * 16 * 12
    norms, router = (2 * layers + 1) * hidden, 4 * hidden
    embeddings, attention = 2 * 384 * hidden, 2 * 16 * 16 + 2 * 8 * 16
    dense, experts = embeddings + norms + layers * (attention + router), layers * 2 * expert
    assert first == (dense, experts)
    assert others == [
        first,
        (dense + layers * router, experts // 2),
        first,
        (dense + norms + layers * router, experts),
    ]


def test_ranks_that_cannot_share_the_experts_are_refused(run_ranks, tmp_path):
    arguments = moe_arguments(write_corpus(tmp_path, [5]), expert_model_parallel_size=2)
    with pytest.raises(
        Exception, match="3 ranks of a pipeline stage cannot be cut into groups of 2 that"
    ):
        run_ranks(3, initialise, arguments)
