"""Parts of a step: they add up, and each is the record's own."""

import dataclasses

import pytest

from megatron_hdp.planner.pipeline import Pipeline
from megatron_hdp.simulator.execution import Disturbance
from megatron_hdp.simulator.report.figures import PARTS, mean_parts, parts_of
from tests.simulator.execution.test_run import batches
from tests.simulator.report.runs import run_of, setting_of


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
