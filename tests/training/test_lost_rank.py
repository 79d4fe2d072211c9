"""A rank is lost, or joins: no step is lost, none counts twice, and nothing else changes."""

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from unittest import mock

import psutil
import pytest
import torch

from megatron_hdp.exit_codes import ExitCode
from megatron_hdp.launching.coordinator import replicas_of
from megatron_hdp.megatron import parallel
from megatron_hdp.megatron.world.recovery import ENTERS, PREPARES, Recovery
from megatron_hdp.training import survival
from tests.gradient_equivalence.cases import RECOMPUTE
from tests.support.epochs import Deaths, DiesIn, IsCutOffIn, SurvivingJob
from tests.support.gradients import EXPERTS, tiny_arguments, write_corpus
from tests.support.scripts import SCRIPTS
from tests.support.sources import WEIGHTS, data_file, write_sources
from tests.training.epoch_traces import read_trace, require_whole
from tests.training.runs import LENGTHS, curve, flags, lines_of, run

EXACT = 1e-12
SLOW = pytest.mark.slow
pytestmark = pytest.mark.timeout(1800)  # a busy machine takes ten times as long as a quiet one
PATIENCE_S = 800.0


def surviving(folder, **changes):
    settings = {"hdp_survive": True, "metrics_path": folder / "metrics.jsonl", "log_interval": 1}
    return run(write_corpus(folder, LENGTHS), **(settings | changes))


def reference(run_ranks, folder, num_ranks=1, **changes):
    changes = {"hdp_tokens_per_rank": 128, "metrics_path": folder / "reference.jsonl"} | changes
    run_ranks(num_ranks, curve, run(write_corpus(folder, LENGTHS), **changes))
    return lines_of(folder / "reference.jsonl")


def require_same_steps(job, expected, within=EXACT):
    found = job.steps()
    assert [one["step"] for one in found] == [one["step"] for one in expected], job.said
    for one, other in zip(found, expected, strict=True):
        for name in ("loss", "grad_norm", "validation_loss"):
            if other[name] is not None:
                assert abs(one[name] / other[name] - 1) < within, (one["step"], name)


def test_what_does_not_survive_is_refused():
    words = "found TORCH_NCCL_ASYNC_ERROR_HANDLING=1, expected 0"
    arguments = tiny_arguments(None, hdp_survive=True)
    with (
        mock.patch.dict(os.environ, {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}),
        mock.patch.object(parallel, "compute_device", lambda: torch.device("cuda")),
        pytest.raises(ValueError, match=words),
    ):
        survival.pretrain(arguments, mock.sentinel.membership)


def require_survived(job, codes):
    words = "".join(f"--- {name}\n{text[-3000:]}" for name, text in job.printed().items())
    assert codes == [ExitCode.DONE] * len(codes), "\n".join([*job.said, words])


BEFORE_THE_VOTE = DiesIn("_require_finite_gradients", 3, module="megatron_hdp.training.loop")
"""All that a step changes without its commit is changed by then."""
MOMENTS = {
    "in the step": DiesIn("gradients_of_step", 3),
    "before the vote": BEFORE_THE_VOTE,
    "before the commit": DiesIn("apply_step", 3),
    "behind the commit": DiesIn("apply_step", 3, behind=True),
    "before metrics": DiesIn("write_step", 3),
    "behind metrics": DiesIn("write_step", 3, behind=True),
    "behind the checkpoint": DiesIn("save_if_due", 3, behind=True),
}


def each_moment(moments, default):
    """Ranks 0 and 2 at each of them: all slow but that of rank 0 at `default`."""
    cases = [
        pytest.param(one, victim, marks=() if (one, victim) == (default, 0) else SLOW)
        for one in moments
        for victim in (0, 2)
    ]
    return pytest.mark.parametrize(("moment", "victim"), cases)


