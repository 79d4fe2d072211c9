"""Several steps of several strategies: medians, speed-ups, reasons, the same every time."""

import resource
import statistics
import sys
import time
from dataclasses import replace

import numpy as np
import pytest

from megatron_hdp.data.presets import preset_lengths
from megatron_hdp.planner import LLAMA_7B, plan
from megatron_hdp.planner.pipeline import Pipeline
from megatron_hdp.simulator.execution import (
    REPORT_KEYS,
    Disturbance,
    Machine,
    Setting,
    simulate,
)


def flops_of(lengths: np.ndarray) -> float:
    tokens = lengths.astype(np.float64)
    return float(6 * 7e9 * tokens.sum() + 6 * 32 * 4096 * (tokens**2).sum())


SETTING = Setting(
    ranks=16,
    tokens_per_rank=4096,
    cost_model=LLAMA_7B,
    num_gpus=32,
    max_length=65536,
    machine=Machine(gradient_bytes=(1e9,), peak_flops_per_s=1e15),
    flops_of=flops_of,
    disturbance=Disturbance(noise=0.05, slow={3: 0.5}, seed=7),
)


def batches(steps: int, ranks: int = 16, tokens: int = 4096) -> list[np.ndarray]:
    room = ranks * tokens
    longest = min(room, 2**21)
    return [
        preset_lengths("byted", num_tokens=4 * room, max_length=longest, seed=seed)
        for seed in range(steps)
    ]


def test_figures_are_medians_and_the_mesh_is_always_there() -> None:
    drawn = batches(3)
    run = simulate(SETTING, drawn, ["auto", "naive"])
    assert list(run.outcomes) == ["static", "auto", "naive"]
    found = run.figures("auto")
    assert list(found) == list(REPORT_KEYS)
    assert found["planned_by"] == "dp-balance"
    times = [step["step_s"] for step in found["steps"]]
    assert found["step_time_s"] == statistics.median(times) != times[0]
    assert found["speedup"] == run.figures("static")["step_time_s"] / found["step_time_s"]
    assert run.figures("static")["speedup"] == 1.0
    pairs = [*zip(drawn, times, strict=True)]
    shares = [flops_of(lengths) / (32 * step_s * 1e15) for lengths, step_s in pairs]
    assert found["mfu"] == pytest.approx(statistics.median(shares))
    speeds = [one.sum() / step_s for one, step_s in pairs]
    assert found["tokens_per_s"] == pytest.approx(statistics.median(speeds))
    first = run.outcomes["auto"].first
    assert first is not None and first.step_s == times[0]


def test_plans_are_those_of_training() -> None:
    (lengths,) = batches(1)
    setting = replace(SETTING, pipeline=Pipeline(4), offload="auto", slice_multiple=16)
    given = {"ranks": 16, "tokens_per_rank": 4096, "max_length": 65536}
    given |= {"slice_multiple": 16, "cost_model": LLAMA_7B, "offload": "auto"}
    for name, others in (
        ("auto", {"strategy": "pp-balance", "pipeline_stages": 4}),
        ("static", {"strategy": "static", "pipeline_stages": 4}),
        ("naive", {"strategy": "naive"}),  # it knows nothing of positions: padding aligns it
    ):
        expected = plan(lengths, **given, **others)
        assert setting.planned(lengths, name).fingerprint() == expected.fingerprint()
    virtual = replace(setting, pipeline=Pipeline(4, 2))
    others = {"strategy": "pp-balance", "pipeline_stages": 4, "virtual_stages": 2}
    expected = plan(lengths, **given, **others)
    assert virtual.planned(lengths, "auto").fingerprint() == expected.fingerprint()
    run = virtual.executed(expected)
    assert run.pipeline.chunks == 2 and len(run.forward_start_s) == 8
    experts = replace(SETTING, lockstep_ranks=4)
    assert experts.planned(lengths, "auto").strategy == "ep-balance"
    assert SETTING.planned(lengths, "auto").strategy == "dp-balance"


def test_other_strategies_change_nothing() -> None:
    drawn = batches(2)
    alone = simulate(SETTING, drawn, ["auto"])
    beside = simulate(SETTING, drawn, ["naive", "bytescale", "auto"])
    assert alone.figures("auto") == beside.figures("auto")
    noisy = replace(SETTING, disturbance=Disturbance(noise=0.05, seed=8))
    other = simulate(noisy, drawn, ["auto"])
    assert other.figures("auto") != alone.figures("auto")


def test_a_strategy_without_a_plan_has_a_reason() -> None:
    # 24 ranks hold 24 x 4,096 tokens, but no power of two of them does
    setting = Setting(ranks=24, tokens_per_rank=4096, cost_model=LLAMA_7B, max_length=24 * 4096)
    run = simulate(setting, [np.array([24 * 4096, 5])], ["dynamic-cp", "auto"])
    found = run.figures("dynamic-cp")
    assert "step 1: " in found["reason"]
    assert found["steps"] == []
    nothing = ("step_time_s", "tokens_per_s", "bubble_share", "ring_bytes", "mfu", "speedup")
    assert [found[name] for name in nothing] == [None] * 6
    assert run.figures("auto")["reason"] is None


def test_a_slow_rank_that_is_none_is_a_mistake_not_a_reason() -> None:
    setting = Setting(
        ranks=2, tokens_per_rank=64, cost_model=LLAMA_7B, disturbance=Disturbance(slow={2: 0.5})
    )
    with pytest.raises(ValueError, match="slow rank is 2; expected 0 to 1"):
        simulate(setting, [np.array([5, 6])], ["auto"])


def executed(ranks: int, pipeline: Pipeline, strategy: str) -> None:
    setting = Setting(
        ranks=ranks,
        tokens_per_rank=8192,
        cost_model=LLAMA_7B,
        pipeline=pipeline,
        max_length=2**21,
        machine=Machine(gradient_bytes=(1e9,), overlaps_sync=True, gradient_buckets=7),
        disturbance=Disturbance(noise=0.05),
    )
    (lengths,) = batches(1, ranks, 8192)
    execution = setting.executed(setting.planned(lengths, strategy))
    assert execution.record.num_tokens == 4 * ranks * 8192


@pytest.mark.parametrize("pipeline", [Pipeline(), Pipeline(4, 4)], ids=str)
def test_a_thousand_ranks(pipeline: Pipeline) -> None:
    executed(1024, pipeline, "auto")


@pytest.mark.slow
@pytest.mark.parametrize("pipeline", [Pipeline(), Pipeline(8), Pipeline(8, 4)], ids=str)
@pytest.mark.parametrize("strategy", ["static", "naive", "bytescale", "auto"])
def test_sixteen_thousand_ranks_take_a_minute_at_most(pipeline: Pipeline, strategy: str) -> None:
    began = time.process_time()
    executed(16384, pipeline, strategy)
    assert time.process_time() - began < 60.0
    if sys.platform == "linux":
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 < 4e9
