"""Random planning problems that have an answer, and a plan small enough to check by hand."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st

from megatron_hdp.planner import LLAMA_7B, CostModel, Figures, Plan, plan, tight_bound_s
from tests.support.examples import some
from tests.support.random_plans import random_plan


def repeatable(examples: int) -> settings:
    """Settings of a property's test: the same examples in every run, however long each takes."""
    return settings(max_examples=some(examples), derandomize=True)


EXECUTED_STRATEGIES = ("static", "naive", "bytescale", "dp-balance")


def _model(
    a: float,
    b: float,
    *,
    kv: float = 1.0,
    links: tuple[float, float] = (300e9, 50e9),
    node: int = 8,
    **others: Any,
) -> CostModel:
    """One with `kv` bytes a token, and `links` within and between nodes of so many ranks."""
    named = dict(zip(("intra_node_bytes_per_s", "inter_node_bytes_per_s"), links, strict=True))
    return CostModel(a=a, b=b, kv_bytes_per_token=kv, ranks_per_node=node, **named, **others)


_WINDOW = ((10, 0.0005), (20, 0.002), (40, 0.008), (80, 0.024))  # attention of 40 before each
_CONCAVE = ((8, 0.08), (64, 0.2), (500, 0.4), (501, 0.4))  # more for a token of a short sequence
_HALF = {"window_tokens": 20, "window_share": 0.5, "halo_bytes": 20.0}  # a halo takes 0.02 s
_HOPS = {"intra_node_hop_s": 0.05, "inter_node_hop_s": 0.15}  # in each of three layers
_BLOCKS = {"block_s": 0.02, "merge_b": 1e-3}  # a block takes as long as some 100 tokens
_SLOW_NODE = {"intra_node_hop_s": 0.02, "inter_node_hop_s": 0.01}
COST_MODELS = {
    "record": LLAMA_7B,
    "launch-bound": _model(1e-6, 1e-3, g=1.0),
    "network-bound": _model(1e-6, 1e-6, kv=1e6, links=(1e6, 5e5), node=4),
    "linear": _model(0.0, 1e-3, kv=0.0, node=3, g=1e-2),
    "attention": _model(1e-3, 0.0, links=(300e9, 1e3), node=1),
    "free": _model(0.0, 0.0, kv=0.0),
    "window": _model(0.0, 1e-4, links=(300e9, 1e4), node=4, attention_points=_WINDOW),
    "alternating": _model(1e-4, 1e-4, links=(1e4, 1e3), node=3, g=1e-3, **_HALF),
    "concave": _model(0.0, 1e-4, links=(2e3, 1e3), node=3, g=1e-3, attention_points=_CONCAVE),
    "latency": _model(1e-4, 1e-3, links=(1e4, 2e3), node=4, num_layers=3, **_HOPS),
    "blocks": _model(
        *(1e-5, 1e-3),
        links=(300e9, 1e4),
        node=4,
        num_layers=4,
        attention_b=1e-3,
        b_experts=5e-4,
        **_BLOCKS,
    ),
    "latency, blocks": _model(  # a node's links are the slower ones
        *(0.0, 1e-4),
        links=(2e2, 1e3),
        node=3,
        num_layers=2,
        g=1e-2,
        attention_b=1e-2,
        block_s=5e-3,
        merge_b=2e-3,
        **_SLOW_NODE,
    ),
    "double rings": _model(
        *(1e-4, 1e-4), links=(5e3, 1e3), node=2, num_layers=3, double_rings=True, **_HOPS
    ),
    "made heads": _model(
        *(1e-4, 1e-4),
        links=(1e5, 2e4),
        node=2,
        merge_b=3e-3,
        projection_b=2e-3,
        made_bytes_per_token=40.0,
    ),
    "wide nodes": _model(1e-4, 1e-4, links=(3e3, 1e3), node=4, double_rings=True),
    "fast host": _model(
        1e-6, 1e-3, num_layers=12, activation_bytes_per_token=1.0, host_bytes_per_s=1e6
    ),
    "slow host": _model(  # half of the tokens reach it in a third of 1 ms a token
        0.0, 1e-3, num_layers=5, g=1e-3, activation_bytes_per_token=2.0, host_bytes_per_s=3e3
    ),
}