@each_moment(MOMENTS, "behind the commit")
def test_a_rank_dies(run_ranks, tmp_path, moment, victim):
    traced = {"hdp_trace": tmp_path / "trace", "hdp_trace_steps": "2-5"}
    arguments = surviving(tmp_path, save=tmp_path / "saved", save_interval=1, **traced)
    job = SurvivingJob(arguments, 3, tmp_path, {victim: MOMENTS[moment]})
    require_survived(job, job.run())
    left = tuple(one for one in range(3) if one != victim)
    assert job.coordinator.epoch.members == left
    require_same_steps(job, reference(run_ranks, tmp_path))
    trace = read_trace(tmp_path / "trace" / "steps-2-5.json")
    require_whole(trace, left, steps=4)
    (lost,) = trace.lane(victim, "recovery")
    assert lost["name"] == "lost" and "SIGKILL" in lost["args"]["why"]
    (epoch,) = trace.epochs()
    assert epoch["args"]["lost"] == [victim] and epoch["args"]["joined"] == []
    behind = {"in the step": (2,), "before the vote": (2,)}.get(moment, (3,))
    behind = (2, 3) if "commit" in moment else behind  # others have applied it, or have heard first
    assert epoch["args"]["behind_step"] in behind
    for member in (victim, *left):
        run = [one for one in trace.lane(member, "compute") if one["ts"] < epoch["ts"]]
        assert run, f"nothing of member {member} before the loss"
    if moment == "before the vote":  # what is run again was run
        passes = [Counter(one["name"] for one in trace.left(member)) for member in left]
        assert all(any("forward" in name for name in one) for one in passes), passes


def test_who_has_not_applied_a_step_that_others_have_applies_it(run_ranks, tmp_path):
    """It does not hear of the vote, which needs its own."""
    faults = {
        1: IsCutOffIn("require_finite", 3, behind=True),
        2: DiesIn("apply_step", 3, behind=True),
    }
    job = SurvivingJob(surviving(tmp_path), 3, tmp_path, faults)
    require_survived(job, job.run())
    require_same_steps(job, reference(run_ranks, tmp_path))


def test_too_few_are_left(run_ranks, tmp_path):
    """The longest sequence needs two ranks of 64 tokens."""
    arguments = surviving(tmp_path, save=tmp_path / "saved", hdp_survive_pause_seconds=0.2)
    job = SurvivingJob(arguments, 2, tmp_path, {0: DiesIn("gradients_of_step", 3)})
    assert job.run() == [ExitCode.BLAMES_ANOTHER]
    assert any("a step needs 2" in line for line in job.said), job.said
    assert "expected 2" in job.printed()["member-1"]
    assert (tmp_path / "saved" / "iter_0000002").is_dir()
    assert [one["step"] for one in job.steps()] == [1, 2]


