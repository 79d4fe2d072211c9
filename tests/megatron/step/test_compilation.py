"""Variants of Megatron's fused functions under changing numbers of tokens: all are compiled."""

import random
import threading
from collections import Counter

import pytest
import torch
from megatron.core.fusions import fused_bias_dropout, fused_bias_swiglu
from torch.utils.checkpoint import checkpoint

from megatron_hdp.megatron import parallel
from megatron_hdp.megatron.model import building
from megatron_hdp.megatron.step import setup
from megatron_hdp.megatron.step.setup import MAX_VARIANTS, allow_variants
from megatron_hdp.runtime.timeline import Timeline
from tests.support.gradients import VOCABULARY, tiny_arguments, write_corpus

HIDDEN, WIDE = 4, 8
BIAS = torch.zeros(HIDDEN)
COMPILED = {
    fused_bias_dropout: ("bias_dropout_add_fused_train", "bias_dropout_add_fused_inference"),
    fused_bias_swiglu: (
        *("swiglu", "swiglu_back", "bias_swiglu", "bias_swiglu_back"),
        *("weighted_swiglu", "weighted_swiglu_back"),
    ),
}
MANY_ELEMENTS = 200 * 2 * WIDE  # stands for 2^31
DYNAMO = torch._dynamo.config


@pytest.fixture
def limit():
    """PyTorch's own limit, and after the test again."""
    before = DYNAMO._config["recompile_limit"].default
    with DYNAMO.patch(recompile_limit=before):
        yield before
    DYNAMO._config["recompile_limit"].default = before


@pytest.fixture
def variants(monkeypatch, limit):
    """Counts compilations by function, with guards on indices like those of a GPU's compiler."""
    counted = Counter()

    def counting(name):
        def backend(graph, inputs):
            counted[name] += 1
            sizes = [one.numel() for one in inputs if isinstance(one, torch.Tensor)]
            all(size < MANY_ELEMENTS for size in sizes)  # on symbolic sizes each is a guard
            return graph.forward

        return backend

    torch._dynamo.reset()
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)  # of the default suite
    for module, names in COMPILED.items():
        for name in names:
            found = getattr(module, name)
            plain = getattr(found, "_torchdynamo_orig_callable", found)
            monkeypatch.setattr(module, name, torch.compile(plain, backend=counting(name)))
    with DYNAMO.patch(fail_on_recompile_limit_hit=True, disable=False):
        yield counted
    torch._dynamo.reset()


def layer(hidden, bias, add):
    """What calls fused functions in a transformer's layer, as Megatron calls them."""
    hidden = add((hidden * 2, None if bias is None else BIAS), hidden, 0.1)
    wide = hidden.repeat(1, 1, 2 * WIDE // HIDDEN)
    wide = fused_bias_swiglu.bias_swiglu_impl(wide, bias)
    return add((wide[..., :HIDDEN], None if bias is None else BIAS), hidden, 0.1)


def run(tokens, bias):
    """A micro-batch: two recomputed layers with gradients, an evaluation's, an expert's share."""
    hidden = torch.ones(tokens, 1, HIDDEN, requires_grad=True)
    add = fused_bias_dropout.get_bias_dropout_add(training=True, fused=True)
    out = hidden
    for _ in range(2):
        out = checkpoint(layer, out, bias, add, use_reentrant=True)
    out.sum().backward()
    with torch.no_grad():
        layer(hidden, bias, fused_bias_dropout.get_bias_dropout_add(training=False, fused=True))
    routed = torch.ones(tokens // 2, 2 * WIDE, requires_grad=True)
    probs = torch.ones(tokens // 2, 1, requires_grad=True)
    fused_bias_swiglu.weighted_bias_swiglu_impl(routed, None, probs).sum().backward()


def token_counts():
    """Tokens of 100 micro-batches on a rank: two at least."""
    generator = random.Random(0)
    return [generator.randint(2, 400) for _ in range(98)] + [400, 2]


@pytest.mark.slow
@pytest.mark.parametrize(
    "bias",
    [pytest.param(None, marks=pytest.mark.slow), torch.zeros(2 * WIDE, requires_grad=True)],
)
def test_no_number_of_tokens_runs_uncompiled(variants, bias):
    allow_variants()
    for tokens in token_counts():
        run(tokens, bias)
    swiglu = "swiglu" if bias is None else "bias_swiglu"
    both = {"bias_dropout_add_fused_train", "bias_dropout_add_fused_inference", swiglu}
    assert set(variants) >= both | {f"{swiglu}_back", "weighted_swiglu", "weighted_swiglu_back"}
    assert max(variants.values()) <= 8, variants


@pytest.mark.slow
def test_one_token_makes_more_variants_and_all_are_compiled(variants):
    """Experts may get one, or none."""
    allow_variants()
    for tokens in (9, 17, 2, 1, 30):
        run(tokens, None)
    assert 8 < max(variants.values()) <= 15, variants


def test_the_limit_holds_in_the_threads_of_the_backward_pass(limit):
    assert limit < MAX_VARIANTS
    allow_variants()
    found = []
    thread = threading.Thread(target=lambda: found.append(DYNAMO.recompile_limit))
    thread.start()
    thread.join()
    assert [DYNAMO.recompile_limit, *found] == [MAX_VARIANTS] * 2


def limits_of_a_run(arguments):
    """PyTorch's limit of variants before the executor is built and after."""
    parallel.initialise(arguments)
    gpt = building.build_gpt(arguments, VOCABULARY)
    before = torch._dynamo.config.recompile_limit
    setup.build_executor(arguments, [gpt], Timeline())
    return before, torch._dynamo.config.recompile_limit


def test_compiled_functions_have_room_for_their_variants(run_ranks, tmp_path):
    arguments = tiny_arguments(write_corpus(tmp_path, [64]))
    before, after = run_ranks(1, limits_of_a_run, arguments)[0]
    assert before < after == MAX_VARIANTS
