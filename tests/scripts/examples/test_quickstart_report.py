"""The quickstart's report: its sentence, table, bound and picture; it fails when losses differ."""

import json
import re
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_rgba

from megatron_hdp.megatron.parallel import RankPlace
from megatron_hdp.planner import evaluate, plan
from megatron_hdp.runtime.timeline import BACKWARD, FORWARD, OPTIMIZER, RING_WAIT, SYNC, Span
from megatron_hdp.simulator.trace_events import write_events
from megatron_hdp.training.step_trace import RankSpans, name_events, step_events
from tests.support import costs

ROOT = Path(__file__).parents[3]
SCRIPTS = ROOT / "scripts" / "examples" / "quickstart"
sys.path.append(str(SCRIPTS))
import measured  # noqa: E402
import picture  # noqa: E402
import report  # noqa: E402

METRICS = {
    **{"loss": 5.5, "tokens": 100, "ring_bytes": 4_000_000, "planning_ms": 1.0},
    **{"planned_efficiency": 0.5, "measured_efficiency": 0.4},
    **{"micro_batches_min": 3, "micro_batches_max": 3},
}


def ranks_of_a_step(unit_s, began_s):
    """Two ranks: 4 units of time, the second waits one for the first, which waited 1/4 itself."""
    notes = (
        [(FORWARD, 0, 1), (RING_WAIT, 0.5, 0.75), (BACKWARD, 1, 3), (SYNC, 3, 3.5)],
        [(FORWARD, 0, 1), (BACKWARD, 1, 2), (SYNC, 2, 3.5)],
    )
    ranks = []
    for hdp_rank, noted in enumerate(notes):
        place = RankPlace(hdp_rank, 2, 0, 1, 0, 1, lockstep_ranks=1, token_multiple=1)
        spans = [
            Span(kind, *(began_s + at * unit_s for at in times), None if kind == SYNC else 0)
            for kind, *times in [*noted, (OPTIMIZER, 3.5, 4)]
        ]
        ranks.append(RankSpans.of_rank(place, "a", began_s, spans, cpu_s=2 * unit_s))
    return ranks


def write_run(folder, unit_s, num_steps=3, degree=2, **changes):
    """A run whose step k takes 4 k units of time."""
    lengths = [64, 64] if degree == 1 else [128]
    made = plan(lengths, ranks=2, tokens_per_rank=64, strategy="static")
    lines, events, began_s = [], [], 0.0
    for step in range(1, num_steps + 1):
        ranks = ranks_of_a_step(step * unit_s, began_s)
        events += step_events(ranks, made, evaluate(made, costs.CPU), step, began_s)
        seconds = 4 * step * unit_s
        began_s += 1.5 * seconds
        speed = {"seconds": seconds, "tokens_per_second": 100 / seconds}
        lines.append(json.dumps({"step": step} | METRICS | speed | changes))
    (folder / "trace").mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    names = name_events([rank.place for rank in ranks_of_a_step(1, 0)])
    write_events(folder / "trace" / "steps.json", [*names, *events], {})


def write_both(folder, num_hdp_steps=3, **changes):
    write_run(folder / "static", 1.0)
    write_run(folder / "hdp", 0.625, num_hdp_steps, **changes)


def reported(folder):
    command = [sys.executable, str(SCRIPTS / "report.py"), str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=570)


def on_one_line(text):
    return " ".join(text.split())