SHARDED = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "ddp_bucket_size": 1000}
ACROSS = EXPERTS | {"expert_model_parallel_size": 2}
REPLACED = {  # settings, ranks, processes that leave together
    "one": ({"hdp_online": True}, 3, 1),
    "sharing": (ACROSS, 4, 2),
    "sharing-sharded": (ACROSS | SHARDED, 4, 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", REPLACED)
def test_lost_ranks_are_replaced(run_ranks, tmp_path, how):
    changes, num_ranks, together = REPLACED[how]
    steps = {"train_iters": 40, "lr_decay_iters": 40}
    killed = []

    def disturb(job):
        members, done = job.coordinator.epoch.members, len(job.steps())
        if done >= 4 + 10 * len(killed) and len(members) == num_ranks:
            victim = members[len(killed) * together % num_ranks]
            if victim in job.processes:
                killed.append(victim)
                job.kill(victim)

    traced = {"hdp_trace": tmp_path / "trace", "hdp_trace_steps": "2-40"}
    arguments = surviving(tmp_path, **steps, **traced, **changes)
    job = SurvivingJob(arguments, num_ranks, tmp_path, replaces=True)
    require_survived(job, job.run(disturb))
    assert len(killed) >= 2
    path, goes_back = tmp_path / "trace" / "steps-2-40.json", "use_distributed_optimizer" in changes
    require_traced_joins(job, path, num_ranks, together, goes_back)
    assert any(f"{together} HDP ranks join" in line for line in job.said)
    alone = changes | {"hdp_online": False}
    require_same_steps(job, reference(run_ranks, tmp_path, together, **steps, **alone))


def require_traced_joins(job, path, num_ranks, together, goes_back):
    trace = read_trace(path)
    epochs = [one["args"] for one in trace.epochs()]
    joined = {member for one in epochs for member in one["joined"]}
    lost = {member for one in epochs for member in one["lost"]}
    # one that died when the others were behind the traced steps is not among them
    units = {one.member // together for one in job.died}  # whose members leave together
    assert joined and {one // together for one in lost} <= units and len(lost) >= 2
    for member in joined:
        names = [one["name"] for one in trace.lane(member, "recovery")]
        assert names[:2] == [ENTERS, PREPARES] and trace.lane(member, "compute")
    require_whole(trace, set(range(num_ranks)) - lost, 39, goes_back)
    picture = path.with_name("lost-rank.png")
    script = [SCRIPTS / "dev" / "plot_lost_rank.py", path, picture]
    subprocess.run([sys.executable, *script], check=True, timeout=570)
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["whole", "sharded"])
def test_twenty_deaths_and_as_many_joins(run_ranks, tmp_path, how):
    """Whoever lives through them holds no more in the end than steps alone make it hold."""
    settings = {"train_iters": 200, "lr_decay_iters": 200, **({}, SHARDED)[how == "sharded"]}
    job = SurvivingJob(surviving(tmp_path, **settings), 3, tmp_path, replaces=True)
    deaths = Deaths(lambda: len(job.steps()))
    require_survived(job, job.run(deaths.disturb, timeout_s=900))
    assert len(deaths.killed) == 20 and sum("join" in line for line in job.said) >= 20
    expected = reference(run_ranks, tmp_path, train_iters=200, lr_decay_iters=200)
    require_same_steps(job, expected, within=1e-10)  # what is rounded otherwise grows with steps
    memory, descriptors = deaths.grown()
    print(f"14 deaths: {memory:.0f} bytes, {descriptors} descriptors")
    assert memory < 4e6 and descriptors < 10  # what steps hold is known to 1 MB or so


def a_rank_of_the_command_dies(tmp_path, num_ranks, spares=0, by=signal.SIGKILL, **changes):
    """Its exit code, and what it has printed."""
    metrics = tmp_path / "metrics.jsonl"
    write_corpus(tmp_path, LENGTHS)
    rank = flags(
        tmp_path,
        **{"global_batch_size": 8, "hdp_tokens_per_rank": 60, "hdp_survive": True},
        **{"metrics_path": metrics, "fp64": True, "train_iters": 400} | changes,
    )
    command = ["-m", "megatron_hdp.cli.main", "launch", "--nproc-per-node", str(num_ranks)]
    command += ["--spares-per-node", str(spares)]
    command = [sys.executable, *command, "-m", "megatron_hdp.pretrain_gpt", *rank]
    with (tmp_path / "log").open("w") as log:
        job = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        wait_until(lambda: metrics.exists() and len(lines_of(metrics)) > 3, job)
        wait_until(lambda: len(psutil.Process(job.pid).children()) == num_ranks + spares, job)
        # by time: numbers of processes begin anew, and a spare may have the least
        first = min(psutil.Process(job.pid).children(), key=psutil.Process.create_time)
        first.send_signal(by)
        code = job.wait(PATIENCE_S)
    finally:
        job.kill()
    return code, (tmp_path / "log").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("spares", [0, 1])
def test_the_command_replaces_a_rank(tmp_path, spares):
    code, text = a_rank_of_the_command_dies(tmp_path, 3, spares)
    assert code == ExitCode.DONE and ("starts members 4" in text) == bool(spares)
    assert "was killed by SIGKILL" in text and "1 HDP ranks join" in text
    steps = [one["step"] for one in lines_of(tmp_path / "metrics.jsonl")]
    assert steps == list(range(1, 401))


@pytest.mark.slow
def test_the_command_goes_on_without_a_rank_that_is_stopped(tmp_path):
    """It is killed before it could wake, and write."""
    code, text = a_rank_of_the_command_dies(tmp_path, 3, by=signal.SIGSTOP)
    assert code == ExitCode.DONE
    assert "member 0 was stopped for 10 s: it is given up" in text
    assert text.index("it is given up") < text.index("epoch 1: 2 HDP ranks (member 0 was killed by")
    steps = [one["step"] for one in lines_of(tmp_path / "metrics.jsonl")]
    assert steps == list(range(1, 401))


@pytest.mark.slow
def test_nobody_is_left_who_has_all_experts(tmp_path):
    as_flags = {"add_bias_linear": None, "disable_bias_linear": True}
    code, text = a_rank_of_the_command_dies(tmp_path, 2, **ACROSS | as_flags)
    assert code == ExitCode.BLAMES_ANOTHER
    assert "survives no loss of a rank" in text and "nobody is left who has the weights" in text


def wait_until(is_so, job):
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert job.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_random_moments(run_ranks, tmp_path):
    """One run after another, each of which loses a rank at a moment that nobody chose.

    Fewer than 25, where the machine has other work.
    """
    until = time.monotonic() + 200.0
    expected, seed = reference(run_ranks, tmp_path), random.SystemRandom().randrange(2**32)
    print("seed", seed)
    chance = random.Random(seed)
    for number in range(25):
        if number > 2 and time.monotonic() > until:
            break
        folder = tmp_path / str(number)
        folder.mkdir()
        arguments = surviving(folder, save=folder / "saved", save_interval=2)
        wait_s, victim, begun = chance.uniform(0, 1.5), chance.randrange(3), []

        def disturb(job, wait_s=wait_s, victim=victim, begun=begun):
            begun.append(time.monotonic())
            if time.monotonic() - begun[0] > wait_s and victim in job.processes and not job.died:
                job.kill(victim)

        job = SurvivingJob(arguments, 3, folder)
        codes = job.run(disturb, timeout_s=120)
        if victim in job.coordinator.epoch.members and job.codes[victim]:
            codes.remove(job.codes[victim])  # when the others had ended
        require_survived(job, codes)
        require_same_steps(job, expected)


SPREAD = {
    "sharded": SHARDED,
    "gathered-beside": SHARDED | {"overlap_param_gather": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("how", SPREAD)
def test_a_rank_dies_with_its_shard(run_ranks, tmp_path, how, moment):
    arguments = surviving(tmp_path, save=tmp_path / "saved", save_interval=2, **SPREAD[how])
    job = SurvivingJob(arguments, 3, tmp_path, {1: MOMENTS[moment]}, replaces=True)
    require_survived(job, job.run())
    require_same_steps(job, reference(run_ranks, tmp_path))


EVALUATED = {"eval_iters": 2, "eval_interval": 1, "split": "4,4,0"}
BETWEEN_BATCHES = DiesIn("_require_finite_loss", 5, module="megatron_hdp.training.loop")
"""Of the evaluation behind step 2: that looks at the losses of each step, too."""


def requires_training_mode(member):
    """A step that is run with what an evaluation has left fails."""
    original = survival.gradients_of_step

    def called(job, *args):
        assert all(module.training for chunk in job.chunks for module in chunk.modules())
        return original(job, *args)

    survival.gradients_of_step = called


@pytest.mark.slow
@pytest.mark.parametrize("how", [{}, SHARDED])
def test_a_rank_dies_in_evaluation(run_ranks, tmp_path, how):
    arguments = surviving(tmp_path, **EVALUATED, **how)
    faults = {0: requires_training_mode, 1: BETWEEN_BATCHES, 2: requires_training_mode}
    job = SurvivingJob(arguments, 3, tmp_path, faults)
    require_survived(job, job.run())
    require_same_steps(job, reference(run_ranks, tmp_path, **EVALUATED))


TP2 = {"tensor_model_parallel_size": 2, "make_vocab_size_divisible_by": 64}
PP2 = {"pipeline_model_parallel_size": 2, "hdp_tokens_per_rank": 128}
BIASED = EXPERTS | {
    "moe_router_enable_expert_bias": True,
    "moe_router_score_function": "sigmoid",
    "moe_router_bias_update_rate": 0.01,
}
LAYOUTS = {  # settings, ranks of one replica
    "tp2": (TP2 | {"hdp_tokens_per_rank": 128}, 2),
    "tp2-sharded": (TP2 | SHARDED | {"hdp_tokens_per_rank": 128}, 2),
    "pp2": (PP2, 2),
    "pp2-sharded": (PP2 | SHARDED, 2),
    "pp2-v2": (PP2 | {"num_layers": 4, "num_virtual_stages_per_pipeline_rank": 2}, 2),
    "recompute": (RECOMPUTE, 1),
    "offload": ({"hdp_offload": "auto", "num_layers": 4}, 1),
    "expert-bias": (BIASED, 1),
    "mtp": ({"mtp_num_layers": 1}, 1),
}
APART = {
    **{"sequence_parallel": True, "expert_model_parallel_size": 4},
    **{"expert_tensor_parallel_size": 1},
}
SHARING = {  # settings, processes that leave together
    "two": (ACROSS, 2),
    "bias": (ACROSS | BIASED, 2),
    "sharded": (ACROSS | SHARDED, 2),
    "gathered-beside": (ACROSS | SHARDED | {"overlap_param_gather": True}, 2),
    "tp2": (ACROSS | TP2 | APART, 4),
    "pp2-sharded": (ACROSS | PP2 | SHARDED, 4),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_dies_in_a_layout(run_ranks, tmp_path, layout):
    changes, replica = LAYOUTS[layout]
    last = 3 if replica == 2 else 2
    faults = {last: BEFORE_THE_VOTE}
    job = SurvivingJob(surviving(tmp_path, **changes), last + 1, tmp_path, faults, replaces=True)
    require_survived(job, job.run())
    expected = reference(run_ranks, tmp_path, num_ranks=replica, **(changes | WHOLE))
    require_same_steps(job, expected)


WHOLE = {"hdp_tokens_per_rank": 128}


@pytest.mark.slow
def test_a_rank_dies_in_a_mixture(run_ranks, tmp_path):
    """All draw the sources of the step again, where the run was in each."""
    changes = {"data_path": (), "split": None}
    changes["hdp_data"] = data_file(write_sources(tmp_path), WEIGHTS)
    faults = {2: BEFORE_THE_VOTE}
    job = SurvivingJob(surviving(tmp_path, **changes), 3, tmp_path, faults, replaces=True)
    require_survived(job, job.run())
    expected = reference(run_ranks, tmp_path, **(changes | WHOLE))
    require_same_steps(job, expected)
    drawn = [[list(one["sources"].values()) for one in run] for run in (job.steps(), expected)]
    counts, wanted = ([[it["tokens"] for it in one] for one in run] for run in drawn)
    assert counts == wanted and len(wanted[0]) == 3


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["before the vote", "behind the commit"])
@pytest.mark.parametrize("layout", SHARING)
def test_those_that_share_experts_leave_together(run_ranks, tmp_path, layout, moment):
    changes, together = SHARING[layout]
    ranks, faults = 2 * together, {1: MOMENTS[moment]}
    job = SurvivingJob(surviving(tmp_path, **changes), ranks, tmp_path, faults, replaces=True)
    require_survived(job, job.run())
    stages = changes.get("pipeline_model_parallel_size", 1)
    lost, left = replicas_of(range(ranks), together, stages)
    members = set(job.coordinator.epoch.members)
    assert set(left) <= members and not members & set(lost)
    expected = reference(run_ranks, tmp_path, num_ranks=together, **(changes | WHOLE))
    require_same_steps(job, expected)


IN_STEP = DiesIn("gradients_of_step", 3)
IN_GROUPS = DiesIn("enter_job", 2, module="megatron_hdp.megatron.parallel")
SEVERAL = {
    "two at once": ({}, {1: IN_STEP, 2: IN_STEP}),
    "another one during recovery": ({}, {1: IN_STEP, 2: DiesIn("hdp_steps", 2)}),
    "the first rank during recovery": ({}, {1: IN_STEP, 0: DiesIn("hdp_steps", 2)}),
    "another one before its groups": (SHARDED, {2: IN_STEP, 0: IN_GROUPS}),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", SEVERAL)
def test_several_die(run_ranks, tmp_path, how):
    changes, faults = SEVERAL[how]
    job = SurvivingJob(surviving(tmp_path, **changes), 4, tmp_path, faults)
    require_survived(job, job.run())
    assert len(job.coordinator.epoch.members) == 2
    require_same_steps(job, reference(run_ranks, tmp_path))


def ends_before_it_stands_behind_a_step(member):
    """Of one that joins: it has what the others have, and its epoch is over."""
    original = Recovery.keep

    def keep(self, *args):
        if not self._kept and self.membership.is_over.wait(20.0):
            raise RuntimeError("a planted failure of communication")
        original(self, *args)

    Recovery.keep = keep


@pytest.mark.slow
@pytest.mark.parametrize("how", REPLACED)
def test_another_one_dies_while_one_joins(run_ranks, tmp_path, how):
    """Who joins was at no step yet: it joins anew."""
    changes, ranks, together = REPLACED[how]
    ranks += together
    first = ranks  # of those that join
    dies = DiesIn("Recovery.moved", 3, module=Recovery.__module__)  # in the third epoch
    faults = {ranks - 1: IN_STEP, together: dies}
    faults |= dict.fromkeys(range(first, first + together), ends_before_it_stands_behind_a_step)
    steps = {"train_iters": 40, "lr_decay_iters": 40}
    job = SurvivingJob(surviving(tmp_path, **steps, **changes), ranks, tmp_path, faults, True)
    require_survived(job, job.run())
    assert len(job.died) >= 2 and set(range(first, first + together)) <= set(job.codes), job.said
    alone = changes | {"hdp_online": False}
    require_same_steps(job, reference(run_ranks, tmp_path, together, **steps, **alone))


@pytest.mark.slow
def test_who_could_not_make_groups_makes_them_with_one_that_joins(run_ranks, tmp_path):
    """Its epoch ended while it did; the next one needs a rank to which that did not happen."""
    steps = {"train_iters": 40, "lr_decay_iters": 40}
    faults = {2: IN_STEP, 1: IN_GROUPS}
    job = SurvivingJob(surviving(tmp_path, **steps), 3, tmp_path, faults, replaces=True)
    require_survived(job, job.run())
    assert any("2 HDP ranks (member 1 was killed" in line for line in job.said), job.said
    require_same_steps(job, reference(run_ranks, tmp_path, **steps))


LOST = {
    "without copies": ({"hdp_optimizer_copies": "off"}, {1: IN_STEP}),
    "with its neighbour": ({}, {1: IN_STEP, 2: IN_STEP}),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", LOST)
def test_a_shard_that_is_lost_ends_the_job(run_ranks, tmp_path, how):
    changes, faults = LOST[how]
    job = SurvivingJob(surviving(tmp_path, **SHARDED, **changes), 4, tmp_path, faults)
    assert set(job.run()) == {ExitCode.BLAMES_ANOTHER}
    words = job.printed()["member-0"]
    assert "a part of the optimizer is lost" in words and "latest checkpoint" in words
