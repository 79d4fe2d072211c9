"""What is wrong with a checkpoint or its folder is one sentence, the same on every rank.

Randomly damaged, a checkpoint loads as it was saved, or is refused in a sentence.
"""

import io
import os
import random
import re
import shutil
from contextlib import redirect_stdout
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_hdp.megatron import parallel
from megatron_hdp.megatron.checkpoint.checkpoints import Checkpoints
from megatron_hdp.megatron.checkpoint.checksums import SUMS
from megatron_hdp.megatron.checkpoint.folder import TRACKER, CheckpointFolder
from megatron_hdp.megatron.checkpoint.owner import Ownership
from megatron_hdp.megatron.checkpoint.state import TrainingState
from megatron_hdp.runtime.timeline import Timeline
from megatron_hdp.training import loop
from megatron_hdp.training.training_job import build_training_job
from tests.megatron.checkpoint.small import flip
from tests.megatron.checkpoint.test_verification import DAMAGE
from tests.support.gradients import write_corpus
from tests.training.runs import LENGTHS, curve, refusals, run


@pytest.fixture(scope="module")
def saved(run_ranks, tmp_path_factory):
    """Arguments of a run on two ranks, and its folder with iterations 2 and 4."""
    tmp_path = tmp_path_factory.mktemp("saved")
    whole = run(write_corpus(tmp_path, LENGTHS), use_distributed_optimizer=True)
    folder = tmp_path / "checkpoints"
    run_ranks(2, curve, replace(whole, train_iters=4, save=folder, save_interval=2))
    return whole, folder


@pytest.fixture
def copy(saved, tmp_path):
    """Arguments that resume a copy of the folder for a step, and the copy."""
    whole, folder = saved
    copy = shutil.copytree(folder, tmp_path / "checkpoints")
    return replace(whole, load=copy, train_iters=5), copy


def said(runs):
    """Body of a rank: `refusals`, and what was printed."""
    with redirect_stdout(io.StringIO()) as printed:
        messages = refusals(runs)
    return messages, printed.getvalue()


def one_message(answers):
    """The message that all ranks raise, for each run."""
    assert all(answer == answers[0] for answer in answers), answers
    return answers[0]


CASES = [
    ("__0_0.distcp", "missing"),
    ("__1_0.distcp", "truncated"),
    ("__1_0.distcp", "empty"),
    ("__1_1.distcp", "flipped"),
    ("common.pt", "missing"),
    ("common.pt", "garbage"),
    ("metadata.json", "missing"),
    ("metadata.json", "garbage"),
    (".metadata", "missing"),
    (".metadata", "truncated"),
    (".metadata", "garbage"),
    (SUMS, "garbage"),
]


EACH_DAMAGE = [*CASES[1:4], CASES[5], CASES[8], CASES[11]]


@pytest.mark.parametrize(
    ("kind", "cases"),
    [
        pytest.param("checksums", EACH_DAMAGE, id="each damage"),
        *(
            pytest.param(one, CASES, marks=pytest.mark.slow, id=one)
            for one in ("checksums", "older", "switched-off")
        ),
    ],
)
def test_a_damaged_file_is_named_on_every_rank(run_ranks, copy, tmp_path, kind, cases):
    arguments, folder = copy
    if kind == "older":
        for path in folder.glob(f"*/{SUMS}"):
            path.unlink()
    runs, names = [], []
    for number, (name, damage) in enumerate(cases):
        if kind == "older" and name == SUMS:
            continue
        damaged = shutil.copytree(folder, tmp_path / str(number))
        DAMAGE[damage](damaged / "iter_0000004" / name)
        with_checksums = kind != "switched-off"
        runs.append(replace(arguments, load=damaged, checkpoint_checksums=with_checksums))
        names.append((name, damage))
    messages = one_message(run_ranks(2, refusals, runs))
    for (name, damage), message, one in zip(names, messages, runs, strict=True):
        if kind == "switched-off" and damage == "flipped":
            continue  # nobody looks
        assert message is not None, (name, damage)
        if kind != "switched-off" or damage != "garbage":
            assert re.search(rf"{re.escape(name)}: found .*, expected", message), message
        assert "--ckpt-step 2" in message and f"megatron-hdp verify {one.load}`" in message


