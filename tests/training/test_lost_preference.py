"""A rank is lost in a run on preferences: its steps, and what the reference says, stay the same."""

from dataclasses import replace

import numpy as np
import pytest

from megatron_hdp.megatron.step import ReferenceSums
from tests.data.prepare.corpora import run as prepare_rows
from tests.support.epochs import DiesIn, SurvivingJob
from tests.support.preferences import preference_arguments, write_rows
from tests.training.runs import curve, lines_of
from tests.training.test_lost_rank import require_survived

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 5
ANSWERS = "megatron_hdp.megatron.step.hdp_steps"
FAULTS = {  # by member
    "in the reference": {0: DiesIn("HdpSteps.answers", 3, module=ANSWERS)},
    "behind a step of the reference": {2: DiesIn("HdpSteps.answers", 3, True, ANSWERS)},
    "in the step": {0: DiesIn("gradients_of_step", 3)},
    "behind the commit": {2: DiesIn("apply_step", 3, behind=True)},
    "before metrics": {0: DiesIn("write_step", 2)},
}


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    path = write_rows(folder / "rows.jsonl", 48)
    return prepare_rows(path, folder / "cache", format="pairs").prefix


@pytest.fixture
def run(run_ranks, tmp_path, rows):
    """Arguments of a run that survives, the metrics of one rank's, and what its reference says."""
    base, sums = tmp_path / "base", tmp_path / "sums.npz"
    whole = {"hdp_tokens_per_rank": 400}
    run_ranks(1, curve, preference_arguments(rows, "orpo", train_iters=1, save=base, **whole))
    mine = {"pretrained_checkpoint": base, "hdp_reference_checkpoint": base, "split": "3,1,0"}
    mine |= {"eval_iters": 1, "eval_interval": 2, "train_iters": STEPS, "lr_decay_iters": STEPS}
    mine = preference_arguments(rows, "kto", hdp_undesirable_weight=0.5, **mine)
    alone = {"hdp_reference_log_probs": sums, "metrics_path": tmp_path / "alone.jsonl"}
    run_ranks(1, curve, replace(mine, **alone, **whole))
    survives = {"hdp_survive": True, "metrics_path": tmp_path / "metrics.jsonl"}
    survives |= {"hdp_reference_log_probs": tmp_path / "found.npz"}
    return replace(mine, **survives), lines_of(tmp_path / "alone.jsonl"), sums


def require_same(found, run):
    arguments, expected, sums = run
    assert [one["step"] for one in found] == [one["step"] for one in expected]
    assert max(one["kto_divergence"] for one in expected) > 1e-3
    names = ("loss", "grad_norm", "reward_margin", "kto_divergence", "validation_loss")
    for one, other in zip(found, expected, strict=True):
        for name in names:
            if other[name] is not None:
                assert one[name] == pytest.approx(other[name], rel=1e-9, abs=1e-12), name
    (mine,), (theirs,) = (
        ReferenceSums.read(path)._sums.values()
        for path in (arguments.hdp_reference_log_probs, sums)
    )
    assert np.allclose(mine, theirs, rtol=1e-12, atol=0, equal_nan=True)
    assert np.isfinite(mine).sum() >= 2 * 36


@pytest.mark.parametrize("moment", FAULTS)
def test_a_rank_dies(run, tmp_path, moment):
    job = SurvivingJob(run[0], 3, tmp_path, FAULTS[moment])
    require_survived(job, job.run())
    assert len(job.coordinator.epoch.members) == 2
    require_same(job.steps(), run)


@pytest.mark.parametrize("moment", ["in the reference", "in the step"])
def test_who_joins_hears_what_the_reference_has_said(run, tmp_path, moment):
    job = SurvivingJob(run[0], 3, tmp_path, FAULTS[moment], replaces=True)
    require_survived(job, job.run())
    assert any("HDP ranks join" in line for line in job.said), job.said
    require_same(job.steps(), run)