@dataclass(frozen=True)
class Problem:
    lengths: tuple[int, ...]
    ranks: int
    tokens_per_rank: int
    slice_multiple: int
    cost_model: str
    speeds: tuple[float, ...] = ()
    effort: int = 1
    offload: str = "off"

    @property
    def model(self) -> CostModel:
        """The cost model with the ranks' speeds."""
        return dataclasses.replace(COST_MODELS[self.cost_model], rank_speeds=self.speeds)

    @property
    def arguments(self) -> dict[str, Any]:
        """Those of ``plan`` but for the lengths."""
        names = ("ranks", "tokens_per_rank", "slice_multiple", "effort", "offload")
        return {"cost_model": self.model} | {name: getattr(self, name) for name in names}

    def plan(self, strategy: str, **others: Any) -> Plan:
        return plan(self.lengths, strategy=strategy, **self.arguments | others)

    def random_plan(self, seed: int) -> Plan:
        """Several sequences to a ring, any degree, locals: what proofs must hold for."""
        return random_plan(
            self.lengths,
            ranks=self.ranks,
            tokens_per_rank=self.tokens_per_rank,
            slice_multiple=self.slice_multiple,
            seed=seed,
        )

    @property
    def proven_s(self) -> float:
        """Seconds that every plan takes."""
        return tight_bound_s(self.lengths, **self.arguments)


def longest_that_fits(ranks: int, tokens_per_rank: int, slice_multiple: int) -> int:
    whole = tokens_per_rank // slice_multiple * slice_multiple
    chunk = tokens_per_rank // 2 // slice_multiple * slice_multiple
    return max(whole, 2 * ranks * chunk if ranks > 1 else 0)


def batches(longest: int, ranks: int, tokens_per_rank: int) -> st.SearchStrategy[list[int]]:
    """Lengths of 1 to `longest`: any, short, just above k x C, geometric, one giant, all equal."""
    any_length = st.integers(1, longest)
    short = st.integers(1, min(longest, tokens_per_rank))
    just_above = st.builds(
        lambda k, extra: min(longest, k * tokens_per_rank + extra),
        st.integers(1, max(1, ranks - 1)),
        st.integers(1, 2),
    )
    geometric = st.builds(
        lambda first, ratio, count: [max(1, int(first * ratio**i)) for i in range(count)],
        any_length,
        st.floats(0.3, 0.97),
        st.integers(1, 40),
    )
    return st.one_of(
        st.lists(any_length, min_size=1, max_size=40),
        st.lists(short, min_size=1, max_size=60),
        st.builds(lambda length, count: [length] * count, any_length, st.integers(1, 30)),
        st.builds(lambda rest: [longest, *rest], st.lists(short, max_size=40)),
        st.builds(lambda rest: [longest, *rest], st.just([1] * 50)),
        st.lists(just_above, min_size=1, max_size=20),
        geometric,
    )


def rank_speeds(ranks: int) -> st.SearchStrategy[tuple[float, ...]]:
    """All alike, one slow, two kinds, or any."""
    one_slow = st.builds(
        lambda rank, speed: tuple(speed if r == rank else 1.0 for r in range(ranks)),
        st.integers(0, ranks - 1),
        st.sampled_from([0.01, 0.5, 0.9]),
    )
    kinds = st.lists(st.sampled_from([0.5, 1.0]), min_size=ranks, max_size=ranks)
    any_speed = st.lists(st.floats(0.1, 4.0), min_size=ranks, max_size=ranks)
    return st.one_of(st.just(()), one_slow, kinds.map(tuple), any_speed.map(tuple))


