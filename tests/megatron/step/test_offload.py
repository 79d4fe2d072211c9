"""Offload in whole steps: exact gradients, the bits of a run without it, memory as predicted."""

import contextlib
import sys
import weakref
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_hdp.cli.checking import job_of
from megatron_hdp.data.steps import padding_micro_batch
from megatron_hdp.megatron import parallel
from megatron_hdp.megatron.model import building
from megatron_hdp.megatron.step import setup
from megatron_hdp.planner import CostModel, make_plan
from megatron_hdp.planner.memory import kept_of_stream, keys_of_part
from megatron_hdp.planner.memory.activations import ring_bytes
from megatron_hdp.runtime.offload.host_pool import HostPool
from megatron_hdp.runtime.timeline import Timeline
from tests.gradient_equivalence.case import LENGTHS, ROOM
from tests.gradient_equivalence.settings import PARTS, RECOMPUTE, recomputing
from tests.support.gradients import (
    VOCABULARY,
    hdp_step,
    tiny_arguments,
    write_corpus,
)

VIRTUAL = {"num_virtual_stages_per_pipeline_rank": 2}


def planned_offload(arguments):
    """A step under the strategy's own plan: bytes offloaded, micro-batches, layers planned for.

    And who asked for slabs of host memory.
    """
    parallel.initialise(arguments)
    askers, add_slab = [], HostPool._add_slab

    def noting(pool, size):
        askers.append(sys._getframe(1).f_code.co_name)
        return add_slab(pool, size)

    with mock.patch("megatron_hdp.data.steps.planning.make_plan", wraps=make_plan) as planned:
        report, _ = hdp_step(arguments, (f"{HostPool.__module__}.HostPool._add_slab", noting))
    layers = planned.call_args.args[0].cost_model.num_layers
    return report.offloaded_bytes, report.micro_batches_max, layers, askers


PLANNED = {  # layers, stages, the rest, layers that the cost model is for and that are planned for
    "alone": (6, 1, {}, 6, 6),
    "stages": (12, 2, {}, 6, 6),
    "virtual": (12, 2, VIRTUAL, 6, 6),
    "parts": (12, 2, {"hdp_sequence_parts": 4}, 6, 6),
    "uneven": (7, 2, {PARTS: "Et*3|t*4L"}, 4, 3),
    "uneven-virtual": (7, 2, {PARTS: "E|t|t*3|t*3,L"}, 4, 3),
}


QUICK = {"alone", "uneven-virtual"}


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=[pytest.mark.slow] * (one not in QUICK)) for one in PLANNED]
)
def test_the_strategy_plans_offload_and_the_step_runs_it(run_ranks, tmp_path, name):
    """A sequence beyond the capacity of both ranks fits only with offload.

    It is planned for the stage of the fewest layers, by a cost model of the one that has most.
    """
    num_layers, stages, more, of_costs, planned = PLANNED[name]
    longest = 300 if of_costs == planned else 180
    settings = {"seq_length": longest, "max_position_embeddings": longest, "num_layers": num_layers}
    settings |= {"hdp_tokens_per_rank": 80, "pipeline_model_parallel_size": stages} | more
    costs = {"a": 1e-3, "b": 1e-3, "kv_bytes_per_token": 1, "activation_bytes_per_token": 1.0}
    path = tmp_path / "cost.json"
    path.write_bytes(CostModel(**costs, num_layers=of_costs).to_json())
    prefix = write_corpus(tmp_path, [longest, 20, 30])
    arguments = tiny_arguments(prefix, hdp_offload="auto", hdp_cost_model=path, **settings)
    found = run_ranks(2 * stages, planned_offload, arguments)
    for offloaded_bytes, micro_batches, layers, askers in found:
        assert offloaded_bytes > 0 and micro_batches > 0 and layers == planned
        assert set(askers) == {"reserve"}, "host memory was asked for inside of a forward"


@pytest.mark.parametrize(("offload", "block_s"), [("auto", 0.0), ("off", 1e-5)])
def test_a_cost_model_of_other_layers_is_refused(run_ranks, tmp_path, offload, block_s):
    prefix = write_corpus(tmp_path, LENGTHS)
    path = tmp_path / "cost.json"
    path.write_bytes(CostModel(a=1.0, b=1.0, kv_bytes_per_token=1, block_s=block_s).to_json())
    arguments = tiny_arguments(
        prefix, hdp_offload=offload, hdp_cost_model=path, **ROOM | {"num_layers": 4}
    )
    with pytest.raises(Exception, match="num_layers 1, expected the 4 layers"):
        run_ranks(1, planned_offload, arguments)


