"""Model FLOPs: what PyTorch counts on Megatron's own model, and what Megatron's formula says."""

import os
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron_hdp.data.steps.totals import Amounts
from megatron_hdp.megatron import parallel
from megatron_hdp.megatron.model import building
from megatron_hdp.megatron.model.frozen import choose_trained
from megatron_hdp.megatron.options import expert_layers, model_shape
from tests.support.gradients import tiny_arguments, write_corpus
from tests.support.megatron_formula import formula_of
from tests.support.mla import MLA, plain_stock_attention

LENGTH = 24
VOCABULARY = 256
EXPERTS = {"num_experts": 4, "moe_ffn_hidden_size": 20, "add_bias_linear": False}
SHAPES = {
    "gated, grouped": {},
    "plain, wide heads": {
        "swiglu": False,
        "num_query_groups": 4,
        "group_query_attention": False,
        "kv_channels": 12,
    },
    "experts": EXPERTS,
    "today's experts": EXPERTS
    | {
        "num_layers": 3,
        "moe_layer_freq": "[0]+[1]*2",
        "moe_router_score_function": "sigmoid",
        "moe_shared_expert_intermediate_size": 28,
        "moe_shared_expert_gate": True,
    },
    "latent": MLA,
    "latent, queries at once": MLA | {"q_lora_rank": None, "qk_layernorm": False},
    "further tokens": {"mtp_num_layers": 2},
    "further tokens of experts": EXPERTS | {"mtp_num_layers": 2, "moe_layer_freq": "[0,1]"},
    "tied": {"untie_embeddings_and_output_weights": False, "num_query_groups": 1},
}
ADAPTERS = {"lora_rank": 3}
SOME_TRAINED = {
    "adapters": ADAPTERS,
    "adapters of one layer": ADAPTERS | {"lora_targets": ("linear_fc1",)},
    "adapters of experts": SHAPES["today's experts"] | ADAPTERS,
    "adapters of latents": MLA | ADAPTERS | {"lora_targets": ("linear_q_up_proj", "linear_proj")},
    "frozen": {"hdp_frozen": ("embedding.*", "decoder.layers.0.*", "*.linear_qkv.*")},
    "frozen experts": EXPERTS | {"hdp_frozen": ("*.experts.*", "output_layer.*")},
    "frozen, further tokens": {"mtp_num_layers": 2, "hdp_frozen": ("mtp.layers.0.*",)},
    "frozen, tied": SHAPES["tied"] | {"hdp_frozen": ("embedding.*",)},
}


def arguments_of(folder, shape):
    settings = (SHAPES | SOME_TRAINED)[shape]
    return tiny_arguments(write_corpus(folder, [LENGTH]), hybrid_data_parallel=False, **settings)


def counted(arguments):
    """Body of a rank: PyTorch's count of a forward and backward of one sequence."""
    parallel.initialise(arguments)
    parallel.set_seeds(1)
    with plain_stock_attention() if arguments.multi_latent_attention else nullcontext():
        gpt = building.build_gpt(arguments, VOCABULARY).module
    choose_trained(gpt, arguments)
    # as HDP has it: recomputation differentiates what has a gradient
    gpt.embedding.register_forward_hook(lambda *found: found[-1].requires_grad_())
    tokens = torch.arange(LENGTH)[None] % VOCABULARY
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)[None, None]
    with FlopCounterMode(display=False) as counter:
        gpt(tokens, torch.arange(LENGTH)[None], mask, labels=tokens).sum().backward()
    return counter.get_total_flops()


def counted_each(runs):
    """Body of a rank: `counted` of each run."""
    found = []
    for arguments in runs:
        found.append(counted(arguments))
        parallel.finish()
    return found


@pytest.mark.slow
def test_what_pytorch_counts(run_ranks, tmp_path):
    shapes = SHAPES | SOME_TRAINED
    runs = [arguments_of(tmp_path, shape) for shape in shapes]
    for shape, arguments, found in zip(
        shapes, runs, run_ranks(1, counted_each, runs)[0], strict=True
    ):
        flops = model_shape(arguments, VOCABULARY)
        # the stock attention multiplies the whole square and masks the half that is not causal
        counted_up = flops.flops_of_sums(LENGTH, 2 * LENGTH**2)
        assert found == (counted_up if flops.trains_all else pytest.approx(counted_up)), shape
        assert found > flops.flops_of_sums(LENGTH, LENGTH**2), shape


