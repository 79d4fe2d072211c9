"""Runs that learn while they train, on real ranks of which one is slow."""

import time
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch.distributed as dist

from megatron_hdp.data.steps import work_of
from megatron_hdp.megatron.execution.executor import HdpExecutor
from megatron_hdp.megatron.step import hdp_steps, learning
from megatron_hdp.options.hdp import ONLINE
from megatron_hdp.planner import CostModel
from megatron_hdp.runtime.health import DisagreementError
from megatron_hdp.training.loop import pretrain
from tests.gradient_equivalence.case import ACROSS, PP2, TP2
from tests.gradient_equivalence.settings import virtual
from tests.support.gradients import EXPERTS, tiny_arguments, write_corpus
from tests.support.ranks import RankError
from tests.support.sources import WEIGHTS, data_file, mixed_arguments, write_sources
from tests.training import runs

SECONDS_PER_TOKEN = 1e-3  # far more than the model takes, on busy cores too
SLOW_RANK = 1
VIRTUAL = virtual(2)
LAYOUTS = {"pipeline": PP2, "virtual": VIRTUAL, "tensor": TP2}
PLAIN_AND_VIRTUAL = [
    pytest.param(2, {}, id="plain"),
    pytest.param(4, VIRTUAL, id="virtual", marks=pytest.mark.slow),
]
FORWARD_STEP = HdpExecutor._forward_step


def slowed(speeds):
    """A forward that takes so long by its tokens and its rank's speed that nothing else counts."""

    def forward_step(self, step, micro_batches, model):
        taken = []

        def noting():
            for micro_batch, tensors in micro_batches:
                taken.append(len(micro_batch.tokens))
                yield micro_batch, tensors

        found = FORWARD_STEP(self, step, noting(), model)
        time.sleep(SECONDS_PER_TOKEN * taken[-1] / speeds[dist.get_rank()])
        return found

    return forward_step


def trained(arguments, speeds):
    """Body of a rank: metrics of every step, and the log."""
    with mock.patch.object(HdpExecutor, "_forward_step", slowed(speeds)):
        return runs.trained(arguments)


@pytest.fixture
def prefix(tmp_path):
    lengths = np.random.default_rng(3).integers(20, 100, 400)
    return write_corpus(tmp_path, lengths.tolist())


def run(prefix, **overrides):
    settings = {
        "train_iters": 8,
        "lr_decay_iters": 12,
        "global_batch_size": 24,
        "hdp_tokens_per_rank": 200,
        "hdp_online": True,
        "seq_length": 100,
    }
    return tiny_arguments(prefix, **(settings | overrides))


def observed_as(speeds):
    """Observations without a clock: work by the cost model, over the planted speeds."""

    def observation(self, step, outcome):
        work = work_of(step.share, self._base, self._place.num_stages)
        seconds = (1.5 * work[0] + 2.0 * work[1] + 1e-6 * work[2]) / speeds[self._place.hdp_rank]
        return [*work.tolist(), float(seconds)]

    return observation


def trained_without_a_clock(arguments, speeds):
    """Body of a rank: like `trained`, and every run measures the same."""
    with mock.patch.object(learning.Learning, "_observation", observed_as(speeds)):
        return runs.trained(arguments)


def planned(found):
    """What tells one plan from another, and what was learnt by then."""
    return [
        (one.step, one.loss, one.planned_efficiency, one.slowest_rank_speed, one.cost_model_changes)
        for one in found
    ]


@pytest.mark.slow  # by the clock: other work on the cores is noise
@pytest.mark.parametrize("capacity", [200, 60])  # with 60 nearly all micro-batches are rings
def test_a_slow_rank_is_found_and_its_work_moves(run_ranks, prefix, capacity):
    arguments = run(prefix, hdp_tokens_per_rank=capacity)
    (found, log), *_ = run_ranks(2, trained, arguments, (1.0, 0.4))
    lines = [line for line in log.splitlines() if "runs at speed" in line]
    assert lines and all(line.startswith("rank 1 (host ") for line in lines), lines
    first = next(one.step for one in found if one.slow_ranks)
    assert first <= 5 and found[first - 1].slowest_rank_speed < 0.75
    if capacity == 200:  # in rings of two both ranks must take their half
        shares = [one.measured_efficiency for one in found]  # of what no plan can beat
        assert np.median(shares[5:]) > np.median(shares[:4]) + 0.1, shares


