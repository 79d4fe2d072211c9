"""Megatron's schedule over the pipeline's communication: any number of stages and micro-batches."""

from dataclasses import dataclass
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megatron_hdp.runtime.pipeline_comm import PipelineComm
from megatron_hdp.runtime.timeline import PIPELINE_WAIT, Timeline


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
    comm = PipelineComm(groups[pipeline], None, torch.float32, torch.device("cpu"), timeline)
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
    shapes = [[(n + p + 1, 3) for n in range(count)] for p, count in enumerate(counts)]
    check(run_ranks(stages * len(counts), run, shapes, stages), shapes, stages)


def check(results, shapes_of_pipelines, stages):
    for pipeline, stage, log, waited in results:
        shapes = shapes_of_pipelines[pipeline]
        behind = stages - 1 - stage
        assert [entry for entry in log if entry[0] == "F"] == [
            ("F", i, 100.0 * i + stage, shape) for i, shape in enumerate(shapes)
        ]
        assert [entry for entry in log if entry[0] == "B"] == [
            ("B", i, 1000.0 * i + behind, shape) for i, shape in enumerate(shapes)
        ]
        assert waited > 0
