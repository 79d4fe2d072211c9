"""A rank is lost in a run with pictures: others encode its items, and no step changes."""

import random
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest

from megatron_hdp.megatron.media import encoding
from megatron_hdp.runtime.pieces import Members
from megatron_hdp.runtime.timeline import ENCODER
from tests.session.test_cut_items import cut_by
from tests.support.epochs import Deaths, DiesIn, SurvivingJob
from tests.training.epoch_traces import read_trace, require_whole
from tests.training.media_runs import ALONE, trained
from tests.training.runs import BUCKETS, SHARDED, lines_of
from tests.training.test_hundred_kills import (
    MOST_BEGUN,
    MOST_MEMBERS,
    RANKS,
    Campaign,
    LongJob,
    Notes,
)
from tests.training.test_lost_rank import require_same_steps, require_survived
from tests.training.test_pictures import LAYOUTS, pictures_run

SLOW = pytest.mark.slow
pytestmark = [SLOW, pytest.mark.timeout(900)]

STEPS, MANY = 5, 40
"""Of runs that nobody joins, and in which somebody has the time to."""
STORE, PIECES = "megatron_hdp.megatron.media.row_store", Members.__module__
MOMENTS = {
    "decoding": DiesIn("StepMedia.decode", 3, module=encoding.__name__),
    "agreeing on damages": DiesIn("agree_on_damages", 3, module=encoding.__name__),
    "encoding": DiesIn("StepMedia._encoded", 3, module=encoding.__name__),
    "rows leave": DiesIn("RowStore.send", 3, module=STORE),
    "rows have left": DiesIn("RowStore.send", 3, True, STORE),
    "in the forward": DiesIn("RowStore.take", 2, module=STORE),
    "gradients have left": DiesIn("RowStore._return_next", 3, True, STORE),
    "encoding again": DiesIn("StepMedia._encode_again", 3, module=encoding.__name__),
    "behind the commit": DiesIn("apply_step", 3, behind=True),
}
AGAIN = MOMENTS["encoding again"]
REPLICAS = {  # processes that leave together, if several
    **{"tp2": 2, "tp2-sp-pp2": 4},
    **dict.fromkeys(("pp2-sharded", "pp2-v2", "pp2-parts", "parked-pp2"), 2),
}
GATHERED = SHARDED | BUCKETS | {"overlap_param_gather": True}


@pytest.fixture
def whole(tmp_path):
    """Arguments of a run that survives, of one rank as of several."""
    metrics = {"metrics_path": tmp_path / "metrics.jsonl", "log_interval": 1}
    return pictures_run(tmp_path, hdp_survive=True, steps=STEPS, **metrics)


def lasting(whole):
    """The same run, in which others have the time to join."""
    return replace(whole, train_iters=MANY, lr_decay_iters=MANY, lr=1e-3)


def require_as_alone(run_ranks, job, whole, within=1e-10):
    """Raises unless steps are those of one rank that loses none."""
    path = whole.metrics_path.with_name("alone.jsonl")
    trained(run_ranks, replace(whole, hdp_survive=False, metrics_path=path, **ALONE))
    expected = lines_of(path)
    require_same_steps(job, expected, within)
    for name in ("media_items", "media_rows"):
        assert [one[name] for one in job.steps()] == [one[name] for one in expected]
    assert all(one["media_items"] for one in expected)


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_rank_dies(run_ranks, tmp_path, whole, moment, victim):
    job = SurvivingJob(whole, 3, tmp_path, {victim: MOMENTS[moment]})
    require_survived(job, job.run())
    assert len(job.coordinator.epoch.members) == 2
    require_as_alone(run_ranks, job, whole)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_is_replaced_in_a_layout(run_ranks, tmp_path, whole, layout):
    """Those that leave with it, too."""
    ranks, flags = LAYOUTS[layout]
    ranks, whole = 2 * REPLICAS.get(layout, 0) or ranks, lasting(whole)
    faults = {ranks - 1: AGAIN}
    job = SurvivingJob(replace(whole, **flags), ranks, tmp_path, faults, replaces=True)
    require_survived(job, job.run())
    assert any("HDP ranks join" in line for line in job.said), job.said
    require_as_alone(run_ranks, job, whole)


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_rank_dies_with_its_shard(run_ranks, tmp_path, whole, moment):
    """Of the encoder's optimizer as well; weights are gathered beside the next step."""
    evaluated = {"save": tmp_path / "saved", "save_interval": 2}
    arguments = replace(whole, **GATHERED, **evaluated)
    job = SurvivingJob(arguments, 3, tmp_path, {1: MOMENTS[moment]}, replaces=True)
    require_survived(job, job.run())
    require_as_alone(run_ranks, job, whole)
    resumed = replace(arguments, load=arguments.save, ckpt_step=2, hdp_survive=False, save=None)
    resumed = replace(resumed, metrics_path=None)
    found = trained(run_ranks, resumed, 2)
    for (step, loss, *_), one in zip(found, job.steps()[2:], strict=True):
        assert step == one["step"] and abs(loss / one["loss"] - 1) < 1e-10


