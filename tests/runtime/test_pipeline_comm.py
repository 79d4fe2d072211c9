"""Megatron's schedules over the pipeline's communication: shapes by counting, time-outs."""

from dataclasses import dataclass
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megatron_hdp.runtime.pipeline_comm import InterleavedComm, PipelineComm
from megatron_hdp.runtime.timeline import PIPELINE_WAIT, Timeline
from tests.support.ranks import RankError


@dataclass
class Pipeline:
    """One stage's end of it, and the calls that Megatron's schedule makes, in its order."""

    comm: PipelineComm
    stage: int
    stages: int
    log: list

    def forward(self, inputs, i, shape):
        """Each stage adds one."""
        (x,) = inputs
        if self.stage == 0:
            x = torch.full(shape, 100.0 * i)
        self.log.append(("F", i, x[0, 0].item(), tuple(x.shape)))
        return [x + 1]

    def backward(self, grads, i, shape):
        (grad,) = grads
        if self.stage == self.stages - 1:
            grad = torch.full(shape, 1000.0 * i)
        self.log.append(("B", i, grad[0, 0].item(), tuple(grad.shape)))
        return [grad + 1]


def run(shapes_of_pipelines, stages):
    """Body of a rank: one-forward-one-backward as Megatron orders its calls."""
    rank, world = dist.get_rank(), dist.get_world_size()
    groups = [
        dist.new_group(list(range(p, world, world // stages)), timeout=timedelta(seconds=60))
        for p in range(world // stages)
    ]
    pipeline, stage = rank % (world // stages), rank // (world // stages)
    shapes = shapes_of_pipelines[pipeline]
    timeline = Timeline()
    comm = PipelineComm(groups[pipeline], None, torch.empty(0), timeline)
    one = Pipeline(comm, stage, stages, [])
    first, last = stage == 0, stage == stages - 1
    comm.begin(shapes)
    warm_up = min(stages - stage - 1, len(shapes))
    for i in range(warm_up):
        comm.send_forward(one.forward(comm.recv_forward(None, first), i, shapes[i]), last)
    steady = len(shapes) - warm_up
    inputs = comm.recv_forward(None, first) if steady else None
    for k in range(steady):
        outputs = one.forward(inputs, warm_up + k, shapes[warm_up + k])
        grads = comm.send_forward_recv_backward(outputs, None, last)
        input_grads = one.backward(grads, k, shapes[k])
        if k == steady - 1:
            comm.send_backward(input_grads, first)
        else:
            inputs = comm.send_backward_recv_forward(input_grads, None, first)
    for k in range(steady, len(shapes)):
        comm.send_backward(one.backward(comm.recv_backward(None, last), k, shapes[k]), first)
    comm.finish()
    return pipeline, stage, one.log, timeline.totals_s[PIPELINE_WAIT]


@pytest.mark.parametrize(
    "stages, counts", [(2, [1]), (2, [6]), (3, [1]), (3, [2]), (3, [6]), (2, [1, 5])]
)
def test_every_stage_gets_every_micro_batch_in_its_shape(run_ranks, stages, counts):
    of_pipelines = [[(n + p + 1, 3) for n in range(count)] for p, count in enumerate(counts)]
    for pipeline, stage, log, waited in run_ranks(stages * len(counts), run, of_pipelines, stages):
        shapes = of_pipelines[pipeline]
        behind = stages - 1 - stage
        assert [entry for entry in log if entry[0] == "F"] == [
            ("F", i, 100.0 * i + stage, shape) for i, shape in enumerate(shapes)
        ]
        assert [entry for entry in log if entry[0] == "B"] == [
            ("B", i, 1000.0 * i + behind, shape) for i, shape in enumerate(shapes)
        ]
        assert waited > 0


OVERLAPPED = {"overlap_p2p_comm": True}
SHAPES = [(2, 3), (5, 3)]
TABLE = [(0, 0), (1, 0), (0, 1), (1, 1)]  # two micro-batches, two chunks


def comm_of(timeline, timeout_s=60, same_group=False):
    ranks, timeout = list(range(dist.get_world_size())), timedelta(seconds=timeout_s)
    activations = dist.new_group(ranks, timeout=timeout)
    gradients = activations if same_group else dist.new_group(ranks, timeout=timeout)
    like = torch.empty(0, dtype=torch.float64)
    comm = InterleavedComm(activations, gradients, 2, None, like, timeline)
    comm.begin(SHAPES, TABLE)
    return comm


def filled(value):
    return torch.full(SHAPES[0], float(value), dtype=torch.float64)


def both_directions():
    """Body of a rank of two: activations and gradients to the same neighbour, at one time."""
    timeline, rank = Timeline(), dist.get_rank()
    comm = comm_of(timeline)
    if rank == 0:
        # sends forwards first; the other stage takes the gradient first
        first = comm.send_forward_recv_forward(filled(1), False, None, **OVERLAPPED)
        assert first == (None, {})
        gradient, handles = comm.send_backward_recv_backward(None, True, None, **OVERLAPPED)
        handles["recv_next"].wait()
        found = [gradient]
    else:
        comm.send_backward_recv_backward(filled(2), False, None, **OVERLAPPED)
        found = [comm.recv_forward(None, False)]
    # what the last stage makes of a chunk is the first one's input of the next
    if rank == 0:
        found.append(comm.send_forward_recv_forward(None, True, None))
    else:
        assert comm.send_forward_recv_forward(filled(3), False, None) is None
    comm.finish()
    assert all(one.requires_grad for one in found)
    return [(tuple(one.shape), one[0, 0].item()) for one in found], timeline.totals_s[PIPELINE_WAIT]


def test_messages_arrive_by_kind_and_in_their_shapes(run_ranks):
    (first, waited), (second, _) = run_ranks(2, both_directions)
    assert first == [(SHAPES[0], 2.0), (SHAPES[0], 3.0)]
    assert second == [(SHAPES[0], 1.0)]
    assert waited > 0


def test_one_communicator_would_mix_the_kinds(run_ranks):
    """The planted fault: on the last stage a gradient's place takes the activation."""
    first, second = run_ranks(2, both_directions_at_once, True)
    assert second != run_ranks(2, both_directions_at_once, False)[1]
    assert first[0] == 0


def both_directions_at_once(same_group):
    """Body of a rank: the first one sends both kinds, the other takes the gradient first."""
    comm = comm_of(Timeline(), same_group=same_group)
    if dist.get_rank() == 0:
        comm.send_forward_recv_forward(filled(1), False, None, **OVERLAPPED)
        comm.send_backward_recv_backward(filled(2), False, None, **OVERLAPPED)
        comm.finish()
        return [0]
    gradient = comm.recv_backward(None, False)
    activation = comm.recv_forward(None, False)
    return [gradient[0, 0].item(), activation[0, 0].item()]


def waiting_in_vain():
    """Body of a rank: the first stage waits for one that never sends."""
    comm = comm_of(Timeline(), timeout_s=1)
    if dist.get_rank() == 0:
        _, handles = comm.send_forward_recv_forward(None, True, None, **OVERLAPPED)
        handles["recv_prev"].wait()


def test_a_stage_that_does_not_answer_is_an_error(run_ranks):
    with pytest.raises(RankError, match="a pipeline stage did not answer"):
        run_ranks(2, waiting_in_vain)