@pytest.mark.slow
def test_going_back_to_the_one_before_replaces_the_damaged_one(run_ranks, saved, copy):
    arguments, folder = copy
    flip(folder / "iter_0000004" / "__0_0.distcp", -1000)
    back = replace(arguments, ckpt_step=2, save=folder, save_interval=2)
    (messages, printed), _ = run_ranks(2, said, [back])
    assert messages == [None]
    assert "holds later checkpoints (4): each is replaced when this run, which resumes" in printed
    expected = run_ranks(2, curve, replace(arguments, load=saved[1]))[0]
    assert run_ranks(2, curve, replace(arguments, ckpt_step=4))[0] == expected


def test_an_older_checkpoint_loads_and_that_is_said_once(run_ranks, saved, copy):
    arguments, folder = copy
    for path in folder.glob(f"*/{SUMS}"):
        path.unlink()
    answers = run_ranks(2, said, [arguments])
    assert [messages for messages, _ in answers] == [[None], [None]]
    assert "".join(printed for _, printed in answers).count("saved without checksums") == 1


def test_no_checksums_are_written_where_they_are_switched_off(run_ranks, saved, tmp_path):
    whole, _ = saved
    folder = tmp_path / "checkpoints"
    off = replace(whole, train_iters=1, save=folder, checkpoint_checksums=False)
    run_ranks(2, curve, off)
    assert not list(folder.rglob(SUMS)) and CheckpointFolder(folder).latest() == 1
    assert one_message(run_ranks(2, refusals, [replace(whole, train_iters=2, load=folder)])) == [
        None
    ]


@pytest.mark.slow
def test_a_lost_tracker_is_no_new_beginning(run_ranks, copy):
    arguments, folder = copy
    (folder / TRACKER).unlink()
    before = sorted(folder.rglob("*"))
    again = replace(arguments, save=folder, save_interval=1)
    lost, fresh, foreign = one_message(
        run_ranks(2, refusals, [again, replace(again, load=None), replace(again, finetune=True)])
    )
    for message in (lost, foreign):
        assert f"{TRACKER}: found no such file" in message and "--ckpt-step 4" in message
    assert "holds checkpoints that this run does not come from" in fresh
    assert f"--load {folder}" in fresh
    assert sorted(folder.rglob("*")) == before
    assert one_message(run_ranks(2, refusals, [replace(again, ckpt_step=4)])) == [None]
    assert CheckpointFolder(folder).iterations() == [2, 4, 5]


def not_finite(arguments, odd_rank, name):
    """Body of a rank: the message of a run whose weights break on one rank in the second step."""
    train_step = loop._train_step

    def breaking(job, outputs, progress):
        answer = train_step(job, outputs, progress)
        if progress.iteration == 1 and dist.get_rank() == odd_rank:
            weight = dict(job.chunks[0].module.named_parameters())[name]
            weight.data.view(-1)[-1] = torch.inf
        return answer

    with mock.patch.object(loop, "_train_step", breaking):
        return refusals([arguments])


def test_weights_that_are_not_finite_are_not_saved(run_ranks, saved, tmp_path):
    whole, _ = saved
    folder = tmp_path / "checkpoints"
    name = "decoder.layers.1.mlp.linear_fc2.weight"
    arguments = replace(whole, train_iters=4, save=folder, save_interval=1)
    (message,) = one_message(run_ranks(2, not_finite, arguments, 1, name))
    assert f"after iteration 2 are not finite, first {name} (rank 1), expected" in message
    assert sorted(path.name for path in folder.iterdir()) == ["iter_0000001", TRACKER]


@pytest.mark.slow
def test_a_second_job_is_refused_before_it_trains(run_ranks, copy):
    arguments, folder = copy
    owner = Ownership(folder)
    second = replace(arguments, save=folder)
    (message,) = one_message(run_ranks(2, refusals, [second]))
    assert f"process {os.getpid()} on " in message and "give another --save" in message
    owner.release()
    assert one_message(run_ranks(2, refusals, [second])) == [None]
    assert not list(folder.glob("owner-*"))


TRIALS = 400


