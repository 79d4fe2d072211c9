"""``megatron-hdp check`` tries each number of virtual stages and proposes one that fits."""

import json

import pytest

from megatron_hdp.cli.checking import as_json, as_text
from megatron_hdp.cli.checking.finding import Tried, best_of
from megatron_hdp.cli.main import main
from tests.cli.test_check import OFFLOADED, PAGE, PAPERS, finding, with_lines

STAGES = ("num-layers: 8", "pipeline-model-parallel-size: 2")
TITLES = ["virtual stages", "layers each", "GB, at most", "efficiency", "step time"]
FLAG = "num-virtual-stages-per-pipeline-rank"
EXPERTS = (
    *("num-experts: 8", "expert-model-parallel-size: 4"),
    "moe-token-dispatcher-type: alltoall",
)


def tried_of(found):
    return {one.virtual_stages: one for one in found.virtual_stages}


def between(smaller, greater):
    """GPU memory of which 95% lie between two needs."""
    assert smaller.needed_bytes < greater.needed_bytes
    return (smaller.needed_bytes + greater.needed_bytes) / 2 / 0.95


@pytest.mark.parametrize("own", [1, 2, 4])
@pytest.mark.parametrize("more", [(), EXPERTS], ids=["dense", "experts across ranks"])
def test_each_number_is_checked_as_if_it_were_the_configurations(tmp_path, own, more):
    given = [f"{FLAG}: {own}"] if own > 1 else []
    found = finding(with_lines(tmp_path, *STAGES, *more, *given), 8)
    assert found.is_sound and found.job.model_chunks == own
    assert (found.step.num_positions is not None) == bool(more)
    assert [one.virtual_stages for one in found.virtual_stages] == [1, 2, 4]
    assert [one.layers for one in found.virtual_stages] == [(4,), (2,), (1,)]
    mine = tried_of(found)[own]
    assert mine.fits
    assert mine.needed_bytes == found.memory.total
    assert (mine.efficiency, mine.step_s) == (found.step.efficiency, found.step.step_s)
    plain, *virtual = found.virtual_stages
    assert all(one.step_s < plain.step_s for one in virtual)
    assert all(one.needed_bytes > plain.needed_bytes for one in virtual)


def test_the_proposal_is_printed_and_no_failure(tmp_path, capsys):
    path = with_lines(tmp_path, *STAGES)
    best = finding(path, 8).best_virtual_stages
    assert best in (2, 4)
    assert main(["check", str(path), "--gpus", "8"]) == 0
    *_, head, plain, two, four, proposal, verdict = capsys.readouterr().out.splitlines()
    assert head.split("  ")[1:] == TITLES
    assert [row.split()[:2] for row in (plain, two, four)] == [["1", "4"], ["2", "2"], ["4", "1"]]
    assert proposal == f"  best: --{FLAG} {best}, not 1: the fewest within 0.5% of the fastest"
    assert verdict == "sound"
    kept = finding(with_lines(tmp_path, *STAGES, f"{FLAG}: {best}"), 8)
    assert f"\n  best: --{FLAG} {best}, as it is\n" in as_text(kept)


def test_json_holds_the_proposal(tmp_path):
    found = finding(with_lines(tmp_path, *STAGES), 8)
    figures = json.loads(as_json(found))
    assert figures["best_virtual_stages"] == found.best_virtual_stages
    assert [one["virtual_stages"] for one in figures["virtual_stages"]] == [1, 2, 4]
    assert figures["virtual_stages"][0]["step_s"] == figures["step"]["step_s"]


def test_what_does_not_fit_is_not_proposed(tmp_path):
    path = with_lines(tmp_path, *STAGES)
    plain, two, four = finding(path, 8).virtual_stages
    tight = finding(path, 8, between(plain, four))
    assert tight.is_sound and tight.best_virtual_stages == 1
    assert [one.fits for one in tight.virtual_stages] == [True, False, False]
    assert as_text(tight).count("does not fit") == 2
    assert f"\n  best: no --{FLAG}, as it is\n" in as_text(tight)
    roomier = finding(path, 8, between(four, two))
    assert [one.fits for one in roomier.virtual_stages] == [True, False, True]
    nothing = finding(path, 8, 0.9 * plain.needed_bytes)
    assert not nothing.is_sound and nothing.best_virtual_stages is None
    assert "best:" not in as_text(nothing)


