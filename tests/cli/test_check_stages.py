"""``megatron-hdp check`` with pipeline stages: each one is added up, equal or not."""

import pytest

from megatron_hdp.cli.checking import as_json, as_text, cost_model_of, job_of
from megatron_hdp.planner import CostModel
from tests.cli.test_check import finding, options_of, with_lines

STAGES = "pipeline-model-parallel-size: 4"
LAYOUT = "pipeline-model-parallel-layout"


def stage_lines(text):
    """The table of stages: name and figures of each."""
    lines = text.splitlines()
    (head,) = (i for i, line in enumerate(lines) if line.startswith("  stage "))
    table = lines[head + 1 : lines.index(next(one for one in lines if "GB on a GPU of" in one))]
    return [line.strip() for line in table]


def test_each_stage_is_told_and_the_fullest_named(tmp_path):
    found = finding(with_lines(tmp_path, STAGES, f"{LAYOUT}: Et*3||t*4|tL"), 8)
    assert found.is_sound
    first, empty, third, last = stage_lines(as_text(found))
    assert first.startswith("0 (embedding, 3 layers) ") and first.endswith("the most")
    assert empty.split() == ["1", "(0", "layers)", "4.00", "0.00", "0.00", "4.00"]
    assert third.startswith("2 (4 layers) ") and last.startswith("3 (1 layer, output layer) ")
    assert [
        f"{one.total / 1e9:.2f}" in line
        for one, line in zip(found.stages, (first, empty, third, last), strict=True)
    ] == [True] * 4
    assert found.memory is found.stages[0]
    assert "4 full micro-batches of 3 layers" in as_text(found)
    assert '"stages"' in as_json(found)


def test_parts_of_a_stage_that_differ_are_told(tmp_path):
    two = "pipeline-model-parallel-size: 2"
    found = finding(with_lines(tmp_path, two, f"{LAYOUT}: Et|t*2|t*3|t*2L"), 8)
    assert stage_lines(as_text(found))[0].startswith("0 (embedding, 1+3 layers)")
    assert found.job.split.layers == (1, 2, 3, 2)


def test_the_output_layer_s_time_is_planned_for(tmp_path):
    """It takes as long as six layers and a half, which the last stage then better has none of."""
    even = finding(with_lines(tmp_path, "num-layers: 12", STAGES), 8)
    balanced = finding(with_lines(tmp_path, "num-layers: 12", STAGES, f"{LAYOUT}: {BALANCED}"), 8)
    assert even.is_sound and balanced.is_sound
    assert balanced.job.split.layers == (4, 4, 4, 0)
    last = f"{LAYOUT}: Et*2|t*2|t*2|t*6,L"
    heavy = finding(with_lines(tmp_path, "num-layers: 12", STAGES, last), 8)
    assert heavy.step.efficiency < 0.6 < balanced.step.efficiency


BALANCED = "Et*4|t*4|t*4|L"


def test_layers_that_do_not_divide_name_the_ways_out(tmp_path):
    found = finding(with_lines(tmp_path, "num-layers: 94", STAGES), 8)
    (refusal,) = found.refusals
    assert "--num-layers 94 is not a multiple of --pipeline-model-parallel-size 4" in refusal
    assert "--account-for-embedding-in-pipeline-split" in refusal
    counted = [f"account-for-{part}-in-pipeline-split: true" for part in ("embedding", "loss")]
    found = finding(with_lines(tmp_path, "num-layers: 94", STAGES, *counted), 8, memory=640e9)
    assert found.is_sound
    assert found.job.split.layers == (23, 24, 24, 23)


@pytest.mark.parametrize(("layers", "is_sound"), [(4, True), (2, False), (3, False)])
def test_a_cost_model_is_of_the_stage_that_has_most(tmp_path, layers, is_sound):
    path = tmp_path / "cost.json"
    model = CostModel(a=1e-12, b=1e-7, kv_bytes_per_token=1000, num_layers=layers, block_s=1e-6)
    path.write_bytes(model.to_json())
    two = "pipeline-model-parallel-size: 2"
    lines = [two, "num-layers: 6", f"{LAYOUT}: Ett|t*4L", f"hdp-cost-model: {path}"]
    assert finding(with_lines(tmp_path, *lines), 8).is_sound is is_sound


@pytest.mark.parametrize(("offload", "planned"), [("off", 5), ("auto", 3)])
@pytest.mark.parametrize("is_measured", [True, False])
def test_with_offload_plans_count_the_fewest_layers(tmp_path, is_measured, offload, planned):
    lines = ["pipeline-model-parallel-size: 2", f"{LAYOUT}: Et*3|t*5L", f"hdp-offload: {offload}"]
    if is_measured:
        path = tmp_path / "cost.json"
        model = CostModel(a=1e-12, b=1e-7, kv_bytes_per_token=1, num_layers=5, block_s=1e-6)
        path.write_bytes(model.to_json())
        lines.append(f"hdp-cost-model: {path}")
    config = with_lines(tmp_path, *lines)
    arguments = options_of(config)
    assert cost_model_of(arguments, job_of(arguments, 8)).num_layers == planned


@pytest.mark.parametrize("strategy", ["naive", "bytescale", "dp-balance"])
def test_a_strategy_that_knows_no_stages_is_planned_as_it_trains(tmp_path, strategy):
    """For one stage; the step's time is that of the stages, and all plans have the same work."""
    lines = ["pipeline-model-parallel-size: 2", "hdp-global-batch-tokens: 1048576"]
    plain, found = (
        finding(with_lines(tmp_path, *lines, f"hdp-strategy: {name}"), 16)
        for name in ("static", strategy)
    )
    assert plain.is_sound and found.is_sound, found.refusals
    work_s, same_s = (one.step.efficiency * one.step.step_s for one in (plain, found))
    assert same_s == pytest.approx(work_s, rel=0.02)
