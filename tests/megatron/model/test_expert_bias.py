"""The bias that balances experts without a loss: after every step what one rank alone finds."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_hdp.megatron import parallel
from megatron_hdp.megatron.model import building
from tests.gradient_equivalence import case
from tests.gradient_equivalence.case import ACROSS, LENGTHS, ROOM, Case
from tests.gradient_equivalence.cases import EXPERT_MODELS, TENSOR, UNEVEN
from tests.gradient_equivalence.faults import seen_with_padding
from tests.gradient_equivalence.settings import RECOMPUTE
from tests.support.gradients import (
    VOCABULARY,
    drawn_sequences,
    hdp_steps_of,
    moe_arguments,
    routers_of,
    seldom_compiled,
    stock,
    stock_model,
    write_corpus,
)

RATE = 0.07  # moves choices from step to step


def run(folder, **overrides):
    settings = ROOM | EXPERT_MODELS["deepseek"] | {"moe_router_bias_update_rate": RATE} | overrides
    padded = {"hdp_slice_multiple": 32}  # much, so that counting it would be seen
    return moe_arguments(write_corpus(folder, LENGTHS), **padded | settings)


def plans_of(arguments, ranks):
    return [None, *case.plans_of(arguments, Case(ranks, {}, plans=2))]


def hdp_biases(arguments, plans, *faults):
    """By layer, the biases after each step; of all stages."""
    found = []
    for _, chunks in hdp_steps_of(arguments, plans, faults):
        mine = biases_of(chunk.module for chunk in chunks)
        group = parallel_state.get_pipeline_model_parallel_group()
        everyone = [None] * group.size()
        dist.all_gather_object(everyone, mine, group=group)
        found.append({number: one for stage in everyone for number, one in stage.items()})
    return found


def biases_of(models):
    return {router.layer_number: router.expert_bias.clone() for router in routers_of(models)}


def reference_biases(arguments, num_steps):
    """The same of Megatron's own model, which counts every sequence by itself."""
    gpt = stock_model(arguments)
    found = []
    counts = {}

    def count(router, _, routed):
        counts[router] = counts.get(router, 0) + routed[1].sum(0).double()

    for router in routers_of([gpt]):
        router.register_forward_hook(count)
    for _ in range(num_steps):
        counts.clear()
        for tokens, _, _ in drawn_sequences(arguments):
            mask = torch.ones(len(tokens), len(tokens), dtype=torch.bool).triu(1)[None, None]
            gpt(torch.from_numpy(tokens)[None], torch.arange(len(tokens))[None], mask)
        for router, counted in counts.items():
            router.expert_bias += RATE * torch.sign(counted.mean() - counted).float()
        found.append(biases_of([gpt]))
    return found


@seldom_compiled
def differences(arguments, plans, *faults):
    """Body of a rank: the largest difference after each step; None on ranks but the first."""
    parallel.initialise(arguments)
    found = hdp_biases(arguments, plans, *faults)
    parallel.finish()
    parallel.initialise(stock(arguments))
    if dist.get_rank():
        return None
    expected = reference_biases(arguments, len(plans))
    assert all(one.keys() == other.keys() for one, other in zip(found, expected, strict=True))
    return [
        max((mine[number] - whole[number]).abs().max().item() for number in whole)
        for mine, whole in zip(found, expected, strict=True)
    ]


LAYOUTS = {
    "across": (2, 2, ACROSS),
    "alone-recomputed": (3, 3, RECOMPUTE),
    "stages-across": (4, 2, UNEVEN | ACROSS),
    "tensor-across": (4, 2, TENSOR | {"expert_model_parallel_size": 4}),
}


@pytest.mark.parametrize(
    "layout",
    ["across", *(pytest.param(one, marks=pytest.mark.slow) for one in [*LAYOUTS][1:])],
)
def test_biases_after_steps_of_other_plans(run_ranks, tmp_path, layout):
    ranks, hdp_ranks, overrides = LAYOUTS[layout]
    arguments = run(tmp_path, **overrides)
    found = run_ranks(ranks, differences, arguments, plans_of(arguments, hdp_ranks))[0]
    assert max(found) <= 1e-6, found


def counted_here_alone(tokens_per_expert, expert_bias, rate, **groups):
    offset = tokens_per_expert.double().mean(-1, keepdim=True) - tokens_per_expert
    return expert_bias + torch.sign(offset).float() * rate


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(
            ("megatron_hdp.megatron.model.router.HdpRouter._seen_here", seen_with_padding),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            (
                "megatron.core.distributed.finalize_model_grads.get_updated_expert_bias",
                counted_here_alone,
            ),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["padding-counted", "ranks-not-summed"],
)
def test_a_planted_fault_fails_the_check(run_ranks, tmp_path, fault):
    arguments = run(tmp_path, **ACROSS)
    found = run_ranks(2, differences, arguments, plans_of(arguments, 2), fault)[0]
    assert max(found) > RATE / 2, found


def counted(arguments):
    """Body of a rank: what a router in BF16 counts while it learns, recomputes and evaluates."""
    parallel.initialise(arguments)
    parallel.set_seeds(1)
    (chunk,) = building.build_chunks(arguments, VOCABULARY)
    (router,) = routers_of([chunk.module])
    router._tokens = SimpleNamespace(is_real=torch.tensor([True, True, False]))
    routed = torch.eye(arguments.num_experts, dtype=torch.bool)[[0, 0, 2]]
    found = []
    for is_training, learns in ((True, True), (True, False), (False, True)):
        router.train(is_training)
        with torch.set_grad_enabled(learns):
            for _ in range(200):
                router._apply_expert_bias(routed)
        found.append(router.local_tokens_per_expert.tolist())
        router.local_tokens_per_expert.zero_()
    return found


def test_only_learning_counts_and_no_number_is_rounded(run_ranks, tmp_path):
    """BF16 has no 257, and a converted count would stay at 256."""
    single = {"num_layers": 1, "moe_layer_freq": "1", "fp64": False, "bf16": True}
    learnt, recomputed, evaluated = run_ranks(1, counted, run(tmp_path, **single))[0]
    assert learnt == [400, *[0] * 7]
    assert recomputed == evaluated == [0] * 8