def test_a_wrong_shape_is_noticed(tmp_path):
    """The comparison can fail: each part of the shape changes the count."""
    arguments = arguments_of(tmp_path, "gated, grouped")
    known = model_shape(arguments, VOCABULARY).flops_of_sums(3, 5)
    for change in (
        {"num_layers": 3},
        {"ffn_hidden_size": 25},
        {"num_query_groups": 4},
        {"kv_channels": 5},
        {"swiglu": False},
        {"hidden_size": 17},
        {"num_experts": 4, "moe_router_topk": 1},
    ):
        assert model_shape(replace(arguments, **change), VOCABULARY).flops_of_sums(3, 5) != known
    assert model_shape(arguments, VOCABULARY + 1).flops_of_sums(3, 5) != known


def test_by_hand(tmp_path):
    """Two layers of hidden size 16, 4 heads of 4 channels, 2 groups, a gated MLP of 24."""
    flops = model_shape(arguments_of(tmp_path, "gated, grouped"), VOCABULARY)
    qkv, projection, mlp, logits = 16 * (16 + 8 + 8), 16 * 16, 3 * 16 * 24, 16 * 256
    per_token, per_squared_token = 6 * (2 * (qkv + projection + mlp) + logits), 3 * 2 * (2 * 16)
    assert flops.flops_of_sums(10, 52) == 10 * per_token + 52 * per_squared_token
    assert flops.flops(np.array([4, 6])) == flops.flops_of_sums(10, 52)


@pytest.mark.parametrize("window", [1, 5, 9, 40])
def test_a_window_by_its_pairs(tmp_path, window):
    """One of two layers has a window; half of the diagonal counts, as without one."""
    arguments = arguments_of(tmp_path, "gated, grouped")
    plain = model_shape(arguments, VOCABULARY)
    half = {"window_size": f"{window - 1},0", "window_attn_skip_freq": "[1,0]"}
    flops = model_shape(replace(arguments, **half), VOCABULARY)
    lengths = np.array([3, 9, 30])
    pairs = sum(sum(min(i, window) for i in range(1, n + 1)) - min(n, window) / 2 for n in lengths)
    step = SimpleNamespace(
        lengths=lengths,
        tokens=int(lengths.sum()),
        num_loss_tokens=lengths - 1,
        sources=np.zeros(3, dtype=int),
    )
    amounts = Amounts.of(step, 1, window)
    assert amounts.seen_in_window == 2 * pairs
    squares = int((lengths**2).sum())
    found = flops.flops_of_sums(amounts.tokens, amounts.squared_tokens, amounts.seen_in_window)
    assert found == plain.flops_of_sums(42, squares / 2 + pairs) == flops.flops(lengths)
    assert flops.flops_of_sums(42, squares) == plain.flops_of_sums(42, squares)
    arrays = {name: one[:2] for name, one in vars(step).items() if name != "tokens"}
    rest = SimpleNamespace(tokens=12, **arrays)
    assert amounts.without(0, 30, 29) == Amounts.of(rest, 1, window)


@pytest.mark.megatron_lm
@pytest.mark.parametrize("shape", SHAPES)
def test_megatrons_own_formula_on_equal_lengths(tmp_path, shape):
    checkout = os.environ.get("MEGATRON_LM_PATH")
    if not checkout:
        pytest.skip("set MEGATRON_LM_PATH to a Megatron-LM checkout")
    formula = formula_of(checkout)
    arguments = arguments_of(tmp_path, shape)
    settings = SimpleNamespace(
        **{
            **vars(arguments),
            "seq_length": LENGTH,
            "padded_vocab_size": VOCABULARY,
            "moe_layer_freq": [int(one) for one in expert_layers(arguments)],
            "moe_latent_size": None,
            "attention_output_gate": False,
            "experimental_attention_variant": None,
            "is_hybrid_model": False,
            "hybrid_override_pattern": None,
        }
    )
    expected = formula(settings, 5)
    found = model_shape(arguments, VOCABULARY).flops_of_sums(5 * LENGTH, 5 * LENGTH**2)
    # Megatron leaves the router out, and the gate of shared experts
    routed = (arguments.num_experts or 0) + arguments.moe_shared_expert_gate
    kinds, further = expert_layers(arguments), arguments.mtp_num_layers or 0
    sparse = sum(kinds) + further * kinds[-1]
    found -= 6 * 5 * LENGTH * sparse * arguments.hidden_size * routed
    found += 6 * 5 * LENGTH * further * 3 * arguments.hidden_size  # and counts these layers' norms
    if arguments.multi_latent_attention:  # and counts norms of latents
        latents = arguments.kv_lora_rank + (arguments.q_lora_rank or 0)
        found += 6 * 5 * LENGTH * arguments.num_layers * latents
    assert found == pytest.approx(expected, rel=1e-12)
