"""The gold test: gradients after one HDP step equal those of one rank that saw the whole batch."""

import tempfile

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_hdp.data.steps import read_micro_batch
from megatron_hdp.megatron.execution.executor import HdpExecutor
from megatron_hdp.runtime.interleaved_comm import InterleavedComm
from tests.support.drawn import first_rows
from tests.support.gradients import errors_of, tiny_arguments, write_corpus
from tests.support.random_plans import random_plan
from tests.support.ranks import RankError

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
    lengths = st.lists(some_length, min_size=1, max_size=7)
    lengths = draw(lengths.filter(lambda found: max(found) > 1))  # one token predicts nothing
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
        for strategy in ("static", "naive", "dp-balance", "pp-balance")
    ]
    plan = random_plan(
        drawn_lengths(cases[0][0], lengths),
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


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
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
        (3, SHARDED_BUCKETS),
        (4, SHARDED_BUCKETS | {"pipeline_model_parallel_size": 2}),
        (3, {"recompute_granularity": "selective"}),
        (
            4,
            {
                "recompute_granularity": "full",
                "recompute_method": "uniform",
                "recompute_num_layers": 1,
            },
        ),
        (
            6,
            {
                "pipeline_model_parallel_size": 2,
                "overlap_grad_reduce": True,
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
        "distributed-optimizer-pipeline",
        "selective-recompute",
        "full-recompute",
        "pipeline-overlap-recompute",
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


LAYOUTS = {  # ranks, layout
    "tp2-sp": (4, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "pp2": (8, {"pipeline_model_parallel_size": 2}),
    "pp4": (8, {"pipeline_model_parallel_size": 4}),
    "tp2-sp-pp2": (
        8,
        {
            "tensor_model_parallel_size": 2,
            "sequence_parallel": True,
            "pipeline_model_parallel_size": 2,
        },
    ),
}
STRATEGIES = ("static", "naive", "bytescale", "dynamic-cp", "dp-balance", "pp-balance")


def drawn_lengths(arguments, lengths):
    return np.array(lengths)[first_rows(len(lengths), arguments.seed)]


def random_case(arguments, num_hdp_ranks):
    """A plan of rings of every size that no strategy would make, positions not aligned."""
    plan = random_plan(
        drawn_lengths(arguments, LENGTHS),
        ranks=num_hdp_ranks,
        tokens_per_rank=arguments.hdp_tokens_per_rank,
        seed=num_hdp_ranks,
    )
    return arguments, plan


QUICK = {  # every layout and every model once; the other pairs are in the slow suite
    ("tp2-sp", "mqa-qknorm-qkvbias"),
    ("pp2", "mha-tied-layernorm"),
    ("pp4", "gqa"),
    ("tp2-sp-pp2", "mha-tied-layernorm"),
}


def pairs():
    for layout in LAYOUTS:
        for model in MODELS:
            marks = () if (layout, model) in QUICK else pytest.mark.slow
            yield pytest.param(layout, model, marks=marks)


@pytest.mark.parametrize("layout, model", list(pairs()))
def test_gradients_of_layouts(run_ranks, tmp_path, layout, model):
    ranks, overrides = LAYOUTS[layout]
    prefix = write_corpus(tmp_path, LENGTHS)
    common = {"hdp_tokens_per_rank": 128, "seq_length": 200, "max_position_embeddings": 200}
    common |= overrides | MODELS[model]
    common["num_layers"] = max(2, overrides.get("pipeline_model_parallel_size", 1))
    if model == "mqa-qknorm-qkvbias":
        common["num_query_groups"] = overrides.get("tensor_model_parallel_size", 1)
    cases = [
        (tiny_arguments(prefix, hdp_strategy=strategy, **common), None) for strategy in STRATEGIES
    ]
    replicas = ranks
    for size in ("tensor_model_parallel_size", "pipeline_model_parallel_size"):
        replicas //= overrides.get(size, 1)
    cases.append(random_case(tiny_arguments(prefix, **common), replicas))
    errors = run_ranks(ranks, errors_of, cases, timeout_s=570)[0]
    assert max(errors) <= TOLERANCE, errors


TWO_STAGES = {"pipeline_model_parallel_size": 2}
VIRTUAL = {  # ranks, virtual stages on a rank, the rest
    "pp2-v2": (
        4,
        2,
        TWO_STAGES
        | SHARDED_BUCKETS
        | MODELS["mha-tied-layernorm"]
        | {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        },
    ),
    "pp2-v3": (4, 3, TWO_STAGES),
    "pp2-v2-tp2-sp": (
        4,
        2,
        TWO_STAGES | {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    ),
    "pp4-v2": (4, 2, {"pipeline_model_parallel_size": 4}),
    "pp4-v2-rings": (8, 2, {"pipeline_model_parallel_size": 4}),
    "pp4-v3-rings": (8, 3, {"pipeline_model_parallel_size": 4}),
    "pp2-v2-tp2-sp-rings": (
        8,
        2,
        TWO_STAGES | {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    ),
}


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(name, marks=() if name in ("pp2-v2", "pp2-v3") else pytest.mark.slow)
        for name in VIRTUAL
    ],
)
def test_gradients_of_virtual_stages(run_ranks, tmp_path, layout):
    ranks, chunks, overrides = VIRTUAL[layout]
    stages = overrides["pipeline_model_parallel_size"]
    prefix = write_corpus(tmp_path, LENGTHS)
    common = {"hdp_tokens_per_rank": 128, "seq_length": 200, "max_position_embeddings": 200}
    common |= overrides | {
        "num_layers": stages * chunks,
        "num_virtual_stages_per_pipeline_rank": chunks,
    }
    replicas = ranks // stages // overrides.get("tensor_model_parallel_size", 1)
    if replicas == 1:
        common["hdp_tokens_per_rank"] = 200
    cases = [
        (tiny_arguments(prefix, hdp_strategy=strategy, **common), None)
        for strategy in ("static", "naive", "pp-balance")
    ]
    cases.append(random_case(tiny_arguments(prefix, **common), replicas))
    errors = run_ranks(ranks, errors_of, cases, timeout_s=570)[0]
    assert max(errors) <= TOLERANCE, errors


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [2, 3])
def test_gradients_of_many_plans_under_virtual_stages(run_ranks, tmp_path, chunks):
    """Rings across both pipelines at any position, counts that differ."""
    virtual = {"num_layers": 2 * chunks, "num_virtual_stages_per_pipeline_rank": chunks}
    arguments = tiny_arguments(
        write_corpus(tmp_path, LENGTHS * 2),
        hdp_tokens_per_rank=128,
        seq_length=200,
        max_position_embeddings=200,
        **TWO_STAGES | virtual,
    )
    lengths = drawn_lengths(arguments, LENGTHS * 2)
    cases = [
        (arguments, random_plan(lengths, ranks=2, tokens_per_rank=128, seed=seed))
        for seed in range(10)
    ]
    errors = run_ranks(4, errors_of, cases, timeout_s=570)[0]
    assert max(errors) <= TOLERANCE, errors


def shapes_of_plain_1f1b(self, shapes, table):
    """Takes every micro-batch through one chunk before the next."""
    BEGIN(self, shapes, sorted(table, key=lambda entry: entry[1]))


BEGIN = InterleavedComm.begin


def test_shapes_in_another_order_fail(run_ranks, tmp_path):
    fault = ("megatron_hdp.runtime.interleaved_comm.InterleavedComm.begin", shapes_of_plain_1f1b)
    virtual = TWO_STAGES | {"num_layers": 4, "num_virtual_stages_per_pipeline_rank": 2}
    case = tiny_arguments(
        write_corpus(tmp_path, LENGTHS), hdp_tokens_per_rank=200, seq_length=200, **virtual
    )
    with pytest.raises(RankError):
        run_ranks(2, errors_of, [(case, None)], fault)


@pytest.mark.parametrize("ranks", [1, 3])
def test_corrupt_documents_leave_no_trace(run_ranks, tmp_path, ranks):
    """One document of many, sharded or not, that only one rank of its ring sees to be corrupt."""
    prefix = write_corpus(tmp_path, LENGTHS, corrupt=[4, 7])
    case = (tiny_arguments(prefix, hdp_tokens_per_rank=200, hdp_strategy="naive"), None)
    cases = [case, random_case(case[0], ranks)]
    errors = run_ranks(ranks, errors_of, cases)[0]
    assert max(errors) <= TOLERANCE, errors


def read_without_a_slice(*args, **kwargs):
    """Reads a micro-batch whose first ring slice carries no loss."""
    micro_batch = read_micro_batch(*args, **kwargs)
    micro_batch.loss_mask[: sum(micro_batch.ring_slices[:1])] = False
    return micro_batch


def read_at_wrong_positions(*args, **kwargs):
    """Reads a micro-batch whose first tail chunk is one position further than it is."""
    micro_batch = read_micro_batch(*args, **kwargs)
    for tokens in micro_batch.ring_slices[:1]:
        micro_batch.positions[tokens // 2 : tokens] += 1
    return micro_batch


def block_without_heads(layout, step):
    """A ring in which no head chunk is seen as a whole."""
    return layout.tails, layout.half_segments, layout.tails, layout.half_segments


def finalize_with_one_token_too_many(self, num_loss_tokens, *args, **kwargs):
    return FINALIZE(self, num_loss_tokens + 1, *args, **kwargs)


EXECUTOR = "megatron_hdp.megatron.execution.executor"
FINALIZE = HdpExecutor._finalize


@pytest.mark.parametrize(
    "fault",
    [
        ("megatron_hdp.data.steps.rank_step.read_micro_batch", read_without_a_slice),
        ("megatron_hdp.data.steps.rank_step.read_micro_batch", read_at_wrong_positions),
        ("megatron_hdp.runtime.ring.attention._block", block_without_heads),
        (f"{EXECUTOR}.HdpExecutor._finalize", finalize_with_one_token_too_many),
    ],
    ids=["slice-dropped", "wrong-position", "wrong-block", "wrong-scale"],
)
def test_a_planted_fault_fails_the_check(run_ranks, tmp_path, fault):
    prefix = write_corpus(tmp_path, LENGTHS)
    errors = run_ranks(4, errors_of, [(tiny_arguments(prefix, hdp_strategy="naive"), None)], fault)
    assert min(errors[0]) > 1e-6, errors[0]