@pytest.mark.slow
def test_a_run_goes_on_exactly(run_ranks, prefix, tmp_path):
    traced = {"hdp_trace": tmp_path / "trace", "hdp_trace_steps": "8"}
    whole = run(prefix, save=tmp_path / "saved", save_interval=4, **traced)
    (expected, log), *_ = run_ranks(2, trained_without_a_clock, whole, (1.0, 0.5))
    assert expected[-1].cost_model_changes >= 2 and "speed 0.5," in log
    assert '"speeds":[[1,0.5]]' in (tmp_path / "trace" / "steps-8.json").read_text()
    resumed = replace(whole, save=None, save_interval=None, load=tmp_path / "saved", ckpt_step=4)
    (found, _), *_ = run_ranks(2, trained_without_a_clock, resumed, (1.0, 0.5))
    assert planned(found) == planned(expected)[4:]
    (found, log), *_ = run_ranks(3, trained_without_a_clock, resumed, (1.0, 1.0, 1.0))
    words = "coefficients are kept, speeds of ranks are dropped (of 2 HDP ranks, this run has 3)"
    assert log.count(words) == 1
    assert [one.slow_ranks for one in found] == [0] * 4
    assert [one.loss for one in found] == pytest.approx([one.loss for one in expected[4:]], 1e-9)


@pytest.mark.slow
def test_what_no_longer_fits_is_dropped(run_ranks, prefix, tmp_path):
    whole = run(prefix, save=tmp_path / "saved", save_interval=4)
    run_ranks(2, trained_without_a_clock, whole, (1.0, 0.5))
    resumed = replace(whole, save=None, save_interval=None, load=tmp_path / "saved", ckpt_step=4)
    slower = tmp_path / "speeds.txt"
    slower.write_text("1\n0.9\n")
    other = replace(resumed, hdp_rank_speeds=slower)
    (_, log), *_ = run_ranks(2, trained_without_a_clock, other, (1.0, 1.0))
    assert "speeds of ranks are dropped (--hdp-rank-speeds says others than the" in log
    other = replace(resumed, hdp_online=False)
    (found, log), *_ = run_ranks(2, trained_without_a_clock, other, (1.0, 1.0))
    assert log.count("learnt of its costs is dropped: --hdp-online is not given") == 1
    assert found[0].slow_ranks is None
    path = tmp_path / "cost.json"
    path.write_bytes(CostModel(a=1e-9, b=1e-6, kv_bytes_per_token=64).to_json())
    other = replace(resumed, hdp_cost_model=path)
    (_, log), *_ = run_ranks(2, trained_without_a_clock, other, (1.0, 1.0))
    assert "costs is dropped: it began with another cost model" in log


@pytest.mark.parametrize("ranks, layout", PLAIN_AND_VIRTUAL)
def test_what_is_learnt_changes_no_gradient(run_ranks, prefix, ranks, layout):
    stays = run(prefix, hdp_online=False, hdp_strategy="static", **layout)
    (expected, _), *_ = run_ranks(ranks, trained_without_a_clock, stays, (1.0, 0.3))
    (found, _), *_ = run_ranks(ranks, trained_without_a_clock, run(prefix, **layout), (1.0, 0.3))
    assert found[-1].cost_model_changes >= 2
    assert found[-1].slow_ranks == 1
    for one, other in zip(found, expected, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-10)
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-10)


def observing_otherwise(arguments):
    """Body of a rank: one rank takes the others' times for others."""

    def observe(state, observations):
        return OBSERVE(state, observations * (1 + 1e-9 * (dist.get_rank() == 1)))

    with mock.patch.object(learning, "observe", observe):
        pretrain(arguments)


OBSERVE = learning.observe


def test_ranks_that_learn_different_things_stop(run_ranks, prefix):
    with pytest.raises(RankError, match="what the run has learnt: ") as caught:
        run_ranks(2, observing_otherwise, run(prefix))
    assert DisagreementError.__name__ in str(caught.value)


def counted(arguments):
    """Body of a rank: exchanges, and what the last step's position would save."""
    positions = []
    run_step = hdp_steps.HdpSteps.run

    def noting(self, *args, **kwargs):
        report = run_step(self, *args, **kwargs)
        positions.append(report.position_after)
        return report

    with (
        mock.patch.object(learning, "exchanged", side_effect=learning.exchanged) as exchanges,
        mock.patch.object(hdp_steps.HdpSteps, "run", noting),
    ):
        pretrain(arguments)
    return exchanges.call_count, positions[-1].to_record()