def test_a_configuration_that_does_not_fit_learns_what_would(tmp_path):
    path = with_lines(tmp_path, *STAGES, f"{FLAG}: 2")
    _, two, four = finding(path, 8).virtual_stages
    found = finding(path, 8, between(four, two))
    assert not found.is_sound
    assert found.best_virtual_stages == 4
    assert as_text(found).splitlines()[-2].startswith(f"  best: --{FLAG} 4, not 2: ")
    assert as_text(found).splitlines()[-1].startswith("refused: ")


def test_what_a_node_cannot_hold_is_not_proposed(tmp_path):
    offloaded = [line.replace("524288", "1048576") for line in OFFLOADED]
    lines = ["num-layers: 16", "pipeline-model-parallel-size: 2", *offloaded]
    needs = {
        own: finding(with_lines(tmp_path, *lines, *chosen), 8).node_host_bytes / 0.95
        for own, chosen in ((1, []), (2, [f"{FLAG}: 2"]))
    }
    assert 0 < needs[1] < needs[2]
    limit = (needs[1] + needs[2]) / 2
    found = finding(with_lines(tmp_path, *lines), 8, host_memory_bytes=limit)
    assert found.is_sound
    assert tried_of(found)[1].fits and not tried_of(found)[2].fits


@pytest.mark.parametrize(
    "lines",
    [
        ["num-layers: 8"],
        ["pipeline-model-parallel-size: 2", "pipeline-model-parallel-layout: Ett|tt|tt|ttL"],
        ["num-layers: 2", "pipeline-model-parallel-size: 2"],
    ],
    ids=["one stage", "a layout", "one layer each"],
)
def test_nothing_to_choose(tmp_path, lines):
    found = finding(with_lines(tmp_path, *lines), 8)
    assert found.is_sound
    assert [one.virtual_stages for one in found.virtual_stages] in ([], [1])
    assert "virtual stages" not in as_text(found)


def test_chunks_that_differ_are_told(tmp_path):
    counted = [f"account-for-{part}-in-pipeline-split: true" for part in ("embedding", "loss")]
    lines = ["num-layers: 10", "pipeline-model-parallel-size: 2", *counted]
    found = finding(with_lines(tmp_path, *lines), 8)
    assert [one.layers for one in found.virtual_stages] == [(5,), (2, 3), (1, 2), (0, 1)]
    assert "2 to 3" in as_text(found)


def one(number, step_s, *, fits=True):
    figures = {"layers": (8 // number,), "needed_bytes": 1.0, "efficiency": None}
    return Tried(virtual_stages=number, fits=fits, step_s=step_s, **figures)


@pytest.mark.parametrize(
    ("tried", "own", "best"),
    [
        ([one(1, 2.0), one(2, 1.5), one(4, 1.2)], 1, 4),
        ([one(1, 2.0), one(2, 1.205), one(4, 1.2)], 1, 2),
        ([one(1, 2.0), one(2, 1.205), one(4, 1.2)], 4, 4),
        ([one(1, 1.205), one(2, 1.2)], 2, 2),
        ([one(1, 2.0), one(2, 1.5), one(4, 1.2, fits=False)], 1, 2),
        ([one(1, 2.0), one(2, 1.5), one(4, 1.2, fits=False)], 4, 2),
        ([one(1, 2.0, fits=False), one(2, None, fits=False)], 1, None),
        ([], 1, None),
    ],
)
def test_the_fewest_of_the_fast_ones_is_best(tried, own, best):
    assert best_of(tried, own) == best


def test_the_page_shows_what_is_found():
    """``python scripts/dev/configurations.py`` writes it."""
    shown = as_text(finding(PAPERS / "llama-70b-256k.yaml", 8192)).splitlines()
    blocks = [block.split("\n```")[0].splitlines() for block in PAGE.split("```text\n")[1:]]
    assert len(blocks) == 2
    for block in blocks:
        begin = shown.index(block[0])
        assert shown[begin : begin + len(block)] == block
