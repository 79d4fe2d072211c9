"""The planner as the scheduler of Megatron-LM's dynamic context parallelism."""

import dataclasses
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from megatron_hdp.megatron.dynamic_cp import RoundScheduler, install
from megatron_hdp.planner import LLAMA_7B

CAPACITY = 256


def lengths_of(count: int, longest: int, seed: int = 0) -> list[int]:
    drawn = np.random.default_rng(seed).lognormal(4, 1.2, count)
    return [int(length) for length in drawn.clip(1, longest)]


def keep_the_rules(rounds: list[list[list[int]]], samples: dict[int, int], least: int) -> None:
    """What Megatron-LM, and what builds on it, takes for granted."""
    ranks = len(rounds[0])
    seen: list[int] = []
    for one in rounds:
        assert len(one) == ranks
        begin = 0
        while begin < ranks:
            degree = next((i for i in range(begin, ranks) if one[i] != one[begin]), ranks) - begin
            assert degree >= least
            assert begin % degree == 0 or degree == ranks
            assert degree & (degree - 1) == 0 or degree == ranks
            assert one[begin]
            assert sum(samples[sample] for sample in one[begin]) <= CAPACITY * degree
            seen += one[begin]
            begin += degree
    assert sorted(seen) == sorted(samples)


@pytest.mark.parametrize("cp_size", [1, 2])
@pytest.mark.parametrize("dp_size", [1, 4, 16])
@pytest.mark.parametrize(("group", "least"), [(None, 1), (4, 1), (None, 2), (2, 4)])
def test_rounds_are_what_megatron_takes(
    cp_size: int, dp_size: int, group: int | None, least: int
) -> None:
    ranks = cp_size * dp_size
    if ranks % least:
        pytest.skip("refused")
    scheduler = RoundScheduler(CAPACITY, cp_size, dp_size, group, min_cp_size=least)
    samples = {7 * i + 3: n for i, n in enumerate(lengths_of(40 * ranks, CAPACITY * ranks))}
    rounds = scheduler.get_groups_and_subsamples(list(samples.items()))
    keep_the_rules(rounds, samples, least)
    assert len(rounds) % (group or 1) == 0


def test_a_cost_model_is_one_or_its_file(tmp_path: Path) -> None:
    linear = dataclasses.replace(LLAMA_7B, a=0.0)
    (tmp_path / "cost.json").write_bytes(linear.to_json())
    samples = list(enumerate(lengths_of(60, 4 * CAPACITY)))
    found = [
        RoundScheduler(CAPACITY, 1, 4, cost_model=cost).get_groups_and_subsamples(samples)
        for cost in (linear, tmp_path / "cost.json", None)
    ]
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_num_seqs": 3}, "max_num_seqs is 3; expected None"),
        ({"min_cp_size": 3}, "min_cp_size is 3 on 4 ranks; expected a power of two that divides"),
        ({"min_cp_size": 8}, "min_cp_size is 8 on 4 ranks"),
    ],
)
def test_what_it_does_not_do_it_refuses(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RoundScheduler(CAPACITY, 1, 4, **arguments)


def test_errors_name_what_megatron_names() -> None:
    scheduler = RoundScheduler(CAPACITY, 1, 4)
    with pytest.raises(ValueError, match="raise max_seqlen_per_dp_cp_rank or add ranks"):
        scheduler.get_groups_and_subsamples([(0, 5 * CAPACITY)])
    alone = RoundScheduler(CAPACITY, 1, 4, 2)
    with pytest.raises(ValueError, match="1 samples on 4 ranks make 1 rounds; expected a multiple"):
        alone.get_groups_and_subsamples([(0, 100)])


def test_megatron_runs_what_ours_schedules(monkeypatch: pytest.MonkeyPatch) -> None:
    class Theirs:
        def __init__(self, *args: Any, **options: Any) -> None:
            self.given = args, options

        def get_groups_and_subsamples(self, samples: Any) -> Any:
            raise AssertionError("theirs was asked")

        def run(self, samples: Any) -> Any:
            return self.get_groups_and_subsamples(samples)

    module: Any = ModuleType("megatron.core.datasets.data_schedule")
    module.DefaultDynamicCPScheduler, module.scheduler_map = Theirs, {"default_dynamic_cp": Theirs}
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr("megatron.core.datasets.data_schedule", module, raising=False)
    install()
    made = module.scheduler_map["default_dynamic_cp"](CAPACITY, 1, 4, None, min_cp_size=2)
    assert isinstance(made, Theirs)
    assert module.DefaultDynamicCPScheduler is type(made)
    assert made.given == ((CAPACITY, 1, 4, None), {"min_cp_size": 2})
    samples = dict(enumerate(lengths_of(50, 4 * CAPACITY)))
    keep_the_rules(made.run(list(samples.items())), samples, 2)


def test_a_megatron_without_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("megatron.core.datasets.data_schedule")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr("megatron.core.datasets.data_schedule", module, raising=False)
    with pytest.raises(RuntimeError, match=r"no DefaultDynamicCPScheduler: expected .*dev branch"):
        install()