def test_the_report(tmp_path):
    write_both(tmp_path, ring_bytes=0, micro_batches_min=2, loss=5.50001)
    done = reported(tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert on_one_line(done.stdout).startswith(
        "The 3 steps took the static mesh 24.0 s and HDP 15.0 s, which sent 4 and 0 MB a step "
        "around their rings, for the same losses (they differ by 2e-06 at most): HDP trained "
        "1.60 x as fast. step loss"
    )
    rows = {line.split("  ")[0]: line.split() for line in done.stdout.splitlines()}
    assert rows["1"] == ["1", "5.500000", "5.500010", "25", "40", "x", "1.60", "shown"]
    assert rows["3"] == ["3", "5.500000", "5.500010", "8", "13", "x", "1.60"]
    assert rows["all"] == ["all", "12", "20", "x", "1.60"]  # 300 tokens in 24 and in 15 s
    assert rows["ring traffic (MB)"][-4:] == ["4.0", "0.0", "x", "0.00"]
    assert rows["micro-batches a rank"][-2:] == ["3-3", "2-3"]
    assert "What bounds the gain: " in done.stdout
    assert f"the picture of step 1: {tmp_path}/measured.png" in done.stdout
    assert (tmp_path / "measured.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": 5.51}, "losses differ by 1.8e-03, expected at most 1e-04"),
        ({"loss": None}, "cannot be compared"),
        ({"tokens": 99}, "cannot be compared"),
        ({"num_hdp_steps": 1}, "found 3 and 1 steps, expected the same steps"),
        ({"num_hdp_steps": 0}, "found no step"),
    ],
)
def test_other_losses_data_or_steps_fail(tmp_path, monkeypatch, capsys, changes, message):
    write_both(tmp_path, **changes)
    monkeypatch.setattr(sys, "argv", ["report.py", str(tmp_path)])
    with pytest.raises(SystemExit) as leaving:  # in this process, which has imported it all
        runpy.run_path(str(SCRIPTS / "report.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert leaving.value.code == 1 or str(leaving.value.code).startswith("error: ")
    assert message in f"{printed}{leaving.value.code}"
    assert "as fast" not in printed and not (tmp_path / "measured.png").exists()


def test_where_the_time_went(tmp_path):
    write_run(tmp_path, 2.0, num_steps=1)
    (step,) = measured.read_run(tmp_path)
    assert [one.degree for rank in step.ranks for one in rank.compute] == [2] * 4
    assert (step.seconds, step.traced_s, step.cpu_s, step.largest_degree) == (8.0, 8.0, 8.0, 2)
    spans = [[(one.start_s, one.end_s) for one in rank.waits] for rank in step.ranks]
    assert spans == [[(1.0, 1.5)], [(4.0, 6.0)]]  # the last rank's own sync is no wait
    assert [[one.seconds for one in rank.sync] for rank in step.ranks] == [[1.0, 1.0]] * 2
    assert step.waited_s == pytest.approx(2.5)
    assert measured.wait_share([step]) == pytest.approx(2.5 / 16)
    assert [measured.busy_share([step], cores) for cores in (1, 2, 16)] == [1.0, 0.5, 0.5]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda text: text.replace("gradient sync", "reduction"), "found no lane"),
        (lambda text: text.replace("step 3", "step 4"), r"steps \[1, 2, 4\], expected \[1, 2, 3\]"),
    ],
)
def test_a_trace_of_something_else(tmp_path, fault, message):
    write_run(tmp_path, 1.0)
    path = tmp_path / "trace" / "steps.json"
    path.write_text(fault(path.read_text()))
    with pytest.raises(ValueError, match=message):
        measured.read_run(tmp_path)
    path.unlink()
    with pytest.raises(ValueError, match="found 0 traces, expected one"):
        measured.read_run(tmp_path)


@pytest.fixture
def steps(tmp_path):
    """The same step under both strategies."""
    write_run(tmp_path / "static", 1.0, num_steps=1)
    write_run(tmp_path / "hdp", 0.5, num_steps=1, degree=1, ring_bytes=1_000_000)
    return [measured.read_run(tmp_path / name)[0] for name in ("static", "hdp")]


def with_seconds(step, *seconds):
    return [replace(step, metrics=step.metrics | {"seconds": one}) for one in seconds]


@pytest.fixture
def runs(steps):
    """Three steps that are 2, 3 and 1 x as fast; all together 16 / 9 = 1.78 x."""
    static, hdp = steps
    runs = with_seconds(static, 2, 9, 5), with_seconds(hdp, 1, 3, 5)
    traffic = {"ring_bytes": 9_000_000}
    runs[0][2] = replace(runs[0][2], metrics=runs[0][2].metrics | traffic, cpu_s=1.0)
    return runs


def test_the_step_whose_speed_up_is_nearest_to_that_of_all_is_shown(steps, runs):
    assert measured.speedup(*runs) == pytest.approx(16 / 9)
    assert measured.nearest_step(*runs) == 0  # of 2, 3 and 1
    static, hdp = steps
    runs = with_seconds(static, 2, 30, 3, 1), with_seconds(hdp, 1, 10, 2, 1)
    assert measured.speedup(*runs) == pytest.approx(36 / 14)  # 2.57; the middle ones are 2 and 1.5
    assert measured.nearest_step(*runs) == 1
    assert measured.nearest_step(*(run[::-1] for run in runs)) == 2
    assert measured.nearest_step([static] * 3, [hdp] * 3) == 0


def test_the_sentence_and_the_table_speak_of_all_steps(runs):
    static, hdp = runs
    text = on_one_line(report.sentence(static, hdp, 2e-8))
    assert "took the static mesh 16.0 s and HDP 9.0 s, which sent 6 and 1 MB a step" in text
    assert text.endswith("HDP trained 1.78 x as fast.")
    one = on_one_line(report.sentence(static[:1], hdp[:1], 0.0))
    assert one.startswith("The only step took the static mesh 2.0 s and HDP 1.0 s, which sent 4 ")
    rows = [line.split() for line in report.table(*runs).splitlines()[2:6]]
    assert [row[0] for row in rows] == ["1", "1", "1", "all"]  # one step, thrice
    assert [row[-1] for row in rows] == ["shown", "3.00", "1.00", "1.78"]


