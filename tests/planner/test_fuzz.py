"""Whatever the arguments: a plan that obeys the rules, or a ValueError that shows the culprit."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from megatron_hdp.planner import CostModel, plan
from megatron_hdp.planner.extension import _core
from megatron_hdp.planner.problem import Problem
from tests.planner.problems import EXECUTED_STRATEGIES, repeatable
from tests.planner.test_binding import COST_MODEL, PROBLEM, core_of

fuzzily = repeatable(150)

CORE = PROBLEM | COST_MODEL
INTEGERS = [name for name, value in CORE.items() if type(value) is int]
NUMBERS = [name for name, value in CORE.items() if type(value) is float]

around_a_limit = st.builds(
    lambda power, off, sign: max(-(2**63), min(2**63 - 1, sign * (2**power + off))),
    st.sampled_from([0, 1, 15, 31, 32, 40, 41, 62, 63]),
    st.integers(-2, 2),
    st.sampled_from([1, 1, -1]),
)
whole = st.one_of(st.integers(-3, 300), around_a_limit)
real = st.one_of(
    st.floats(),
    st.sampled_from([0.0, -0.0, -1.0, 1e-320, 1e-30, 1e-9, 1.0, 1e30, 1.1e30, 1e308, math.inf]),
)


def shows(error: Exception, values: list[Any]) -> bool:
    """Whether the message has one of the values, as the planner or Python writes it."""
    text = str(error).replace(",", "")
    written = {f"{v:g}" for v in values if isinstance(v, float)} | {str(v) for v in values}
    return any(value in text for value in written)


@pytest.mark.parametrize("strategy", EXECUTED_STRATEGIES)
@fuzzily
@given(
    integers=st.dictionaries(st.sampled_from(INTEGERS), whole, max_size=3),
    numbers=st.dictionaries(st.sampled_from(NUMBERS), real, max_size=3),
    lengths=st.lists(whole, max_size=8),
    speeds=st.lists(real, max_size=4),
    offload=st.booleans(),
)
def test_the_extension_plans_or_shows_the_culprit(
    strategy: str,
    integers: dict[str, int],
    numbers: dict[str, float],
    lengths: list[int],
    speeds: list[float],
    offload: bool,
) -> None:
    assume(integers.get("pipeline_stages", 1) in (1, 0) or integers["pipeline_stages"] > 1024)
    ranks = integers.get("num_ranks", 2)
    assume(ranks <= 300 or ranks > 2**20)
    core = core_of(
        **integers | numbers,
        offload=offload,
        lengths=np.array(lengths, dtype=np.int64),
        rank_speeds=np.array(speeds, dtype=np.float64),
    )
    try:
        answer = _core.plan(core, strategy)
    except ValueError as error:
        values = [*integers.values(), *numbers.values(), *lengths, *speeds]
        values += [len(lengths), len(speeds), 20]  # the longest there may be
        assert shows(error, values), error
        return
    assert sorted([*answer["sequences"], *answer["local_sequences"]]) == list(range(len(lengths)))
    for figure in ("makespan_s", "lower_bound_s", "perfect_s", "ring_tokens"):
        assert math.isfinite(answer[figure])  # type: ignore[literal-required]
        assert answer[figure] >= 0  # type: ignore[literal-required]


WRONG_TYPES: list[Any] = [None, "8", "", b"8", True, False, 2.5, math.nan, math.inf, [], {}, [8]]
WRONG_TYPES += [object(), 1j, np.array([1, 2]), 2**64, -(2**64), 10**400, -1, 0]
ARGUMENTS = ("ranks", "tokens_per_rank", "slice_multiple", "pipeline_stages", "effort", "strategy")
ARGUMENTS += ("expert_parallel_size", "offload", "max_length", "ranks_per_node", "cost_model")
WRONG = [(name, value) for name in ARGUMENTS for value in WRONG_TYPES]
WRONG += [
    (name, value)
    for name in ("lengths", "rank_speeds")
    for value in WRONG_TYPES
    if not isinstance(value, list | np.ndarray)
]
MAY_BE_NONE = ("max_length", "ranks_per_node", "cost_model", "rank_speeds")


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, value in WRONG if value is not None or name not in MAY_BE_NONE],
    ids=lambda part: repr(part)[:20],
)
def test_wrong_types_are_value_errors(name: str, value: Any) -> None:
    arguments = {"lengths": [5], "ranks": 2, "tokens_per_rank": 10, "strategy": "naive"}
    with pytest.raises(ValueError, match=name.replace("_", "[_ ]")):
        plan(**arguments | {name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "speeds", [[None, 1.0], ["1", "fast"], [True, 1.0], [1.0, math.nan], [1.0, 0.0], [1.0, 10**400]]
)
def test_wrong_speeds_are_named(speeds: list[Any]) -> None:
    with pytest.raises(ValueError, match=r"speed of rank [01] is "):
        plan([5], ranks=2, tokens_per_rank=10, rank_speeds=speeds)


@pytest.mark.parametrize(
    "speeds",
    [np.ones(3), np.ones((2, 1)), np.ones(2, np.float32), np.ones(2, np.int64), np.array(1.0)],
    ids=lambda speeds: f"{speeds.dtype}{speeds.shape}",
)
def test_the_extension_refuses_speeds_of_another_shape(speeds: np.ndarray[Any, Any]) -> None:
    found = f"{len(speeds)} entries" if speeds.shape == (3,) else f"dtype {speeds.dtype}"
    with pytest.raises(ValueError, match=f"rank.speeds has {found}"):
        _core.plan(core_of(rank_speeds=speeds), "dp-balance")


@pytest.mark.parametrize("strategy", EXECUTED_STRATEGIES)
@pytest.mark.parametrize("length", [2**31 - 1, 2**31, 2**32 + 1, 2**39 + 1, 2**40])
def test_tokens_beyond_32_bits(strategy: str, length: int) -> None:
    lengths = np.array([length] * 200 + [1] * 10)
    result = plan(lengths, ranks=48, tokens_per_rank=2**37, slice_multiple=128, strategy=strategy)
    result.validate()
    assert result.summary["ring_tokens"] >= 0
    assert result.summary["max_tokens_on_a_rank"] >= min(length // 48, 2**36)
    assert result.summary["makespan_s"] >= result.summary["lower_bound_s"] * (1 - 1e-9)


at_least_1 = whole.filter(lambda value: value >= 1)


@fuzzily
@given(
    length=st.integers(1, 2**40),
    arguments=st.fixed_dictionaries(
        {
            "ranks": st.integers(1, 3000),
            "tokens_per_rank": at_least_1,
            "slice_multiple": at_least_1,
            "offload": st.sampled_from(["auto", "off"]),
        }
    ),
    layers=st.integers(1, 2**20),
)
@example(
    2**40,
    {"ranks": 3000, "tokens_per_rank": 2**40, "slice_multiple": 2**40, "offload": "auto"},
    2**20,
)
def test_least_degrees_do_not_overflow(length: int, arguments: dict[str, Any], layers: int) -> None:
    model = CostModel(
        a=0.0, b=1.0, kv_bytes_per_token=1.0, activation_bytes_per_token=1.0, num_layers=layers
    )
    try:
        result = plan([length], cost_model=model, strategy="naive", **arguments)
    except ValueError as error:
        assert shows(error, [length, *arguments.values()])
    else:
        result.validate(num_layers=layers)


def test_a_problem_can_be_planned_again() -> None:
    core = Problem.of([20, 5, 5], ranks=2, tokens_per_rank=10).core
    first, second = (_core.plan(core, "dp-balance") for _ in range(2))
    assert np.array_equal(first["sequences"], second["sequences"])
