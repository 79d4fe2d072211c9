"""What a ring of TransformerEngine's holds in the memory of its second stream, step by step."""

from collections import Counter
from dataclasses import replace

import pytest

from megatron_hdp.planner.memory import fullest_stage, most_tokens_per_rank
from megatron_hdp.planner.memory.activations import (
    backward_bytes,
    ring_bytes,
    second_stream_bytes,
    second_stream_kept_of_part,
)
from tests.support.jobs import job_of

JOB = job_of(4, 1024, 32_000, tied=True, num_gpus=8, tokens_per_rank=8192)
LAYER = JOB.shape.layers[0]
KV, OUTPUT, LSE = 2 * 2 * 512, 2 * 1024, 4 * 8
"""Bytes of a token: keys and values, queries or an output, statistics; in bfloat16."""
MAIN, SECOND = 0, 1


class Memory:
    """Two streams' memory: what lives in each, and the most that ever did."""

    def __init__(self):
        self.live, self.peak = Counter(), Counter()

    def new(self, stream, size):
        return Piece(self, stream, size)


class Piece:
    """Memory of one stream that goes back with its last reference, as a tensor's does."""

    def __init__(self, memory, stream, size):
        self.memory, self.stream, self.size = memory, stream, size
        memory.live[stream] += size
        memory.peak[stream] = max(memory.peak[stream], memory.live[stream])

    def __del__(self):
        self.memory.live[self.stream] -= self.size


def forward(memory, degree, index):
    """A ring's forward on the member `index`: what is made in which step, and what is kept then.

    A name holds what it was given until it is given something else, which exists before.
    """
    travelling, seen = [memory.new(MAIN, KV), None], [None, None]
    queries, outputs = [None, None], [None, None]
    halves, total = [None], None  # of keys and values, or of queries
    for step in range(degree + 1):
        stream = step % 2
        if step < degree:
            if step < degree - 1:
                travelling[1 - stream] = memory.new(stream, KV)
            seen[stream] = travelling[stream]
            if step > index:  # the tail chunks' queries alone, copied
                queries[stream] = halves[0] = memory.new(stream, OUTPUT / 2)
            else:  # all queries, which are there anyway
                if step:
                    halves[0] = memory.new(stream, KV / 2)
                queries[stream] = None
            outputs[stream] = memory.new(stream, OUTPUT / 2 if step > index else OUTPUT)
        if step == 1:
            total = memory.new(MAIN, OUTPUT)
    return travelling[(degree - 1) % 2], total


@pytest.mark.parametrize("degree", range(2, 12))
def test_the_bound_is_the_worst_member_of_a_ring(degree):
    peaks = []
    for index in range(degree):
        memory = Memory()
        kept, total = forward(memory, degree, index)
        assert kept.stream == (SECOND if degree % 2 else MAIN)
        assert memory.live[SECOND] == (KV if degree % 2 else 0)
        peaks.append(memory.peak)
        del kept, total
        assert not +memory.live
    worst = max(peak[SECOND] for peak in peaks)
    assert second_stream_bytes(JOB, LAYER, degree) == worst + 6 * LSE
    # what the model holds ready on the other stream for a layer's backward is enough
    main = max(peak[MAIN] for peak in peaks)
    assert main <= ring_bytes(JOB, LAYER) + backward_bytes(JOB, LAYER)


def test_two_and_eight_by_hand():
    """Two members: no keys are received on it. Eight: twice, and two outputs are alive."""
    assert second_stream_bytes(JOB, LAYER, 2) == 1024 + 2048 + 192
    assert second_stream_bytes(JOB, LAYER, 8) == 2 * 2048 + 1024 + 2 * 2048 + 192
    assert second_stream_bytes(replace(JOB, tensor_ranks=4), LAYER, 8) == (9216 + 192) / 4
    assert second_stream_bytes(JOB, LAYER, 1) == 0


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({}, KV),
        ({"tensor_ranks": 2}, KV / 2),
        ({"num_gpus": 2}, 0),  # no odd degree
        ({"recompute": "selective"}, 0),
        ({"recompute": "full", "recompute_method": "uniform"}, 0),
        ({"recompute": "full", "recompute_method": "block", "recompute_num_layers": 1}, KV * 0.75),
    ],
)
def test_what_a_layer_keeps_there(changes, expected):
    job = replace(JOB, **changes)
    kept = sum(second_stream_kept_of_part(job, part) for part in job.parts)
    assert kept / job.shape.num_layers == expected


@pytest.mark.parametrize("stages", [1, 2])
def test_what_just_fits_is_judged_with_it(stages):
    job = replace(JOB, stages=stages)
    capacity = most_tokens_per_rank(job, 20e9)
    fullest = fullest_stage(replace(job, tokens_per_rank=capacity))
    assert fullest.total <= 20e9 < fullest_stage(replace(job, tokens_per_rank=capacity + 1)).total
    without = replace(fullest, second_stream=0.0)
    assert without.total == pytest.approx(fullest.total - fullest.second_stream)
    layers, alive = job.split.most, stages - fullest.stage
    per_token = alive * layers * KV + second_stream_bytes(job, LAYER, job.hdp_ranks)
    assert fullest.second_stream == capacity * per_token > 0.04 * fullest.total
