"""Random planning problems that have an answer, and a plan small enough to check by hand."""

from dataclasses import dataclass

from hypothesis import strategies as st

from megatron_hdp.planner import LLAMA_7B, CostModel, Plan, plan

EXECUTED_STRATEGIES = ("static", "naive", "dp-balance")

COST_MODELS = {
    "record": LLAMA_7B,
    "launch-bound": CostModel(a=1e-6, b=1e-3, kv_bytes_per_token=1.0, g=1.0),
    "network-bound": CostModel(
        a=1e-6, b=1e-6, kv_bytes_per_token=1e6, intra_node_bytes_per_s=1e6, ranks_per_node=4
    ),
    "linear": CostModel(a=0.0, b=1e-3, kv_bytes_per_token=0.0, g=1e-2, ranks_per_node=3),
    "free": CostModel(a=0.0, b=0.0, kv_bytes_per_token=0.0),
}


@dataclass(frozen=True)
class Problem:
    lengths: tuple[int, ...]
    ranks: int
    tokens_per_rank: int
    slice_multiple: int
    cost_model: str

    def plan(self, strategy: str) -> Plan:
        return plan(
            self.lengths,
            ranks=self.ranks,
            tokens_per_rank=self.tokens_per_rank,
            slice_multiple=self.slice_multiple,
            cost_model=COST_MODELS[self.cost_model],
            strategy=strategy,
        )


def longest_that_fits(ranks: int, tokens_per_rank: int, slice_multiple: int) -> int:
    whole = tokens_per_rank // slice_multiple * slice_multiple
    chunk = tokens_per_rank // 2 // slice_multiple * slice_multiple
    return max(whole, 2 * ranks * chunk if ranks > 1 else 0)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    ranks = draw(
        st.sampled_from([1, 2, 3, 4, 5, 7, 8, 13, 16, 24, 61, 64, 67]) | st.integers(1, 70)
    )
    slice_multiple = draw(st.integers(1, 4))
    tokens_per_rank = draw(st.integers(slice_multiple, 300))
    longest = longest_that_fits(ranks, tokens_per_rank, slice_multiple)
    any_length = st.integers(1, longest)
    short = st.integers(1, min(longest, tokens_per_rank))
    just_above = st.builds(
        lambda k, extra: min(longest, k * tokens_per_rank + extra),
        st.integers(1, max(1, ranks - 1)),
        st.integers(1, 2),
    )
    lengths = draw(
        st.one_of(
            st.lists(any_length, min_size=1, max_size=40),
            st.lists(short, min_size=1, max_size=60),
            st.builds(lambda length, count: [length] * count, any_length, st.integers(1, 30)),
            st.builds(lambda rest: [longest, *rest], st.lists(short, max_size=40)),
            st.lists(just_above, min_size=1, max_size=20),
        )
    )
    return Problem(
        lengths=tuple(lengths),
        ranks=ranks,
        tokens_per_rank=tokens_per_rank,
        slice_multiple=slice_multiple,
        cost_model=draw(st.sampled_from(sorted(COST_MODELS))),
    )


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
