"""Parts of a step add up, and what a report says in words."""

import dataclasses

import pytest

from megatron_hdp.planner.pipeline import Pipeline
from megatron_hdp.simulator.execution import Disturbance, Run
from megatron_hdp.simulator.report import COLUMNS, cells
from megatron_hdp.simulator.report.figures import (
    PARTS,
    candidate,
    headline,
    mean_parts,
    parts_of,
    warnings,
)
from megatron_hdp.simulator.units import num_bytes, seconds
from tests.simulator.execution.test_run import batches
from tests.simulator.report.runs import SUBJECT, run_of, run_without_a_mesh, setting_of


def only(run: Run, *names: str) -> Run:
    return dataclasses.replace(run, outcomes={name: run.outcomes[name] for name in names})


def test_the_sentence_is_about_auto_or_the_fastest() -> None:
    run = run_of("naive", "bytescale", "auto")
    assert candidate(run) == "auto"
    found = run.figures("auto")
    mesh = run.figures("static")
    assert headline(run) == (
        f"auto trains {found['speedup']:.2f} times as fast as the static mesh on this "
        f"configuration; of a step, {found['bubble_share']:.1%} is waiting instead of "
        f"{mesh['bubble_share']:.1%}."
    )
    others = only(run, "static", "naive", "bytescale")
    times = {name: run.outcomes[name].step_time_s or 0.0 for name in ("naive", "bytescale")}
    assert candidate(others) == min(times, key=lambda name: times[name])
    assert headline(only(run, "static")).startswith("The static mesh alone has a plan: a step")


def test_without_plans() -> None:
    run = run_without_a_mesh()
    assert run.outcomes["dynamic-cp"].reason
    assert cells(run, "dynamic-cp") == ("dynamic-cp", *["-"] * (len(COLUMNS) - 1))
    (no_plan, *_) = warnings(run, SUBJECT)
    assert no_plan == f"dynamic-cp has no plan: {run.outcomes['dynamic-cp'].reason}"
    nothing = {
        name: dataclasses.replace(one, steps=(), first=None, reason="none")
        for name, one in run.outcomes.items()
    }
    assert headline(dataclasses.replace(run, outcomes=nothing)) == (
        "No strategy has a plan on this configuration."
    )
    no_mesh = {**run.outcomes, "static": nothing["static"]}
    assert headline(dataclasses.replace(run, outcomes=no_mesh)).startswith(
        "The static mesh has no plan on this configuration; auto has one: a step takes"
    )


@pytest.mark.parametrize("too_small", [True, False])
def test_too_little_memory_is_said(too_small: bool) -> None:
    run = only(run_of("auto", steps=1), "static", "auto")
    peaks = [one.peak_memory_bytes or 0.0 for one in run.outcomes.values()]
    limit = min(peaks) - 1 if too_small else max(peaks)
    found = warnings(run, dataclasses.replace(SUBJECT, gpu_memory_bytes=limit, cost_model="c"))
    assert len(found) == (2 if too_small else 0)
    assert all(num_bytes(limit) in text and "out of memory" in text for text in found)
    assert warnings(run, dataclasses.replace(SUBJECT, gpu_memory_bytes=None)) == [
        "The cost model is assumed from the model's shape, not measured: see what was assumed."
    ]


@pytest.mark.parametrize("stages", [1, 2])
def test_parts_add_up_to_the_step(stages: int) -> None:
    run = run_of("naive", "auto", pipeline=Pipeline(stages), job=None)
    for name, outcome in run.outcomes.items():
        for record in outcome.steps:
            parts = parts_of(record)
            assert list(parts) == list(PARTS)
            assert sum(parts.values()) == pytest.approx(record.step_s, rel=1e-12), name
            assert min(parts.values()) >= 0
            assert parts["compute"] > 0 and parts["gradient sync"] > 0
        means = mean_parts(outcome.steps)
        mean_step = sum(record.step_s for record in outcome.steps) / len(outcome.steps)
        assert sum(means.values()) == pytest.approx(mean_step, rel=1e-12)


def test_each_part_is_named_right() -> None:
    record = run_of("auto").outcomes["auto"].steps[0]
    fields = "ring_exposed_s, copies_s, waiting_s, sync_s, optimizer_s, gather_s, loading_s"
    names = zip([*PARTS][1:], fields.split(", "), strict=True)
    for number, (part, field) in enumerate(names):
        changed = dataclasses.replace(record, **{field: 1000.0 + number})
        assert parts_of(changed)[part] == 1000.0 + number
        if number < 3:  # of the makespan: the rest of it is compute
            assert sum(parts_of(changed).values()) == pytest.approx(record.step_s)


def test_without_noise_compute_is_what_the_cost_model_says() -> None:
    setting = setting_of(disturbance=Disturbance())
    (lengths,) = batches(1)
    execution = setting.executed(setting.planned(lengths, "auto"))
    compute = parts_of(execution.record)["compute"]
    model = setting.cost_model
    needed = (model.a * (lengths.astype(float) ** 2).sum() + model.b * lengths.sum()) / 16
    assert compute == pytest.approx(needed, rel=0.02)


def test_a_duration_is_short() -> None:
    assert [seconds(s) for s in (0.0, 2.5e-4, 0.25, 8269.927)] == [
        *("0.000 us", "250.000 us", "250.000 ms", "8269.927 s")
    ]
    assert seconds(1.5e302) == "1.5e+302 s"
