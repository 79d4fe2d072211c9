"""What a stage holds: micro-batches between forward and backward, and what PyTorch cannot count."""

from dataclasses import replace

import pytest

from megatron_hdp.planner.memory import IN_FLIGHT_BYTES, kept_of_further, stage_memory
from tests.planner.blocking import interleaved, one_forward_one_backward
from tests.support.jobs import job_of

JOB = job_of(24, 64, 1000, num_gpus=8, tokens_per_rank=1024)


def most_alive(order):
    """Passes whose backward has not ended, at the fullest moment."""
    alive = fullest = 0
    for kind, *_ in order:
        alive += 1 if kind == "F" else -1
        fullest = max(fullest, alive)
    return fullest


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("stages", [2, 4, 8])
def test_it_is_what_the_schedule_holds(stages, chunks):
    job = replace(JOB, stages=stages, model_chunks=chunks)
    many = list(range(8 * stages))
    for stage in range(stages):
        if chunks == 1:
            order = one_forward_one_backward(many, stage, stages)
        else:
            order = interleaved(many, stage, stages, chunks, stages)
        assert job.alive(stage) == pytest.approx(most_alive(order) / chunks)
        assert job.alive(0) == pytest.approx(stages + (stages - 1) / chunks * (chunks > 1))


def test_layers_of_further_tokens_keep_all_that_a_micro_batch_has() -> None:
    """Equation 3 holds the others to a capacity's worth; these stand on the last stage alone."""
    shape = replace(JOB.shape, further=JOB.shape.layers[:2])
    plain = replace(JOB, stages=2, tokens_per_rank=1024)
    job = replace(plain, shape=shape)
    for stage, more in ((0, 0.0), (1, 3000 * kept_of_further(job))):
        found, without = (stage_memory(one, stage, 3000).activations for one in (job, plain))
        assert found == pytest.approx(without + more)
    assert kept_of_further(job) > 0


SPLIT = {"tensor_ranks": 2, "stages": 2, "expert_ranks": 4, "num_gpus": 16}


@pytest.mark.parametrize(
    ("layout", "runtime_gb"),
    [({"num_gpus": 1}, 2.0), ({}, 3.2), (SPLIT, 5.2), (SPLIT | {"runtime_bytes": 4.7e9}, 4.7)],
)
def test_cuda_and_nccl_take_what_was_measured_else_by_communicators(layout, runtime_gb):
    job = replace(JOB, **layout)
    assert stage_memory(job, 0).runtime == pytest.approx(runtime_gb * 1e9)


def test_transfers_that_the_gpu_is_not_past_hold_a_bound():
    assert stage_memory(replace(JOB, num_gpus=1), 0).in_flight == 0
    assert stage_memory(JOB, 0).in_flight == IN_FLIGHT_BYTES
    kv_bytes = 2 * 4 * (64 // 8) * 2 * 10**6  # of K and V, in bfloat16
    assert stage_memory(JOB, 0, 10**6).in_flight == max(IN_FLIGHT_BYTES, 4 * kv_bytes)
    assert stage_memory(JOB, 0, 10**7).in_flight == 4 * 10 * kv_bytes > IN_FLIGHT_BYTES


def test_keys_of_parts_are_held_beside_what_waits_and_never_leave():
    """Of a token K, V and float32 gradients of both, in each of the stage's layers."""
    whole, parts = replace(JOB, stages=4), replace(JOB, stages=4, runs_parts=True)
    a_token = 2 * (64 // 8) * 4 * (2 + 4) * (24 // 4)
    for tokens in (1024, 4096):  # more than a capacity: offloaded
        before, found = (stage_memory(job, 1, tokens) for job in (whole, parts))
        assert before.keys == 0 and found.keys == 3 * a_token * tokens
        assert found.activations == before.activations
    assert found.total >= before.total + found.keys


def test_the_first_stage_needs_that_much_more_for_activations():
    plain = stage_memory(replace(JOB, stages=4), 0)
    virtual = stage_memory(replace(JOB, stages=4, model_chunks=2), 0)
    assert virtual.activations / plain.activations == pytest.approx(1 + 3 / 8)
    assert virtual.weights == plain.weights


def test_layers_are_recomputed_by_part():
    """Three of a stage's six layers, and with two parts three of the three of each."""
    job = replace(JOB, stages=4, recompute="full", recompute_method="block", recompute_num_layers=3)
    assert job.recomputed_share == 0.5
    assert replace(job, model_chunks=2).recomputed_share == 1.0