@st.composite
def problems(draw: st.DrawFn, *, offload: bool = False) -> Problem:
    """Problems that every strategy can plan; with `offload`, they may use host memory."""
    ranks = draw(
        st.sampled_from([1, 2, 3, 4, 5, 7, 8, 13, 16, 24, 61, 64, 67]) | st.integers(1, 70)
    )
    slice_multiple = draw(st.integers(1, 4))
    tokens_per_rank = draw(st.integers(slice_multiple, 300))
    longest = longest_that_fits(ranks, tokens_per_rank, slice_multiple)
    return Problem(
        lengths=tuple(draw(batches(longest, ranks, tokens_per_rank))),
        ranks=ranks,
        tokens_per_rank=tokens_per_rank,
        slice_multiple=slice_multiple,
        cost_model=draw(st.sampled_from(sorted(COST_MODELS))),
        speeds=draw(rank_speeds(ranks)),
        effort=draw(st.sampled_from([1, 1, 10])),
        offload="auto" if offload else "off",
    )


def fixed_problems() -> list[Problem]:
    """A fixed list that has everything in it, for tests that compare plans."""
    lengths = tuple(1 + (i * i * 7919) % 701 for i in range(200))
    speeds = tuple(1.0 if rank % 5 else 0.5 for rank in range(13))
    return [
        Problem(lengths, 13, 101, multiple, cost_model, of_ranks, effort)
        for cost_model in COST_MODELS
        for of_ranks in ((), speeds)
        for multiple, effort in ((1, 1), (2, 5))
    ]


def small_plan(**changes: object) -> Plan:
    """Four ranks of 10 tokens: a ring of three with a local sequence, then two single ranks."""
    fields: dict[str, object] = {
        "num_ranks": 4,
        "tokens_per_rank": 10,
        "strategy": "naive",
        "lengths": [24, 2, 9, 4, 5],
        "rank_offsets": [0, 3, 4, 5],
        "ranks": [0, 1, 2, 3, 0],
        "sequence_offsets": [0, 1, 2, 4],
        "sequences": [0, 2, 3, 4],
        "local_offsets": [0, 1, 1, 1],
        "local_sequences": [1],
        "local_ranks": [2],
        "offload_ratios": [0.0, 0.0, 0.0],
    }
    return Plan(**(fields | changes))  # type: ignore[arg-type]


def rings_of(
    rings: Sequence[Sequence[int]],
    lengths: Sequence[int] | None = None,
    ratios: Sequence[float] | None = None,
    sequences: Sequence[Sequence[int]] | None = None,
    **changes: Any,
) -> Plan:
    """A plan whose micro-batch m has these sequences on ring m, or its own one."""
    count = len(rings)
    ranks = [rank for ring in rings for rank in ring]
    shared = [[m] for m in range(count)] if sequences is None else sequences
    fields: dict[str, Any] = {
        "num_ranks": max(ranks) + 1,
        "tokens_per_rank": 10**6,
        "strategy": "naive",
        "lengths": [1] * count if lengths is None else lengths,
        "rank_offsets": np.cumsum([0, *map(len, rings)]),
        "ranks": ranks,
        "sequence_offsets": np.cumsum([0, *map(len, shared)]),
        "sequences": [one for of_ring in shared for one in of_ring],
        "local_offsets": np.zeros(count + 1),
        "local_sequences": [],
        "local_ranks": [],
        "offload_ratios": ratios or [0.0] * count,
    }
    return Plan(**(fields | changes))


def rings(plan: Plan) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Ranks and sequences of each micro-batch."""
    batches = [plan.micro_batch(m) for m in range(plan.num_micro_batches)]
    return [(batch.ranks, batch.sequences) for batch in batches]


def agree(made: Plan, result: Figures) -> None:
    """The planner's figures are the evaluator's, which are not below the bound."""
    for name in ("makespan_s", "lower_bound_s", "efficiency"):
        assert made.summary[name] == pytest.approx(getattr(result, name), rel=1e-9), name
    assert result.lower_bound_s <= result.makespan_s * (1 + 1e-9)
