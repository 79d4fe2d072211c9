"""Steps of training: one loss curve, whatever the ranks, the strategy and the capacity.

Slow cases train twelve, those of the default suite the first third of them.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_hdp.data import TokenWriter
from megatron_hdp.training.loop import pretrain
from tests.support.gradients import EXPERTS, VOCABULARY, tiny_arguments

STEPS, FIRST_STEPS = 12, 4
LONGEST = 60
STRATEGIES = ("static", "naive", "dp-balance")
TEXT = Path(__file__).read_bytes()


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    """Pieces of this file, of very different lengths: something that can be learned."""
    path = tmp_path_factory.mktemp("curves") / "corpus"
    rng = np.random.default_rng(7)
    with TokenWriter(path, VOCABULARY) as writer:
        for length in [1, 2, LONGEST, *rng.integers(3, LONGEST, 20).tolist()]:
            start = int(rng.integers(0, len(TEXT) - length))
            writer.add(np.frombuffer(TEXT, np.uint8)[start : start + length].astype(np.int64))
    return str(path)


def arguments(prefix, **overrides):
    settings = {
        "seq_length": LONGEST,
        "max_position_embeddings": LONGEST,
        "init_method_std": 0.1,
        "global_batch_size": 5,
        "train_iters": STEPS,
        "lr_decay_iters": STEPS,
        "lr": 5e-3,
        "clip_grad": 0.0,
        "log_interval": 1000,
    }
    return tiny_arguments(prefix, **(settings | overrides))


def losses(runs):
    """Body of a rank: the loss curve of each run, of which no step fell back on another plan."""
    curves = [list(pretrain(run)) for run in runs]
    assert [curve[-1].planner_failures for curve in curves] == [0] * len(runs)
    return [[metrics.loss for metrics in curve] for curve in curves]


def runs_on(num_ranks, prefix, **overrides):
    """One run a strategy, with the least capacity that fits the context on these ranks."""
    capacity = -(-LONGEST // num_ranks) + num_ranks
    return [
        arguments(prefix, hdp_strategy=strategy, hdp_tokens_per_rank=capacity, **overrides)
        for strategy in STRATEGIES
    ]


def largest_difference(curves, reference):
    curves, reference = np.array(curves), np.array(reference)
    return np.abs(curves / reference - 1).max()


@pytest.fixture(scope="module")
def float64_curve(run_ranks, prefix):
    run = arguments(prefix, hdp_strategy="naive", hdp_tokens_per_rank=200)
    return run_ranks(1, losses, [run])[0][0]


def test_the_loss_falls(float64_curve):
    assert np.mean(float64_curve[-3:]) < 0.85 * float64_curve[0]


@pytest.mark.parametrize(
    "num_ranks", [pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 3, 4, 5)]
)
def test_one_curve_in_float64(run_ranks, prefix, float64_curve, num_ranks):
    curves = run_ranks(num_ranks, losses, runs_on(num_ranks, prefix), timeout_s=570)
    assert all(rank == curves[0] for rank in curves)
    assert largest_difference(curves[0], float64_curve) <= 1e-10


@pytest.mark.parametrize(
    "num_ranks", [pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 3, 4, 5)]
)
def test_one_curve_in_float32(run_ranks, prefix, float64_curve, num_ranks):
    runs = runs_on(
        num_ranks, prefix, fp64=False, use_distributed_optimizer=True, overlap_grad_reduce=True
    )
    curves = run_ranks(num_ranks, losses, runs, timeout_s=570)[0]
    assert largest_difference(curves, float64_curve) <= 1e-5


@pytest.mark.slow
def test_a_sequence_of_sixteen_capacities_streams(run_ranks, prefix, float64_curve):
    """On one rank that holds a 16th of it, and as two of them beside whole ones."""
    runs = [
        arguments(prefix, hdp_tokens_per_rank=-(-LONGEST // sixteenths), **STREAM)
        for sixteenths in (16, 8)
    ]
    curves = run_ranks(1, losses, runs, timeout_s=570)[0]
    assert largest_difference(curves, float64_curve) <= 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [None, 2])
def test_a_sequence_of_four_capacities_streams_through_stages(
    run_ranks, prefix, float64_curve, chunks
):
    more = {"num_layers": 2 * (chunks or 1)}
    alone = arguments(prefix, hdp_strategy="naive", hdp_tokens_per_rank=200, **more)
    streamed = arguments(
        prefix,
        hdp_tokens_per_rank=-(-LONGEST // 4),
        pipeline_model_parallel_size=2,
        num_virtual_stages_per_pipeline_rank=chunks,
        **STREAM,
        **more,
    )
    expected = float64_curve if chunks is None else run_ranks(1, losses, [alone])[0][0]
    curves = run_ranks(2, losses, [streamed], timeout_s=570)[0]
    assert largest_difference(curves, expected) <= 1e-10


STREAM = {"hdp_long_sequence": "stream", "hdp_offload": "auto"}
LAYOUTS = {
    "tp2": {"tensor_model_parallel_size": 2},
    "tp2-sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp2": {"pipeline_model_parallel_size": 2},
    "pp2-parts": {"pipeline_model_parallel_size": 2, "hdp_sequence_parts": 4},
    "tp2-sp-pp2": {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "pipeline_model_parallel_size": 2,
    },
}


def runs_in(layout, num_ranks, prefix, strategies=("auto",), **overrides):
    replicas = num_ranks
    for size in ("tensor_model_parallel_size", "pipeline_model_parallel_size"):
        replicas //= LAYOUTS[layout].get(size, 1)
    capacity = (-(-LONGEST // replicas) + replicas + 1) // 2 * 2
    return [
        arguments(
            prefix,
            hdp_strategy=strategy,
            hdp_tokens_per_rank=capacity,
            **LAYOUTS[layout],
            **overrides,
        )
        for strategy in strategies
    ]


@pytest.mark.parametrize(
    ("layout", "steps"),
    [
        pytest.param("tp2-sp-pp2", FIRST_STEPS, marks=pytest.mark.smoke),
        *(pytest.param(one, STEPS, marks=pytest.mark.slow) for one in LAYOUTS),
    ],
)
def test_layouts_share_the_curve(run_ranks, prefix, float64_curve, layout, steps):
    runs = runs_in(layout, 4, prefix, train_iters=steps)
    curves = run_ranks(4, losses, runs, timeout_s=570)
    assert all(rank == curves[0] for rank in curves)
    assert largest_difference(curves[0], float64_curve[:steps]) <= 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("layout", sorted(set(LAYOUTS) - {"pp2-parts"}))
def test_strategies_in_layouts_share_the_curve(run_ranks, prefix, float64_curve, layout):
    runs = runs_in(layout, 8, prefix, (*STRATEGIES, "bytescale", "pp-balance"))
    curves = run_ranks(8, losses, runs, timeout_s=1200)[0]
    assert largest_difference(curves, float64_curve) <= 1e-10


@pytest.mark.parametrize("layout", ["pp2", pytest.param("tp2-sp", marks=pytest.mark.slow)])
def test_clipping_is_the_same_in_layouts(run_ranks, prefix, layout):
    clipped = {"clip_grad": 0.5, "train_iters": 3}
    alone = arguments(prefix, hdp_tokens_per_rank=200, **clipped)
    (expected,) = run_ranks(1, losses, [alone])[0]
    (found,) = run_ranks(4, losses, runs_in(layout, 4, prefix, **clipped), timeout_s=570)[0]
    assert largest_difference(found, expected) <= 1e-10
    unclipped = run_ranks(1, losses, [replace(alone, clip_grad=0.0)])[0]
    assert largest_difference(unclipped, expected) > 1e-4


@pytest.fixture(scope="module")
def experts_curve(run_ranks, prefix):
    run = arguments(prefix, hdp_strategy="naive", hdp_tokens_per_rank=200, **EXPERTS)
    return run_ranks(1, losses, [run])[0][0]


@pytest.mark.slow  # a short curve of theirs, clipped, is compared below
@pytest.mark.parametrize(
    "tolerance, overrides",
    [
        (1e-10, {}),
        (1e-5, {"fp64": False, "use_distributed_optimizer": True, "overlap_grad_reduce": True}),
    ],
    ids=["float64", "float32-distributed-optimizer"],
)
def test_experts_across_ranks_share_the_curve(
    run_ranks, prefix, experts_curve, tolerance, overrides
):
    layout = EXPERTS | {"expert_model_parallel_size": 2}
    run = arguments(prefix, hdp_strategy="auto", hdp_tokens_per_rank=30, **layout, **overrides)
    curves = run_ranks(4, losses, [run], timeout_s=570)
    assert all(rank == curves[0] for rank in curves)
    assert largest_difference(curves[0], experts_curve) <= tolerance


def test_clipping_counts_every_expert_once(run_ranks, prefix):
    clipped = {"clip_grad": 0.5, "train_iters": 3, "hdp_tokens_per_rank": 60, **EXPERTS}
    (expected,) = run_ranks(1, losses, [arguments(prefix, **clipped)])[0]
    across = arguments(prefix, expert_model_parallel_size=2, **clipped)
    (found,) = run_ranks(2, losses, [across], timeout_s=570)[0]
    assert largest_difference(found, expected) <= 1e-6


def test_another_seed_is_another_curve(run_ranks, prefix, float64_curve):
    """The comparison can fail."""
    run = replace(runs_on(1, prefix)[0], seed=4321, train_iters=2)
    curve = run_ranks(1, losses, [run])[0][0]
    assert largest_difference(curve, float64_curve[:2]) > 1e-3