@dataclass
class Cut:
    """A fault of each member: its plans cut items at random; one of them has another one, too."""

    victim: int
    fault: DiesIn

    def get(self, member: int) -> Any:
        """As `SurvivingJob` asks for it."""
        return partial(_cuts_items, self.fault if member == self.victim else None)


def _cuts_items(fault, member):
    encoding.plan_items = partial(cut_by, 1)
    if fault is not None:
        fault(member)


@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("number", [5, 17])
def test_a_member_of_a_cut_item_dies(run_ranks, tmp_path, whole, number, victim):
    """Others wait for its keys and values, in its first pass or its second one."""
    dies = DiesIn("Members._exchange", number, module=PIECES)
    job = SurvivingJob(whole, 3, tmp_path, Cut(victim, dies))
    require_survived(job, job.run())
    assert len(job.coordinator.epoch.members) == 2
    require_as_alone(run_ranks, job, whole)


BESIDE = {
    "online": {"hdp_online": True},
    "frozen": {"hdp_frozen": ("hdp_encoder.*",)},
    "mtp": {"mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.7},
    "adapters": {"lora_rank": 2, "lora_alpha": 4.0},
}


@pytest.mark.parametrize("name", BESIDE)
def test_a_rank_is_replaced_beside_others(run_ranks, tmp_path, whole, name):
    if name != "mtp":  # whose layers are in no base
        base = tmp_path / "base"  # has another encoder than the folder that who joins reads
        alone = {"metrics_path": None, "hdp_survive": False, "train_iters": 2}
        trained(run_ranks, replace(whole, save=base, **alone, **ALONE))
        whole = replace(whole, pretrained_checkpoint=base)
    whole = replace(lasting(whole), **BESIDE[name])
    traced = {"hdp_trace": tmp_path / "trace", "hdp_trace_steps": f"2-{MANY}"}
    faults = {1: AGAIN if name in ("online", "mtp") else MOMENTS["rows have left"]}
    job = SurvivingJob(replace(whole, **traced), 3, tmp_path, faults, replaces=True)
    require_survived(job, job.run())
    assert any("1 HDP ranks join" in line for line in job.said), job.said
    require_as_alone(run_ranks, job, replace(whole, hdp_online=False))
    trace = read_trace(tmp_path / "trace" / f"steps-2-{MANY}.json")
    require_whole(trace, (0, 2), MANY - 1)
    for member in (0, 2, 3):
        assert any(one["name"] == ENCODER for one in trace.lane(member, "compute"))


def test_a_rank_dies_beside_a_data_plane(run_ranks, tmp_path, whole):
    """Ranks decode by themselves until the next plane answers."""
    pytest.importorskip("ray", reason="no Ray: pip install 'megatron-hdp[ray]'")
    whole, path = lasting(whole), tmp_path / "plane.yaml"
    path.write_text(whole.hdp_data.read_text() + "loaders: {backend: ray, max: 2}\n")
    job = SurvivingJob(replace(whole, hdp_data=path), 3, tmp_path, {1: AGAIN})
    require_survived(job, job.run())
    assert len(job.coordinator.epoch.members) == 2
    require_as_alone(run_ranks, job, whole)
    loaders = [bool(one["loaders"]) for one in job.steps()]
    assert loaders[0] and not all(loaders)


def test_twenty_deaths_and_as_many_joins(run_ranks, tmp_path, whole):
    """Whoever lives through them holds no more in the end than steps alone make it hold."""
    whole = replace(whole, train_iters=200, lr_decay_iters=200, lr=1e-4)
    job = SurvivingJob(replace(whole, **SHARDED), 3, tmp_path, replaces=True)
    deaths = Deaths(lambda: len(job.steps()))
    require_survived(job, job.run(deaths.disturb, timeout_s=600))
    assert len(deaths.killed) == 20 and sum("join" in line for line in job.said) >= 20
    require_as_alone(run_ranks, job, whole, within=1e-9)
    memory, descriptors = deaths.grown()
    print(f"14 deaths: {memory:.0f} bytes, {descriptors} descriptors")
    assert memory < 8e6 and descriptors < 10


def test_kills_in_any_phase(run_ranks, tmp_path, whole):
    """Also while they go into the next epoch, save and evaluate; the seed is printed."""
    seed = random.SystemRandom().randrange(2**32)
    print("seed", seed)
    (tmp_path / "notes").write_bytes(bytes(MOST_MEMBERS + 8 + 16 * MOST_BEGUN))
    campaign = Campaign(Notes(tmp_path / "notes"), 20, random.Random(seed))
    whole = replace(whole, train_iters=10_000, lr_decay_iters=10_000, lr=1e-4, eval_interval=3)
    saved = {"save": tmp_path / "saved", "save_interval": 2}
    job = LongJob(replace(whole, **GATHERED, **saved), RANKS, tmp_path, campaign.notes, True)
    require_survived(job, job.run(campaign.disturb, timeout_s=700))
    assert len(campaign.killed) == 20
    print(Counter(name for name, *_ in campaign.killed), Counter(campaign.notes.redone().values()))
    require_as_alone(run_ranks, job, replace(whole, train_iters=len(job.steps())), within=1e-9)