def damage(path, draw):
    """Damages a file in a way that is drawn; says how."""
    data = bytearray(path.read_bytes())
    how = draw.choice(["flip", "flip", "flip", "flips", "cut", "empty", "missing", "block"])
    if how == "missing":
        path.unlink()
        return how
    if how in ("flip", "flips"):
        for _ in range(1 if how == "flip" else draw.randrange(2, 50)):
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    elif how == "cut":
        data = data[: draw.randrange(len(data))]
    elif how == "empty":
        data = bytearray()
    else:  # a block of the disk that reads as zeros
        start = draw.randrange(len(data))
        data[start : start + 512] = bytes(len(data[start : start + 512]))
    path.write_bytes(data)
    return how


def state_of(job):
    """Copies of all tensors that a checkpoint restores, and the numbers beside them."""
    found = {name: value.clone() for name, value in job.chunks[0].module.named_parameters()}
    for number, values in enumerate(job.optimizer.optimizer.state.values()):
        for name, value in values.items():
            found[f"{number} {name}"] = torch.as_tensor(value).clone()
    return found, job.scheduler.num_steps


def fuzz(arguments, scratch, with_checksums, seed):
    """Body of a rank: file, damage, message or None, what is wrong after loading, of each trial."""
    parallel.initialise(arguments)
    parallel.set_seeds(arguments.seed)
    with redirect_stdout(io.StringIO()):
        job = build_training_job(arguments, Timeline())
        draw, whole, outcomes = random.Random(seed), arguments.load, []

        def load(folder):
            mine = replace(arguments, load=folder)
            order = job.training.order
            state = TrainingState(mine, order, job.chunks, job.optimizer, job.scheduler)
            return Checkpoints(mine, state, lambda line: None).load()

        progress, expected = load(whole), state_of(job)
        names = sorted(path.name for path in (whole / "iter_0000002").iterdir())
        for trial in range(TRIALS):
            folder = scratch / str(trial)
            shutil.copytree(whole, folder)
            if not with_checksums:
                (folder / "iter_0000002" / SUMS).unlink()
            name = draw.choice([one for one in names if with_checksums or one != SUMS])
            how = damage(folder / "iter_0000002" / name, draw)
            for parameter in job.chunks[0].module.parameters():
                parameter.data.zero_()
            job.scheduler.num_steps = 0
            message, wrong = None, []
            try:
                wrong = [] if load(folder) == progress else ["progress"]
                wrong += differing(state_of(job), expected)
            except ValueError as error:
                message = str(error)
            outcomes.append((name, how, message, wrong))
            shutil.rmtree(folder)
        job.close()
    parallel.finish()
    return outcomes


def differing(found, expected):
    """Names of what differs."""
    (tensors, steps), (others, other_steps) = found, expected
    names = sorted(tensors.keys() ^ others.keys())
    both = tensors.keys() & others.keys()
    names += sorted(name for name in both if not torch.equal(tensors[name], others[name]))
    return names + ["scheduler"] * (steps != other_steps)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("with_checksums", [True, False], ids=["checksums", "older"])
def test_damage_never_loads_wrongly(run_ranks, tmp_path, with_checksums):
    small = {"hidden_size": 8, "num_layers": 1, "ffn_hidden_size": 8, "kv_channels": 2}
    whole = run(write_corpus(tmp_path, LENGTHS), hdp_tokens_per_rank=100, **small)
    folder, seed = tmp_path / "checkpoints", random.randrange(10**6)
    print(f"seed {seed}")
    run_ranks(1, curve, replace(whole, train_iters=2, save=folder, save_interval=2))
    (tmp_path / "scratch").mkdir()
    call = (replace(whole, load=folder), tmp_path / "scratch", with_checksums, seed)
    outcomes = run_ranks(1, fuzz, *call, timeout_s=1500)[0]
    loaded = [(name, how) for name, how, message, _ in outcomes if message is None]
    print(f"{len(loaded)} of {len(outcomes)} loaded: {sorted(set(loaded))}")
    wrong = [(name, how, names) for name, how, _, names in outcomes if names]
    assert not wrong, wrong
    for name, _, message, _ in outcomes:
        assert message is None or re.search(r"found .*expected .*verify", message), (name, message)
    if with_checksums:
        # without the list it is an older one; a block of zeros may be one already
        assert {how for name, how in loaded if name == SUMS} <= {"missing"}, loaded
        assert {how for name, how in loaded if name != SUMS} <= {"block"}, loaded
