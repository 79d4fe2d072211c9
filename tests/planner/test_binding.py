"""The extension refuses what numpy and Python can get wrong, without the checks of ``plan``."""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megatron_hdp import strategies
from megatron_hdp.planner import CostModel, Problem, evaluate, make_plan, plan
from megatron_hdp.planner.extension import _core


def fields_of(problem: Problem) -> dict[str, Any]:
    """What the extension is given of a problem, by name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_core, "Problem", dict)
        return dict(problem.core)  # type: ignore[call-overload]


SLOW_LINKS = dict.fromkeys(("intra_node_bytes_per_s", "inter_node_bytes_per_s"), 1.0)
PROBLEM = fields_of(
    Problem.of(
        [20, 5, 5],
        ranks=2,
        tokens_per_rank=10,
        cost_model=CostModel(
            a=1.0, b=1.0, kv_bytes_per_token=1.0, host_bytes_per_s=1.0, **SLOW_LINKS
        ),
    )
)
COST_MODEL = PROBLEM.pop("cost_model")


def core_of(**changes: Any) -> Any:
    """The planner's problem, with these fields of it or of its cost model."""
    cost_model = COST_MODEL | {name: changes.pop(name) for name in COST_MODEL if name in changes}
    return _core.Problem(**PROBLEM | {"cost_model": cost_model} | changes)


def call(strategy: str = "dp-balance", **changes: Any) -> dict[str, Any]:
    return dict(_core.plan(core_of(**changes), strategy))


# One in which every coefficient counts, each with a value of its own: a ring between nodes and
# one in a node, blocks, windows, activations that leave for the host.
LINKS = {"intra_node_bytes_per_s": 900.0, "inter_node_bytes_per_s": 500.0, "ranks_per_node": 4}
HOPS = {"intra_node_hop_s": 1.1e-3, "inter_node_hop_s": 2.3e-3, "block_s": 1e-3, "merge_b": 3e-5}
HOST = {"activation_bytes_per_token": 1.2, "host_bytes_per_s": 9e3, "num_layers": 6}
WINDOWS = {"window_tokens": 30, "window_share": 0.3, "halo_bytes": 5.0}
LINEAR = {"b": 7e-4, "attention_b": 2e-4, "b_experts": 4e-4, "g": 2e-3}
KEPT = {"input_share": 0.05, "projection_b": 2e-5, "sum_ratio": 1.7, "made_bytes_per_token": 0.9}
EVERY = CostModel(a=3e-6, kv_bytes_per_token=1.5, **LINEAR | LINKS | HOPS | HOST | WINDOWS | KEPT)
LENGTHS = [700, 300, 300, 130, *range(20, 90, 7)]


def answers(problem: Problem) -> list[tuple[float, ...]]:
    """What the planner says of a problem: the figures of some strategies, and of the bound."""
    found = []
    for strategy in ("naive", "static", "dynamic-cp", "ep-balance"):
        answer = _core.plan(problem.core, strategy)
        found.append((answer["makespan_s"], answer["lower_bound_s"], answer["perfect_s"]))
    return [*found, (_core.tight_bound_s(problem.core),)]


def every(offload: str = "auto", size: int = 2) -> Problem:
    return Problem.of(
        LENGTHS,
        ranks=8,
        tokens_per_rank=100,
        cost_model=EVERY,
        offload=offload,
        expert_parallel_size=size,
    )


def streaming(offload: str) -> float:
    """The time of a sequence that streams, with keys on the host or on the device."""
    cost_model = replace(EVERY, activation_bytes_per_token=50.0, host_bytes_per_s=600.0)
    how: Any = {"ranks": 3, "tokens_per_rank": 100, "cost_model": cost_model}
    problem = Problem.of([900], **how, offload=offload, streams=True)
    return float(_core.plan(problem.core, "dp-balance")["makespan_s"])


def figures() -> list[Any]:
    """With a batch of which a sequence fits only if it is recomputed, and with streams."""
    how: Any = {"ranks": 2, "tokens_per_rank": 100, "cost_model": EVERY, "recompute": "auto"}
    again = _core.plan(Problem.of(LENGTHS, **how).core, "dp-balance")["makespan_s"]
    streamed = [streaming("auto"), streaming("off")]
    return [answers(every()), answers(every("off", size=1)), streamed, again]


def swapping(plain: Any, first: str, second: str) -> Any:
    """The planner's problem, in which two coefficients change places on the way to C++."""

    def made(cost_model: dict[str, Any], **fields: Any) -> Any:
        kind, other = type(cost_model[first]), type(cost_model[second])
        changed = {first: kind(cost_model[second]), second: other(cost_model[first])}
        return plain(cost_model=cost_model | changed, **fields)

    return made


def test_two_swapped_coefficients_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = [name for name, value in COST_MODEL.items() if type(value) in (float, int)]
    plain, expected = _core.Problem, figures()
    for pair in itertools.combinations(numbers, 2):
        monkeypatch.setattr(_core, "Problem", swapping(plain, *pair))
        try:
            found = figures()
        except ValueError:  # the other's value is refused, or no sequence fits any more
            continue
        assert found != expected, pair


