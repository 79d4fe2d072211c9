"""Copies of optimizer shards: a lost one is made again for another number of ranks, bit for bit."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_hdp.megatron import parallel
from megatron_hdp.megatron.finite import named_parameters
from megatron_hdp.megatron.model import build_chunks
from megatron_hdp.megatron.optimizer import (
    ShardCopies,
    build_optimizer,
    choose_common,
    choose_version,
    restore,
)
from tests.support.gradients import EXPERTS, VOCABULARY, tiny_arguments

LOST, JOINED = 2, 4


def arguments_of(**changes):
    """Clipping is off: the norm is a sum over ranks, and its rounding depends on their number."""
    settings = {"use_distributed_optimizer": True, "clip_grad": 0.0, "weight_decay": 0.1}
    return tiny_arguments(None, **(settings | changes))


def built(arguments, seed):
    parallel.initialise(arguments)
    parallel.set_seeds(seed)
    chunks = build_chunks(arguments, VOCABULARY)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return chunks, build_optimizer(arguments, chunks), group


def train_step(chunks, optimizer, step, copies=None):
    """The same whole gradients on any number of ranks."""
    for number, (_, parameter) in enumerate(named_parameters(chunks)):
        generator = torch.Generator().manual_seed(1000 * step + number)
        grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.main_grad.copy_(grad)
    for group in optimizer.param_groups:
        group["lr"] = 1e-2 / step
    if copies is not None:
        copies.before_change()
    optimizer.step()
    if copies is not None:
        copies.take(step)


def whole_state(chunks, optimizer):
    """Weights of this rank and main parameters and moments of all ranks, by name."""
    for chunk in chunks:
        if chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)
    found = {name: one.detach().clone() for name, one in named_parameters(chunks)}
    for number, part in enumerate(optimizer.chained_optimizers):
        states = part.get_parameter_state_dp_zero(use_gloo_comm=False, return_on_all_ranks=True)
        for index, by_dtype in states.items():
            (kinds,) = by_dtype.values()
            for name, one in named_parameters(chunks):
                if one not in part.buffers[index].param_index_map:
                    continue
                start, stop, *_ = part.buffers[index].param_index_map[one]
                for kind, values in kinds.items():
                    found[f"{number} {name} {kind}"] = values[start:stop].clone()
    return found


def step_counts(optimizer):
    return {
        float(state["step"])
        for part in optimizer.chained_optimizers
        for state in part.optimizer.state.values()
    }


def new_epoch(folder, name, rank, size):
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo",
        init_method=(folder / name).as_uri(),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=60),
    )


def require_equal(found, expected):
    assert set(found) == set(expected)
    for name, values in found.items():
        assert torch.equal(values, expected[name]), name


def shared_begin(copies):
    """What a step does at its start; here all copies have arrived before."""
    copies._sender.wait_complete(copies._latest)
    agreed = [None] * dist.get_world_size()
    dist.all_gather_object(agreed, copies.complete)
    return copies.begin(min(agreed))


def lose_one_and_gain_one(folder, changes):
    """Four ranks, then three without the lost one, then four with a new one."""
    rank, arguments = dist.get_rank(), arguments_of(**changes)
    hosts = ["a", "a", "b", "b"]
    chunks, optimizer, group = built(arguments, seed=1)
    copies = ShardCopies(optimizer, chunks, [0, 1, LOST, 3], hosts=hosts, place_group=group)
    copies.take(0)
    assert shared_begin(copies)
    for step in (1, 2, 3):
        train_step(chunks, optimizer, step, copies)
        assert shared_begin(copies)
    copies.settle()
    expected = whole_state(chunks, optimizer)
    train_step(chunks, optimizer, 4, copies)  # this step is lost
    held = copies.leave()
    parallel.finish()
    after = [0, 1, 3]
    if rank != LOST:
        new_epoch(folder, "three", after.index(rank), 3)
        everyone = [None] * 3
        dist.all_gather_object(everyone, held.versions())
        chosen = choose_version(dict(zip(after, everyone, strict=True)))
        assert (chosen.version, chosen.members) == (3, (0, 1, LOST, 3))
        chunks, optimizer, group = built(arguments, seed=2)
        three = [hosts[one] for one in after]
        restore(held, chosen, optimizer, chunks, group, three)
        require_equal(whole_state(chunks, optimizer), expected)
        assert step_counts(optimizer) <= {3.0}
        copies = ShardCopies(optimizer, chunks, after, hosts=three, place_group=group, kept=held)
        copies.take(3)
        kept = {tuple(members) for _, members, _ in copies.versions()}
        assert kept == {(0, 1, LOST, 3)}  # until a version is whole among the three
        assert shared_begin(copies)
        train_step(chunks, optimizer, 4, copies)
        copies.settle()
        assert {tuple(members) for _, members, _ in copies.versions()} == {(0, 1, 3)}
        expected = whole_state(chunks, optimizer)
        held = copies.leave()
        parallel.finish()
    else:
        held = None
    order = [3, 0, 1, JOINED]
    uid = JOINED if rank == LOST else rank
    new_epoch(folder, "four", order.index(uid), 4)
    everyone = [None] * 4
    dist.all_gather_object(everyone, (held.versions() if held else [], expected))
    chosen = choose_version({uid: versions for uid, (versions, _) in enumerate(everyone)})
    assert (chosen.version, chosen.members) == (4, (0, 1, 3))
    chunks, optimizer, group = built(arguments, seed=3)
    restore(held, chosen, optimizer, chunks, group, ["a"] * 4)
    require_equal(whole_state(chunks, optimizer), everyone[0][1])
    train_step(chunks, optimizer, 5)
    return whole_state(chunks, optimizer)


def undisturbed(changes):
    chunks, optimizer, _ = built(arguments_of(**changes), seed=1)
    for step in range(1, 6):
        train_step(chunks, optimizer, step)
    return whole_state(chunks, optimizer)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param(
            {"fp64": False, "overlap_grad_reduce": True, "overlap_param_gather": True},
            marks=pytest.mark.slow,
        ),
        pytest.param({"fp64": False, "bf16": True}, marks=pytest.mark.slow),
    ],
    ids=["float64", "float32-overlap", "bfloat16"],
)
def test_a_lost_shard_comes_back_on_other_numbers_of_ranks(run_ranks, tmp_path, changes):
    found = run_ranks(4, lose_one_and_gain_one, tmp_path, changes)
    (expected,) = run_ranks(1, undisturbed, changes)
    for state in found:
        require_equal(state, expected)


LAYOUTS = {  # settings, survivors, domains of the place group
    "tensor": ({"tensor_model_parallel_size": 2}, [0, 1], None),
    "pipeline": ({"pipeline_model_parallel_size": 2}, [0, 2], None),
    "virtual stages": (
        {
            "pipeline_model_parallel_size": 2,
            "num_virtual_stages_per_pipeline_rank": 2,
            "num_layers": 4,
        },
        [0, 2],
        None,
    ),
    "experts": (EXPERTS | {"expert_model_parallel_size": 2}, [0, 1], [0, 0, 1, 1]),
}


def lose_an_hdp_rank(folder, layout):
    """Four ranks, then the two that are left of them; each place has its own shards."""
    settings, survivors, domains = LAYOUTS[layout]
    rank, arguments = dist.get_rank(), arguments_of(**settings)
    chunks, optimizer, group = built(arguments, seed=1)
    members = dist.get_process_group_ranks(group)
    hosts = ["a"] * len(members)
    copies = ShardCopies(
        optimizer, chunks, members, hosts=hosts, place_group=group, domains=domains
    )
    for step in (1, 2):
        train_step(chunks, optimizer, step, copies)
        shared_begin(copies)
    copies.settle()
    expected = whole_state(chunks, optimizer)
    train_step(chunks, optimizer, 3)
    held = copies.leave()
    parallel.finish()
    if rank not in survivors:
        return
    new_epoch(folder, "two", survivors.index(rank), 2)
    everyone = [None] * 2
    dist.all_gather_object(everyone, (rank, members, held.versions()))
    places = {}
    for uid, place, versions in everyone:
        places.setdefault(tuple(place), {})[uid] = versions
    chosen = dict(zip(places, choose_common(list(places.values())), strict=True))[tuple(members)]
    assert chosen.version == 2
    chunks, optimizer, group = built(arguments, seed=2)
    restore(held, chosen, optimizer, chunks, group, ["a"] * group.size())
    require_equal(whole_state(chunks, optimizer), expected)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_hdp_rank_or_a_domain_of_experts_is_lost_as_a_whole(run_ranks, tmp_path, layout):
    run_ranks(4, lose_an_hdp_rank, tmp_path, layout)
