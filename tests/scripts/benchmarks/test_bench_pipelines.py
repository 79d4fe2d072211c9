"""The benchmark's tables of pipelines: what is planned for which V, what judged, what shown."""

import dataclasses
import importlib
import json
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_hdp.planner import compute_s, evaluate, make_plan, pipeline_lower_bound_s
from megatron_hdp.planner.experts import figures_in_lockstep
from megatron_hdp.planner.pipeline import Pipeline
from tests.planner.problems import rings_of
from tests.support.scripts import script_module


@pytest.fixture(scope="module")
def bench():
    names = ("cases", "staged", "staged_tables")
    with script_module("benchmarks/bench_planner.py") as script:
        parts = {name: importlib.import_module(f"planner_bench.{name}") for name in names}
        yield SimpleNamespace(script=script, **parts)


def tables_of(text):
    """The rows of each table, by its bold title."""
    found = {}
    for section in text.split("\n**")[1:]:
        lines = [line for line in section.splitlines() if line.startswith("|")]
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
        found[section.split(".**")[0]] = rows[:1] + rows[2:]
    return found


def test_each_v_is_judged_as_itself_against_its_own_bound(bench):
    case = bench.cases.Case("github", 16, 1024, pipeline_stages=4)
    request = case.request(1)
    total_s = compute_s(request.lengths, request.cost_model).sum() / 16
    full_s = compute_s(np.array([1024]), request.cost_model)[0] + request.cost_model.g
    results = list(bench.staged.measure_staged(case, 1, ["auto"], [1, 4], 1))
    for chunks, one in zip((1, 4), results, strict=True):
        pipeline = Pipeline(4, chunks)
        made = make_plan(dataclasses.replace(request, pipeline=pipeline), "pp-balance")
        made_s = evaluate(made, request.cost_model, 4, chunks).makespan_s
        bound_s = pipeline_lower_bound_s(request.lengths, 16, request.cost_model, pipeline, 1024)
        assert one.virtual_stages == chunks and one.problem is None
        assert one.makespan_s == pytest.approx(made_s)
        assert one.of_the_bound == pytest.approx(bound_s / made_s)
        assert one.efficiency == pytest.approx(total_s / 4 / made_s)
        target_s = one.of_the_greater * made_s
        assert target_s == pytest.approx(max(bound_s, total_s / 4 + 3 / (4 * chunks) * full_s))
    plain, interleaved = results
    assert interleaved.makespan_s < plain.makespan_s and interleaved.bound_s < plain.bound_s


def test_only_what_a_strategy_knows_is_told_to_it(bench):
    case = bench.cases.Case("github", 64, 8192, pipeline_stages=4, expert_parallel_size=8)

    def told(strategy):
        found, planned_as, chunks = bench.staged.told_of(case, strategy, 2)
        return found.pipeline_stages, found.expert_parallel_size, planned_as, chunks

    assert told("auto") == (4, 8, "ep-balance", 2)
    assert told("pp-balance") == (4, 1, "pp-balance", 2)
    assert told("static") == (4, 1, "static", 2)
    assert told("bytescale") == (1, 1, "bytescale", 1)


def plan_of(micro_batches, lengths):
    """Of ``(ranks, sequences)``, on two ranks of 8,192 tokens."""
    rings, sequences = zip(*micro_batches, strict=True)
    return rings_of(rings, lengths, sequences=sequences, tokens_per_rank=8192)


@pytest.mark.parametrize("chunks", [1, 2])
def test_lists_that_disagree_are_aligned_with_padding(bench, chunks):
    """Rank 1 waits between two rings, as if it ran micro-batches of next to no time there."""
    lengths = [16384, 8192, 4096, 12288, 1, 1]
    listed = [([0, 1], [0]), ([0], [1]), ([0], [2]), ([0, 1], [3])]
    given = bench.cases.Case("github", 2, 8192, pipeline_stages=2).request(0)
    request = dataclasses.replace(given, pipeline=Pipeline(2, chunks))
    disagree = plan_of(listed, lengths[:4])
    with pytest.raises(ValueError, match="deadlock"):
        evaluate(disagree, request.cost_model, 2)
    agree = plan_of([*listed[:3], ([1], [4]), ([1], [5]), listed[3]], lengths)
    agree.validate(pipeline_stages=2)
    ran_s = bench.staged.judged(disagree, request).makespan_s
    expected_s = evaluate(agree, request.cost_model, 2, chunks).makespan_s
    assert ran_s == pytest.approx(expected_s, rel=1e-3)


def test_pipelines_that_share_experts_are_judged_in_lockstep(bench, capsys):
    flags = ["--pipelines", "--experts", "--seeds", "1", "--repeats", "1"]
    flags += ["--cases", "byted-N64-C8K-P4-E8", "--virtual-stages", "2", "1"]
    assert bench.script.main([*flags, "--strategies", "static", "pp-balance", "auto"]) == 0
    text = capsys.readouterr().out
    shown = tables_of(text)
    head, ours = shown["Ours with each V"]
    assert head[:2] == ["batch", "V = 1: of the greater"] and ours[0] == "byted-N64-C8K-P4-E8"
    (case,) = bench.script.chosen_cases(bench.script.parse(flags))
    request = case.request(0)
    for chunks, cell in ((1, ours[2]), (2, ours[5])):
        pipeline = Pipeline(4, chunks)
        made = make_plan(dataclasses.replace(request, pipeline=pipeline), "ep-balance")
        figures = figures_in_lockstep(made, request.cost_model, 8, pipeline)
        assert cell.startswith(f"{figures.lower_bound_s / figures.makespan_s:.3f} (")
    head, beside = shown["Other strategies"]
    assert head[1:] == [f"{name}, V = {v}" for name in ("static", "pp-balance") for v in (1, 2)]
    assert float(beside[1].split()[0]) > 1
    assert [row[:2] for row in shown["Over all rows"][1:]] == [
        [name, v] for name in ("static", "pp-balance", "ours") for v in ("1", "2")
    ]
    note = " ".join(text.split())
    assert (
        "only *pp-balance* plans for it. Planned for P stages: *static*, *pp-balance*. None" in note
    )