@pytest.mark.parametrize("strategy", ["naive", "static", "dynamic-cp", "dp-balance"])
@pytest.mark.parametrize("offload", ["auto", "off"])
def test_every_coefficient_means_the_same_on_either_side(strategy: str, offload: str) -> None:
    made = make_plan(every(offload, size=1), strategy)
    assert made.summary["makespan_s"] == pytest.approx(evaluate(made, EVERY).makespan_s, rel=1e-12)


@pytest.mark.parametrize("fields", [COST_MODEL, PROBLEM | {"cost_model": COST_MODEL}])
def test_a_missing_and_an_unknown_name_are_errors(fields: dict[str, Any]) -> None:
    def made(given: dict[str, Any]) -> Any:
        if "a" in fields:
            return _core.Problem(**PROBLEM | {"cost_model": given})
        return _core.Problem(**given)

    made(fields)
    for name in fields:
        with pytest.raises(ValueError, match=f"lacks {name}$"):
            made({key: value for key, value in fields.items() if key != name})
    with pytest.raises(ValueError, match="unknown field b$"):
        made(fields | {"b": 1.0})
    for name in ("effort", "a"):
        with pytest.raises(ValueError, match=f"{name} is 'x'; expected a"):
            core_of(**{name: "x"})


def test_the_table_of_strategies_is_that_of_cpp() -> None:
    assert tuple(one.name for one in strategies.STRATEGIES) == _core.STRATEGIES


@pytest.mark.parametrize("strategy", strategies.STRATEGIES, ids=lambda one: one.name)
def test_a_strategy_follows_speeds_or_does_not(strategy: strategies.Strategy) -> None:
    lengths = [9, 8, 8, 7, 7, 6, 5, 5, 4, 3, 3, 2] * 4
    given = {"ranks": 4, "tokens_per_rank": 20, "strategy": strategy.name}
    slow = plan(lengths, **given, rank_speeds=[1.0, 0.25, 1.0, 1.0])  # type: ignore[arg-type]
    even = plan(lengths, **given)  # type: ignore[arg-type]
    assert (slow.fingerprint() != even.fingerprint()) == strategy.follows_speeds


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"lengths": np.array([20.0])},
            "lengths has dtype float64 and 1 dimensions; expected int64",
        ),
        ({"lengths": np.array([20], dtype=np.int32)}, "lengths has dtype int32"),
        ({"lengths": np.array([[20]])}, "lengths has dtype int64 and 2 dimensions"),
        ({"lengths": np.array([], dtype=np.int64)}, "there are 0 sequences"),
        ({"lengths": np.array([20, -7])}, "length of sequence 1 of the batch is -7; expected 1 to"),
        ({"num_ranks": 0}, "number of ranks is 0; expected 1 to 1,048,576"),
        ({"num_ranks": -(2**63)}, "number of ranks is -9,223,372,036,854,775,808"),
        ({"tokens_per_rank": -1}, "tokens per rank is -1"),
        ({"slice_multiple": 2**62}, "slice multiple is 4,611,686,018,427,387,904"),
        (
            {"max_length": 0},
            "sequence 0 of the batch has 20 tokens, more than the context length 0",
        ),
        ({"max_length": 2**41}, "context length is 2,199,023,255,552; expected 1 to"),
        ({"a": float("nan")}, "cost model: a is nan; expected a finite number, 0 or 1e-30 to 1e"),
        ({"linear_s_per_token": -1.0}, r"cost model: b \+ b_experts is -1"),
        ({"g": float("inf")}, "cost model: g is inf"),
        (
            {"intra_node_bytes_per_s": 0.0},
            "intra_node_bytes_per_s is 0; expected a finite number, 1e-30",
        ),
        ({"ranks_per_node": 0}, "ranks_per_node is 0"),
        ({"attention_b": -1.0}, "cost model: attention_b is -1"),
        ({"window_tokens": -1}, "window_tokens is -1 and window_share 0"),
        ({"window_share": 1.5}, "window_tokens is 0 and window_share 1.5"),
        ({"block_all_layers_s": float("inf")}, "block_s of all layers is inf"),
        ({"intra_node_hop_all_layers_s": -1.0}, "intra_node_hop_s of all layers is -1"),
        ({"inter_node_hop_all_layers_s": float("nan")}, "inter_node_hop_s of all layers is nan"),
        ({"merge_b": -1.0}, "cost model: merge_b is -1"),
        (
            {"attention_lengths": np.array([5])},
            "attention_lengths has 1 entries and attention_seconds 0; expected as many of both",
        ),
        ({"attention_lengths": np.array([5.0])}, "attention_lengths has dtype float64"),
        ({"attention_seconds": np.array([[5.0]])}, "attention_seconds has dtype float64 and 2 dim"),
        (
            {"attention_lengths": np.array([5]), "attention_seconds": np.array([2.0])},
            "cost model: a is 1 beside attention_points; expected 0",
        ),
        (
            {"strategy": "auto"},
            "strategy is 'auto'; expected one of static, naive, .*, ep-balance",
        ),
    ],
)
def test_bad_arguments(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(**change)


def test_strided_and_big_endian_lengths() -> None:
    strided = np.array([20, 0, 5, 0, 5, 0])[::2]
    assert np.array_equal(call(lengths=strided)["sequences"], call()["sequences"])
    with pytest.raises(ValueError, match="lengths has dtype >i8"):
        call(lengths=np.array([20, 5], dtype=">i8"))
