"""How near plans come to the bound on batches like the paper's; every goal is a promise."""

import dataclasses

import numpy as np
import pytest

from megatron_hdp.data.presets import LONGEST, preset_lengths
from megatron_hdp.planner import LLAMA_7B, Plan, evaluate, plan, tight_bound_s

SLOW_RANK = [0.5, *[1.0] * 63]
VERY_MANY = [pytest.param(ranks, marks=pytest.mark.slow) for ranks in (4096, 16384)]


def batch(preset: str, ranks: int, tokens_per_rank: int, seed: int) -> np.ndarray:
    max_length = min(LONGEST, ranks * tokens_per_rank)
    num_tokens = 4 * ranks * tokens_per_rank
    return preset_lengths(preset, num_tokens=num_tokens, max_length=max_length, seed=seed)


def share(made: Plan) -> float:
    made.validate(num_layers=32)
    if not made.offload_ratios.any():
        assert made.summary["max_tokens_on_a_rank"] <= made.tokens_per_rank
    return made.summary["lower_bound_s"] / made.summary["makespan_s"]


@pytest.mark.parametrize("preset", ["github", "byted"])
@pytest.mark.parametrize("tokens_per_rank", [8192, 32768])
def test_few_ranks(preset: str, tokens_per_rank: int) -> None:
    batches = [batch(preset, 64, tokens_per_rank, seed) for seed in range(20, 28)]
    shares = [share(plan(b, ranks=64, tokens_per_rank=tokens_per_rank)) for b in batches]
    assert np.mean(shares) >= 0.99
    assert min(shares) >= 0.98


@pytest.mark.parametrize("preset", ["github", "byted"])
@pytest.mark.parametrize("tokens_per_rank", [8192, 32768])
@pytest.mark.parametrize("ranks", [256, 1024, *VERY_MANY])
def test_many_ranks(preset: str, ranks: int, tokens_per_rank: int) -> None:
    for seed in (20, 21) if ranks <= 1024 else (20,):
        lengths = batch(preset, ranks, tokens_per_rank, seed)
        assert share(plan(lengths, ranks=ranks, tokens_per_rank=tokens_per_rank)) >= 0.98


@pytest.mark.parametrize(
    ("latencies", "wanted"), [((15, 25, 10), 0.985), ((30, 50, 30), 0.97)], ids=str
)
@pytest.mark.parametrize("preset", ["github", "byted"])
@pytest.mark.parametrize("tokens_per_rank", [8192, 32768])
@pytest.mark.parametrize("ranks", [64, 1024])
def test_hops_and_blocks_that_the_planner_knows(
    latencies: tuple[int, ...], wanted: float, preset: str, tokens_per_rank: int, ranks: int
) -> None:
    """Latencies in us a layer: of a hop in a node, of one between nodes, of a block."""
    names = ("intra_node_hop_s", "inter_node_hop_s", "block_s")
    seconds = {name: 1e-6 * value for name, value in zip(names, latencies, strict=True)}
    cost = dataclasses.replace(LLAMA_7B, **seconds)
    lengths = batch(preset, ranks, tokens_per_rank, 0)
    arguments = {"ranks": ranks, "tokens_per_rank": tokens_per_rank}
    made = plan(lengths, cost_model=cost, **arguments)
    assert share(made) >= wanted
    blind = evaluate(plan(lengths, **arguments), cost)
    assert blind.makespan_s >= made.summary["makespan_s"]
    if tokens_per_rank == 8192 and ranks == 1024:
        assert blind.lower_bound_s / blind.makespan_s < 0.985  # what knowing them is worth


def test_the_papers_case_study() -> None:
    lengths = preset_lengths("byted", num_tokens=32 * 2**20, max_length=LONGEST, seed=20)
    assert share(plan(lengths, ranks=512, tokens_per_rank=8192)) >= 0.97


@pytest.mark.parametrize("preset", ["github", "byted"])
def test_a_rank_at_half_speed(preset: str) -> None:
    for seed in range(20, 26):
        lengths = batch(preset, 64, 8192, seed)
        arguments = {"ranks": 64, "tokens_per_rank": 8192, "rank_speeds": SLOW_RANK}
        made = plan(lengths, **arguments)
        proven = tight_bound_s(lengths, **arguments)  # some sequences fit on all ranks only
        assert proven / made.summary["makespan_s"] >= 0.96
        assert share(plan(lengths, offload="auto", **arguments)) >= 0.96


def test_more_effort_never_ends_later() -> None:
    for seed in (20, 21, 22):
        lengths = batch("byted", 61, 8192, seed)
        makespans = [
            plan(lengths, ranks=61, tokens_per_rank=8192, effort=effort).summary["makespan_s"]
            for effort in (1, 20)
        ]
        assert makespans[1] <= makespans[0] * 1.002  # the tolerance for leaner plans