def test_a_run_of_pipelines(bench, capsys, tmp_path):
    flags = ["--pipelines", "--cases", "byted-N16-C8K-P8", "--seeds", "2", "--repeats", "1"]
    flags += ["--json", str(tmp_path / "results.json")]
    assert bench.script.main(flags) == 0
    text = capsys.readouterr().out
    shown = tables_of(text)
    ours = shown["Ours with each V"][1]
    for share in (ours[2], ours[5]):
        assert 0 < float(share.split()[0]) <= 1
    results = json.loads((tmp_path / "results.json").read_text())["results"]
    made = {(one["strategy"], one["virtual_stages"], one["seed"]): one for one in results}
    assert len(made) == len(results) == (4 + 2) * 2 * 2
    head, case, mean, worst = shown["Whole and in parts"]
    assert head[1:5] == ["static", "bytescale", "dynamic-cp", "ours whole"]
    assert case[1:] == mean[1:] == worst[1:]  # of one row
    whole, parts, bound, of_it = map(float, case[4:8])
    assert whole < parts <= bound and of_it == pytest.approx(parts / bound, abs=0.02)
    assert parts > float(case[8])  # on one link a node
    for name, shown_share in (("in parts", parts), ("plain rings", float(case[8]))):
        of_each = [
            sum(
                one["perfect_s"] / one["makespan_s"]
                for one in (made[name, chunks, seed] for seed in (0, 1))
            )
            / 2
            for chunks in (1, 4)
        ]
        assert max(of_each) == pytest.approx(shown_share, abs=6e-4)
    times = [made["auto", 4, seed]["makespan_s"] / made["auto", 1, seed]["makespan_s"]
             for seed in (0, 1)]  # fmt: skip
    assert float(ours[7]) == pytest.approx(sum(times) / 2, abs=6e-4)


def test_the_tables_compare_batch_by_batch(bench):
    rows = [bench.cases.Case(data, 8, 1024, pipeline_stages=2) for data in ("github", "byted")]
    names = [case.name for case in rows]

    keys = ("case", "seed", "strategy", "virtual_stages")
    figures = ("makespan_s", "bound_s", "target_s", "perfect_s", "planning_ms")

    def of(*values):
        return bench.staged.Staged(**dict(zip(keys + figures, values, strict=False)))

    missing = dataclasses.replace(of(names[1], 0, "naive", 1), problem="no plan")
    results = [
        of(names[0], 0, "auto", 1, 10.0, 6.0, 9.0, 5.0, 2.0),
        of(names[0], 1, "auto", 1, 20.0, 16.0, 8.0, 10.0, 4.0),
        of(names[0], 0, "auto", 4, 8.0, 6.0, 7.0, 5.0, 10.0),
        of(names[0], 1, "auto", 4, 10.0, 9.0, 7.0, 5.0, 20.0),
        of(names[1], 0, "auto", 1, 4.0, 3.0, 2.0, 2.0, 1.0),
        of(names[1], 0, "auto", 4, 4.0, 2.0, 1.0, 2.0, 1.0),
        of(names[0], 0, "naive", 1, 16.0, 6.0, 8.0, 5.0, 0.5),
        of(names[0], 1, "naive", 1, 40.0, 16.0, 10.0, 5.0, 0.5),
        missing,
    ]
    text = str(bench.staged_tables.StagedTables(rows, ["naive", "auto"], [4, 1], results))
    shown = tables_of(text)
    assert shown["Ours with each V"][1] == [
        *(names[0], "0.850 (0.800)", "0.700 (0.600)", "0.500"),
        *("0.887 (0.875)", "0.825 (0.750)", "0.562", "0.650", "3.0", "15.0"),
    ]
    assert shown["Other strategies"][1:] == [
        [names[0], "3.00 (0.450)", "-"],
        [names[1], "-", "-"],
    ]
    assert shown["Over all rows"][1:] == [
        *(["naive", "1", "2", "0.450", "0.450", "0.400", "0.388", "0.388", "0.375"]
          + ["3.00", "0.5", "0.5"],),
        ["naive", "4", "0", *["-"] * 9],
        *(["ours", "1", "3", "0.800", "0.750", "0.750", "0.725", "0.700", "0.600"]
          + ["1.42", "2.0", "3.0"],),
        *(["ours", "4", "3", "0.694", "0.500", "0.500", "0.662", "0.500", "0.500"]
          + ["1.00", "8.0", "15.0"],),
    ]  # fmt: skip
    assert text.splitlines()[-1] == f"- naive: 1 of 3 batches, such as {names[1]}, seed 0: no plan"


def test_the_cases_are_those_to_be_reached(bench):
    def names(*flags):
        return [case.name for case in bench.script.chosen_cases(bench.script.parse(flags))]

    pipelines = names("--pipelines")
    assert len(set(pipelines)) == len(pipelines) == 32
    for ranks in (16, 64, 256, 1024):
        for capacity in ("8K", "32K"):
            some = {f"github-N{ranks}-C{capacity}-P4", f"byted-N{ranks}-C{capacity}-P8"}
            assert some <= set(pipelines)
    both = names("--pipelines", "--experts")
    assert {"github-N64-C8K-P4-E8", "byted-N256-C32K-P4-E8"} <= set(both)
    assert all(name.endswith("-P4-E8") for name in both)
    assert bench.script.parse(["--pipelines"]).virtual_stages == (1, 4)
