"""Randomly damaged, a checkpoint loads as it was saved, or is refused in a sentence."""

import io
import random
import re
import shutil
from contextlib import redirect_stdout
from dataclasses import replace

import pytest
import torch

from megatron_hdp.megatron import parallel
from megatron_hdp.megatron.checkpoint.checkpoints import Checkpoints
from megatron_hdp.megatron.checkpoint.checksums import SUMS
from megatron_hdp.megatron.checkpoint.state import TrainingState
from megatron_hdp.runtime.timeline import Timeline
from megatron_hdp.training.training_job import build_training_job
from tests.support.gradients import write_corpus
from tests.training.test_checkpoint import LENGTHS, curve, run

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