class LiveMemory(TorchDispatchMode):
    """Bytes of the storages that operators made and that are still alive, but for those there."""

    def __init__(self, there):
        super().__init__()
        self.now = self.peak = 0
        self._known = dict.fromkeys(tensor.untyped_storage().data_ptr() for tensor in there)

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        out = operator(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._see(tensor.untyped_storage())
        return out

    def _see(self, storage):
        address, size = storage.data_ptr(), storage.nbytes()
        if address and address not in self._known:
            self._known[address] = weakref.finalize(storage, self._forget, address, size)
            self.now += size
            self.peak = max(self.peak, self.now)

    def _forget(self, address, size):
        del self._known[address]
        self.now -= size


def peaks(arguments, cases):
    """What a layer keeps of a token, and the peak of a micro-batch of each (tokens, ratio)."""
    parallel.initialise(arguments)
    gpt = building.build_gpt(arguments, VOCABULARY)
    executor = setup.build_executor(arguments, [gpt], Timeline())
    there = [executor.offload.pool.take(1 << 20).slab.memory, *gpt.parameters()]
    there += [parameter.main_grad for parameter in gpt.parameters()]
    found = []
    for tokens, ratio in cases:
        micro_batch = padding_micro_batch(0, tokens)
        micro_batch.loss_mask[:] = True
        with with_ratio(executor, ratio), LiveMemory(there) as memory:
            executor.run([micro_batch], tokens)
        found.append((tokens, memory.peak))
    return executor.activation_bytes_per_token(), found


@contextlib.contextmanager
def with_ratio(executor, ratio):
    run = executor.offload.micro_batch
    executor.offload.micro_batch = lambda _, num_tokens: run(ratio, num_tokens)
    yield
    executor.offload.micro_batch = run


@pytest.mark.slow
def test_the_memory_model_predicts_the_peak_within_5_percent(run_ranks, tmp_path):
    """Its coefficients are from small micro-batches without offload."""
    prefix = write_corpus(tmp_path, [2048])
    arguments = tiny_arguments(
        prefix,
        num_layers=8,
        hidden_size=64,
        ffn_hidden_size=160,
        kv_channels=16,
        seq_length=2048,
        max_position_embeddings=2048,
        hdp_tokens_per_rank=2048,
    )
    small = [(128, 0.0), (256, 0.0)]
    large = [(2048, ratio) for ratio in (0.0, 0.25, 0.5, 0.75, 1.0)]
    per_token, found = run_ranks(1, peaks, arguments, small + large)[0]
    per_whole_token, fixed = np.polyfit(*zip(*found[:2], strict=True), 1)
    for (tokens, ratio), (_, measured) in zip(large, found[2:], strict=True):
        expected = fixed + tokens * (per_whole_token - ratio * 6 * per_token)  # 2 of 8 layers stay
        assert measured == pytest.approx(expected, rel=0.05), (ratio, measured, expected)
    assert found[-1][1] < 0.6 * found[2][1]


def in_parts(num_parts, ratio, is_stream=False, degree=1):
    """One sequence in parts of 256 tokens a rank."""
    is_ring, sizes = degree > 1, (256,) * num_parts
    held = {"ring_slices": sizes, "local_lengths": ()} if is_ring else {"local_lengths": sizes}
    held["parts"] = [
        (int(is_ring), int(not is_ring), is_ring and number > 0, not is_ring and number > 0, 0)
        for number in range(num_parts)
    ]
    held |= {"ring": tuple(range(degree)), "offload_ratio": ratio, "is_stream": is_stream}
    micro_batch = replace(padding_micro_batch(0, 256 * num_parts), **held)
    micro_batch.loss_mask[:] = True
    return micro_batch


def held_of_a_token(cases):
    """Of each (arguments, ratio): bytes that a layer saves, and that a token more adds to a peak.

    The token is of a part more, so what only lives while a part runs is the same.
    """
    parallel.initialise(cases[0][0])
    found = []
    for arguments, ratio in cases:
        gpt = building.build_gpt(arguments, VOCABULARY)
        executor = setup.build_executor(arguments, [gpt], Timeline())
        saved = executor.activation_bytes_per_token()
        there = [executor.offload.pool.take(1 << 20).slab.memory, *gpt.parameters()]
        there += [parameter.main_grad for parameter in gpt.parameters()]
        measured = []
        for num_parts in (4, 12):
            with LiveMemory(there) as memory:
                executor.run([in_parts(num_parts, ratio)], 256 * num_parts)
            measured.append(memory.peak)
        found.append((saved, (measured[1] - measured[0]) / (8 * 256)))
    return found


@pytest.mark.slow
def test_what_parts_hold_is_what_the_memory_model_says(run_ranks, tmp_path):
    """With every way of recomputation, and with offload: keys of parts stay.

    Gradients of keys, and hidden states behind the layers, count only where they outweigh what
    later parts have given back.
    """
    shape = {"num_layers": 8, "hidden_size": 64, "ffn_hidden_size": 160, "kv_channels": 16}
    shape |= dict.fromkeys(("seq_length", "max_position_embeddings"), 4096)
    prefix = write_corpus(tmp_path, [64])
    kinds = [({}, 0.0), ({}, 0.5), ({}, 1.0), (RECOMPUTE, 0.0), (recomputing("core_attn"), 0.0)]
    cases = [(tiny_arguments(prefix, **shape | kind), ratio) for kind, ratio in kinds]
    for (arguments, ratio), (saved, measured) in zip(
        cases, run_ranks(1, held_of_a_token, cases)[0], strict=True
    ):
        job = replace(job_of(arguments, 1, VOCABULARY), runs_parts=True)
        keys = keys_of_part(job, job.parts[0]) * 8 / (8 + 4)  # and their gradients, in float64
        held = (8 - ratio * 6) * saved
        most = held + 2 * keys + 4 * 8 * arguments.hidden_size
        assert 0.95 * (held + keys) < measured < 1.05 * most, (ratio, saved, keys, measured)


def peaks_of_streams(arguments, cases, degree):
    """The peak of each (parts, ratio); of several parts as a stream, of one as it is."""
    parallel.initialise(arguments)
    gpt = building.build_gpt(arguments, VOCABULARY)
    executor = setup.build_executor(arguments, [gpt], Timeline())
    executor.run([in_parts(max(cases)[0], 1.0, True, degree)], 1)  # host memory is there then
    there = [slab.memory for slab in executor.offload.pool._slabs]
    there += [one for parameter in gpt.parameters() for one in (parameter, parameter.main_grad)]
    found = {}
    for num_parts, ratio in cases:
        executor.comm._buffers.clear()
        with LiveMemory(there) as memory:
            executor.run([in_parts(num_parts, ratio, num_parts > 1, degree)], 1)
        found[num_parts, ratio] = memory.peak
    assert not executor.offload.pool.num_late, "host memory was asked for inside of a forward"
    return found


@pytest.mark.slow
@pytest.mark.parametrize("degree", [1, 2])
def test_streams_hold_one_part_and_what_the_memory_model_says(run_ranks, tmp_path, degree):
    """Beside it keys and their sums of earlier parts; where these wait on the host, groups of them.

    On the device gradients of all earlier keys of one layer as well, and of a ring its buffers,
    which hold such keys as long as they travel: no more than the part's queries would take. Five
    integers and a mask of every token are there throughout: the model does not count them.
    """
    shape = {"num_layers": 8, "hidden_size": 64, "ffn_hidden_size": 160, "kv_channels": 16}
    shape |= dict.fromkeys(("seq_length", "max_position_embeddings"), 4096)
    arguments = tiny_arguments(write_corpus(tmp_path, [64]), fp64=False, **shape)
    job, numbers = job_of(arguments, degree, VOCABULARY), (4, 8, 16)
    halves = [0.5] if degree == 1 else []
    cases = [(1, 0.0), *((number, one) for number in numbers for one in (0.0, *halves, 1.0))]
    peaks = run_ranks(degree, peaks_of_streams, arguments, cases, degree, timeout_s=570)[0]
    layer = job.shape.layers[0]
    of_groups = ring_bytes(replace(job, streams=True), layer) - ring_bytes(job, layer)
    more_keys = max(0.0, job.shape.ring_costs(job.value_bytes)["query_ratio"] - 1) * (degree > 1)
    for number in numbers:
        earlier, of_token = 256 * (number - 1), kept_of_stream(job)
        beside = {
            ratio: peaks[number, ratio] - peaks[1, 0.0] - 41 * earlier
            for ratio in (0.0, *halves, 1.0)
        }
        buffered = 256 * more_keys * ring_bytes(job, layer)
        of_a_layer = 2 * job.value_bytes * layer.attention.travelling_size  # found, and added up
        most = earlier * (of_token + of_a_layer) + buffered
        assert earlier * of_token <= beside[0] < 1.05 * most, (number, most, beside)
        assert 0 < beside[1] < 256 * of_groups, (number, beside)
        for half in halves:
            of_half = beside[half] - beside[1]
            assert of_half == pytest.approx(128 * number * of_token, rel=0.05), (number, beside)
    assert abs(beside[1] - (peaks[4, 1.0] - peaks[1, 0.0] - 41 * 256 * 3)) < 0.01 * peaks[1, 0.0]
