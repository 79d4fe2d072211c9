"""A job's members change between steps: ranks leave and enter in their processes, exactly."""

import gc
import os
import weakref

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_hdp.session import HdpSession
from megatron_hdp.strategies import STRATEGIES
from tests.training.runs import flags

LENGTHS = (90, 40, 30, 70, 20, 100, 9)
SMALL = {"global_batch_size": 1, "hdp_tokens_per_rank": 64}
GROWS = ((0, 1, 2, 3), (0, 1, 3), (3, 1), (0, 1, 2, 3))
"""Members of each epoch, by rank of the first one; who is in none waits in between."""


def batch_of(step):
    rng = np.random.default_rng([3, step])
    return [rng.integers(0, 257, length) for length in LENGTHS]


def session_flags(**changes):
    found = flags("/", **({"fp64": True, "lr": 1e-2, "data_path": None} | SMALL | changes))
    return [one for one in found if one != "--hybrid-data-parallel"]


def open_files():
    return len(os.listdir("/proc/self/fd"))


def memory_mb():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def steps_in(folder, epochs, changes, rounds=1, steps=2):
    """Body of a rank: losses, weights, and what each epoch held of files and memory."""
    me = dist.get_rank()
    session = HdpSession.from_flags(session_flags(**changes), vocab_size=257)
    optimizer = session.build_optimizer()
    losses, held, step = [], [], 0
    before = epochs[0]

    def state_of(members):
        """Of the HDP ranks of these, the first that was there before; stages lie far apart."""
        apart = session.arguments.tensor_model_parallel_size
        num = len(members) // num_places
        return next(i for i in range(num) if members[i * apart] in before)

    num_places = session.arguments.tensor_model_parallel_size
    num_places *= session.arguments.pipeline_model_parallel_size
    for number in range(rounds * len(epochs)):
        members = epochs[number % len(epochs)]
        if number:
            if me in before:
                old = weakref.ref(session._executor)
                session.leave()
                assert old() is None
            if me in members:
                # of its own: a store keeps all that it has ever held
                one = dist.FileStore(str(folder / f"epoch-{number}"), len(members))
                session.enter(one, members.index(me), len(members), state_of=state_of(members))
                assert session.place.num_hdp_ranks == len(members) // num_places
            before = members
        for _ in range(steps):
            step += 1
            if me in members:
                report = session.step(batch_of(step))
                optimizer.step()
                losses.append((step, report.loss))
        gc.collect()
        held.append((open_files(), memory_mb()))
    weights = torch.cat([one.detach().flatten().double() for one in session.chunks[0].parameters()])
    if me in members:
        session.close()
    return losses, weights.numpy(), held


def undisturbed(changes, steps):
    session = HdpSession.from_flags(session_flags(**changes), vocab_size=257)
    optimizer, losses = session.build_optimizer(), []
    for step in range(1, steps + 1):
        losses.append((step, session.step(batch_of(step)).loss))
        optimizer.step()
    weights = torch.cat([one.detach().flatten().double() for one in session.chunks[0].parameters()])
    session.close()
    return losses, weights.numpy()


def require_equal(found, expected):
    losses, weights = expected
    for mine, my_weights, _ in found:
        for step, loss in mine:
            assert abs(loss / dict(losses)[step] - 1) < 1e-12
        assert np.abs(my_weights - weights).max() < 1e-12 * np.abs(weights).max()


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(one.name, marks=() if one.name == "dp-balance" else pytest.mark.slow)
        for one in STRATEGIES
    ],
)
def test_ranks_leave_and_enter(run_ranks, tmp_path, strategy):
    changes = {"hdp_strategy": strategy}
    found = run_ranks(4, steps_in, tmp_path, GROWS, changes)
    (expected,) = run_ranks(1, undisturbed, changes | {"hdp_tokens_per_rank": 512}, 8)
    require_equal(found, expected)


TWO = ((0, 1, 2, 3), (0, 1), (3, 2, 1, 0))
LAYOUTS = {  # epochs that keep whole HDP ranks together, overrides
    "tp2": (((0, 1, 2, 3), (2, 3), (0, 1, 2, 3)), {"tensor_model_parallel_size": 2}),
    "pp2": (((0, 1, 2, 3), (0, 2), (0, 1, 2, 3)), {"pipeline_model_parallel_size": 2}),
    "overlap": (TWO, {"overlap_grad_reduce": True, "ddp_bucket_size": 1000}),
    "offload": (TWO, {"hdp_offload": "auto", "num_layers": 4}),
    "recompute": (
        TWO,
        {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        },
    ),
    "bf16": (TWO, {"bf16": True, "fp64": None}),
}
WHOLE = {"hdp_tokens_per_rank": 512}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_leave_and_enter_in_layouts(run_ranks, tmp_path, layout):
    epochs, changes = LAYOUTS[layout]
    changes = {"num_layers": 2, "hdp_tokens_per_rank": 128} | changes
    found = run_ranks(4, steps_in, tmp_path, epochs, changes)
    reference = {name: value for name, value in changes.items() if name in ("num_layers", "bf16")}
    reference |= {"fp64": changes.get("fp64", True)} | WHOLE
    (expected,) = run_ranks(1, undisturbed, reference, 6)
    for losses, _, _ in found:
        assert losses
        for step, loss in losses:
            tolerance = 1e-2 if "bf16" in changes else 1e-12
            assert abs(loss / dict(expected[0])[step] - 1) < tolerance


@pytest.mark.slow
def test_twenty_epochs_hold_no_more_than_a_few(run_ranks, tmp_path):
    found = run_ranks(4, steps_in, tmp_path, GROWS, {}, 8)
    (expected,) = run_ranks(1, undisturbed, WHOLE, 64)
    require_equal(found, expected)
    for _, _, held in found[:2] + found[3:]:
        (files, megabytes), (last_files, last_megabytes) = held[-21], held[-1]
        assert last_files - files < 10 and last_megabytes - megabytes < 2, held


def test_a_session_says_why_it_cannot_leave(run_ranks):
    assert run_ranks(1, refusals_to_leave) == [["--use-distributed-optimizer", "leave"]]


def refusals_to_leave():
    """Body of a rank: what of the expected words the errors have."""
    found = []
    session = HdpSession.from_flags(session_flags(use_distributed_optimizer=True), vocab_size=257)
    session.build_optimizer()
    for call, word in (
        (session.leave, "--use-distributed-optimizer"),
        (lambda: session.enter(dist.HashStore(), 0, 1), "leave"),
    ):
        with pytest.raises(ValueError, match=word):
            call()
        found.append(word)
    session.close()
    return found