def test_the_bound_is_over_all_steps(runs):
    static, hdp = runs
    text = on_one_line(report.bound(static, hdp, cores=1))
    cpu_s, hdp_cpu_s = 4.0 + 4.0 + 1.0, 3 * 2.0
    assert f"kept their cores busy for {cpu_s / 16:.0%} and {hdp_cpu_s / 9:.0%} of it" in text
    assert f"{cpu_s / hdp_cpu_s:.2f} x from less work (9.0 and 6.0 s of CPU time)" in text
    assert text.endswith(f"it would be {16 / 9 / (hdp_cpu_s / 9):.2f} x.")
    waited = [replace(one, ranks=one.ranks[:1] * 2) for one in static[:1]]  # 1/4 s of 4, twice
    both = [*waited, *static[1:]]
    assert measured.wait_share(both) == pytest.approx((0.5 + 1.25 + 1.25) / (3 * 8))
    assert f"Ranks waited {3 / 24:.0%} of" in on_one_line(report.bound(both, hdp, cores=1))


def test_what_bounds_the_gain(steps):
    static, hdp = [steps[0]], [replace(steps[1], cpu_s=1.6)]
    text = on_one_line(report.bound(static, hdp, cores=1))
    assert "2 ranks share 1 core, and one that waits leaves its core to another" in text
    assert "Ranks waited 16% of static's time and 16% of HDP's" in text
    assert "kept their cores busy for 100% and 80% of it" in text
    assert "2.50 x from less work (4.0 and 1.6 s of CPU time)" in text
    gain, busier, less_work, most = (float(one) for one in re.findall(r"([\d.]+) x", text))
    assert (gain, most) == (2.0, 2.5)
    assert busier * less_work == pytest.approx(gain)
    assert "each rank has a core of its own" in report.bound(static, hdp, cores=2)


def test_one_rank_has_nothing_to_balance(steps):
    static, hdp = ([replace(step, ranks=step.ranks[:1])] for step in steps)
    text = on_one_line(report.sentence(static, hdp, 0.0))
    assert text.startswith("One rank has nothing to balance: the only step took static 4.0 s and ")
    assert text.endswith("so HDP was 2.00 x as fast by the machine's noise alone.")


def pixels_per_unit(axes):
    (left, _), (right, _) = axes.transData.transform([(0.0, 0.0), (1.0, 0.0)])
    return right - left


def widths(axes, colour):
    """Of the bars of one colour."""
    extents = [
        path.get_extents().width
        for bars in axes.collections
        for path in bars.get_paths()
        if np.allclose(bars.get_facecolor()[0], to_rgba(colour))
    ]
    return sorted(extents)


def test_the_picture_has_both_runs_on_one_scale(steps, tmp_path):
    figure = picture.draw(dict(zip(("static", "HDP"), steps, strict=True)), "Measured")
    figure.savefig(tmp_path / "measured.png")
    above, above_traffic, below, below_traffic = figure.axes
    assert above.get_title(loc="left") == "static: 4.00 s"
    assert below.get_title(loc="left") == "HDP: 2.00 s"
    assert above.get_position().y0 > below.get_position().y1
    assert above.get_position().x0 == pytest.approx(below.get_position().x0)
    for axes, unit_s in ((above, 1.0), (below, 0.5)):
        assert widths(axes, picture.WAIT) == pytest.approx([0.25 * unit_s, unit_s])
        assert widths(axes, picture.SYNC) == pytest.approx([0.5 * unit_s] * 4)
        assert [label.get_text() for label in axes.get_yticklabels()] == ["rank 0", "rank 1"]
    assert pixels_per_unit(above) == pytest.approx(pixels_per_unit(below))
    assert above.get_xlim() == (0, 4.0)
    traffic = [axes.patches[0].get_width() for axes in (above_traffic, below_traffic)]
    assert traffic == [4.0, 1.0]
    assert pixels_per_unit(above_traffic) == pytest.approx(pixels_per_unit(below_traffic))
    below.set_xlim(0, 2.0)
    assert above.get_xlim() == (0, 2.0)  # one axis cannot be stretched without the other
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    of_degrees = ["sequences over 1 rank", "sequences over 2 ranks"]
    assert labels == [*of_degrees, "waiting for other ranks", "gradient sync, optimizer"]
