"""The gold test: gradients after one HDP step equal those of one rank that saw the whole batch."""

import tempfile

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_hdp.data import StepSampler, read_micro_batch
from megatron_hdp.megatron.executor import HdpExecutor
from tests.gradients import errors_of, tiny_arguments, write_corpus
from tests.random_plans import random_plan

TOLERANCE = 1e-10
MODELS = {
    "gqa": {},
    "mha-tied-layernorm": {
        "num_query_groups": 4,
        "normalization": "LayerNorm",
        "swiglu": False,
        "untie_embeddings_and_output_weights": False,
    },
    "mqa-qknorm-qkvbias": {
        "num_query_groups": 1,
        "qk_layernorm": True,
        "add_qkv_bias": True,
        "add_bias_linear": False,
        "rotary_percent": 0.5,
    },
}


@st.composite
def batches(draw):
    """Ranks, capacity and the lengths of a batch that fits: 1 token to several capacities."""
    ranks = draw(st.integers(1, 5))
    capacity = draw(st.integers(8, 40))
    multiple = draw(st.sampled_from([1, 1, 2, 3]))
    longest = ranks * (capacity // (2 * multiple)) * 2 * multiple if ranks > 1 else capacity
    longest = longest if ranks > 1 else capacity // multiple * multiple
    some_length = st.one_of(st.integers(1, min(6, longest)), st.integers(1, longest))
    lengths = draw(st.lists(some_length, min_size=1, max_size=7))
    model = draw(st.sampled_from(sorted(MODELS)))
    return ranks, capacity, multiple, longest, lengths, model, draw(st.integers(0, 99))


def cases_of(folder, batch):
    """Every strategy and one random plan for the batch."""
    ranks, capacity, multiple, longest, lengths, model, seed = batch
    prefix = write_corpus(folder, lengths, seed)
    common = {"hdp_tokens_per_rank": capacity, "hdp_slice_multiple": multiple, "seed": seed}
    common |= {"seq_length": longest, "max_position_embeddings": longest} | MODELS[model]
    cases = [
        (tiny_arguments(prefix, hdp_strategy=strategy, **common), None)
        for strategy in ("static", "naive", "dp-balance")
    ]
    drawn = StepSampler(np.array(lengths), seed=seed, global_batch_size=len(lengths)).step(0)
    plan = random_plan(
        np.array(lengths)[drawn.sequences],
        ranks=ranks,
        tokens_per_rank=capacity,
        slice_multiple=multiple,
        seed=seed,
    )
    return [*cases, (tiny_arguments(prefix, **common), plan)]


def check(run_ranks, batch):
    with tempfile.TemporaryDirectory() as folder:
        errors = run_ranks(batch[0], errors_of, cases_of(folder, batch), timeout_s=570)[0]
    assert max(errors) <= TOLERANCE, errors


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(batch=batches())
def test_gradients_equal_one_rank_over_the_whole_batch(run_ranks, batch):
    check(run_ranks, batch)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(batch=batches())
def test_gradients_of_many_batches(run_ranks, batch):
    check(run_ranks, batch)


LENGTHS = [1, 2, 30, 100, 64, 65, 7, 200, 129]
SHARDED_BUCKETS = {
    "use_distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "ddp_bucket_size": 1000,
}


@pytest.mark.parametrize(
    "ranks, overrides",
    [
        (4, {"tensor_model_parallel_size": 2, "make_vocab_size_divisible_by": 64}),
        (3, {"overlap_grad_reduce": True}),
        (3, {"use_distributed_optimizer": True}),
        (3, SHARDED_BUCKETS),
        (3, {"recompute_granularity": "selective"}),
        (
            4,
            {
                "recompute_granularity": "full",
                "recompute_method": "uniform",
                "recompute_num_layers": 1,
            },
        ),
    ],
    ids=[
        "tensor-parallel",
        "overlap-grad-reduce",
        "distributed-optimizer",
        "distributed-optimizer-buckets",
        "selective-recompute",
        "full-recompute",
    ],
)
def test_gradients_with_megatron_features(run_ranks, tmp_path, ranks, overrides):
    prefix = write_corpus(tmp_path, LENGTHS)
    capacity = {"hdp_tokens_per_rank": 128, "seq_length": 200, "max_position_embeddings": 200}
    cases = [
        (tiny_arguments(prefix, hdp_strategy=strategy, **capacity, **overrides), None)
        for strategy in ("static", "dp-balance")
    ]
    errors = run_ranks(ranks, errors_of, cases)[0]
    assert max(errors) <= TOLERANCE, errors


def read_without_a_slice(*args):
    """Reads a micro-batch whose first ring slice carries no loss."""
    micro_batch = read_micro_batch(*args)
    micro_batch.loss_mask[: sum(micro_batch.ring_slices[:1])] = False
    return micro_batch


def read_at_wrong_positions(*args):
    """Reads a micro-batch whose first tail chunk is one position further than it is."""
    micro_batch = read_micro_batch(*args)
    for tokens in micro_batch.ring_slices[:1]:
        micro_batch.positions[tokens // 2 : tokens] += 1
    return micro_batch


def block_without_heads(layout, step):
    """A ring in which no head chunk is seen as a whole."""
    return layout.tails, layout.half_slices, layout.tails, layout.half_slices


def finalize_with_one_token_too_many(self, num_loss_tokens, *args, **kwargs):
    return FINALIZE(self, num_loss_tokens + 1, *args, **kwargs)


ROOM = "megatron_hdp.megatron"
FINALIZE = HdpExecutor._finalize


@pytest.mark.parametrize(
    "fault",
    [
        (f"{ROOM}.hdp_steps.read_micro_batch", read_without_a_slice),
        (f"{ROOM}.hdp_steps.read_micro_batch", read_at_wrong_positions),
        ("megatron_hdp.runtime.ring_attention._block", block_without_heads),
        (f"{ROOM}.executor.HdpExecutor._finalize", finalize_with_one_token_too_many),
    ],
    ids=["slice-dropped", "wrong-position", "wrong-block", "wrong-scale"],
)
def test_a_planted_fault_fails_the_check(run_ranks, tmp_path, fault):
    prefix = write_corpus(tmp_path, LENGTHS)
    errors = run_ranks(4, errors_of, [(tiny_arguments(prefix, hdp_strategy="naive"), None)], fault)
    assert min(errors[0]) > 1e-6, errors[0]