def test_off_means_off(run_ranks, prefix):
    (count, record), *_ = run_ranks(2, counted, run(prefix, hdp_online=False, train_iters=3))
    assert count == 0 and "costs" not in record
    (count, record), *_ = run_ranks(2, counted, run(prefix, train_iters=3))
    assert count == 3 and record["costs"]["steps"] == 3


def test_a_rank_without_the_flag_is_told(run_ranks, prefix):
    with pytest.raises(RankError, match="--hdp-online"):
        run_ranks(2, with_odd_flags, run(prefix), run(prefix, hdp_online=False))


def with_odd_flags(arguments, odd):
    """Body of a rank: the second one's cost model is another word; files are not compared."""
    mine = replace(arguments, hdp_online=False, hdp_cost_model=ONLINE)
    pretrain(mine if dist.get_rank() == 0 else odd)


def test_experts_across_ranks_are_refused(run_ranks, prefix):
    with pytest.raises(RankError, match="found experts across 2 HDP ranks, expected them inside"):
        run_ranks(2, trained_without_a_clock, run(prefix, **EXPERTS, **ACROSS), (1.0, 1.0))


def test_a_plan_of_the_users_own_is_refused(run_ranks, tmp_path):
    folder = write_sources(tmp_path)
    (tmp_path / "mine.py").write_text("def plan(planner, position): ...\n")
    path = data_file(folder, f"{WEIGHTS}\nprimitives: {{plan: mine.py:plan}}")
    with pytest.raises(RankError, match="found primitives: plan: .*mine.py:plan, expected the"):
        run_ranks(1, pretrain, mixed_arguments(folder, path, hdp_online=True))


@pytest.mark.parametrize("ranks, layout", PLAIN_AND_VIRTUAL)
def test_speeds_of_a_file(run_ranks, prefix, tmp_path, ranks, layout):
    path = tmp_path / "speeds.txt"
    path.write_text("1\n0.25\n")
    known = run(prefix, train_iters=1, hdp_online=False, **layout)
    (plain, _), *_ = run_ranks(ranks, trained_without_a_clock, known, ())
    known = replace(known, hdp_rank_speeds=path)
    (found, _), *_ = run_ranks(ranks, trained_without_a_clock, known, ())
    assert found[0].micro_batches_max > plain[0].micro_batches_max
    assert found[0].loss == pytest.approx(plain[0].loss, rel=1e-10)
    path.write_text("1\n")
    with pytest.raises(
        RankError, match="has 1 speeds, expected one a line for each of the run's 2"
    ):
        run_ranks(ranks, trained_without_a_clock, known, ())


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_slow_gpu_of_a_wide_rank_is_named(run_ranks, prefix, layout):
    arguments = run(prefix, **LAYOUTS[layout])
    (found, log), *_ = run_ranks(4, trained, arguments, (1.0, 1.0, 1.0, 0.4))
    assert found[-1].slow_ranks == 1 and found[-1].slowest_rank_speed < 0.75
    lines = [line for line in log.splitlines() if "runs at speed" in line]
    assert lines and all("HDP rank 1)" in line for line in lines), lines
    assert layout == "tensor" or lines[0].startswith("rank 3 "), lines


@pytest.mark.slow
def test_a_data_plane_learns_alike(run_ranks, tmp_path):
    pytest.importorskip("ray", reason="no Ray: pip install 'megatron-hdp[ray]'")
    folder = write_sources(tmp_path)
    settings = {"train_iters": 12, "lr_decay_iters": 12, "hdp_tokens_per_rank": 100}
    local = mixed_arguments(folder, data_file(folder), hdp_online=True, **settings)
    (expected, _), *_ = run_ranks(2, as_with_a_plane, local)
    (found, _), *_ = run_ranks(2, as_with_a_plane, replace(local, hdp_loaders="ray"))
    assert planned(found) == planned(expected) and found[-1].cost_model_changes >= 2


def as_with_a_plane(arguments):
    """Body of a rank: plans follow as far behind as those of a data plane."""
    with mock.patch.object(learning, "BEHIND", learning.BEHIND_WITH_PLANE):
        return trained_without_a_clock(arguments, (1.0, 0.5))
