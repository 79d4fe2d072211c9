"""Memory of stages with unequal layers: by hand, and against the schedules."""

from dataclasses import replace

import pytest

from megatron_hdp.planner.memory import (
    Job,
    fullest_stage,
    kept_after_forward,
    kept_of_stream,
    stage_memories,
    stage_memory,
    waiting_activations,
)
from tests.planner.blocking import interleaved
from tests.planner.memory.test_alive import JOB

LAYER = 2 * 64 * (64 + 32) + 3 * 64 * 176 + 2 * 64  # parameters: attention, gated MLP, norms
EMBEDDING = 64 * 1000


def uneven(*layers: int, stages: int, **changes: object) -> Job:
    shape = replace(JOB.shape, layers=JOB.shape.layers[:1] * sum(layers))
    settings = {"shape": shape, "stage_layers": layers, "stages": stages}
    chunks = len(layers) // stages
    return replace(JOB, model_chunks=chunks, **settings, **changes)  # type: ignore[arg-type]


def test_a_stage_has_its_own_layers() -> None:
    job = uneven(1, 3, 0, 2, stages=4)
    found = stage_memories(job)
    last = 2 * LAYER + EMBEDDING + 64  # and the last norm
    weights = [LAYER + EMBEDDING, 3 * LAYER, 0, last]
    assert [one.weights for one in found] == [2 * number for number in weights]
    assert [one.gradients for one in found] == [4 * number for number in weights]
    kept = kept_after_forward(job) * job.tokens_per_rank
    assert [one.activations for one in found] == pytest.approx([4 * kept, 9 * kept, 0, 2 * kept])


def test_streams_fill_the_fullest_stage() -> None:
    of_layer = kept_of_stream(JOB) / JOB.shape.num_layers
    assert kept_of_stream(uneven(1, 3, 0, 2, stages=4)) == pytest.approx(9 * of_layer)
    chunked = replace(JOB, stages=2, model_chunks=2)  # five passes wait
    of_chunk = JOB.shape.num_layers / 4
    assert kept_of_stream(chunked) == pytest.approx(5 * of_chunk * of_layer)


def test_a_stage_without_layers_works_on_none() -> None:
    job = uneven(2, 0, 2, stages=3, recompute="full", recompute_method="uniform", num_gpus=12)
    one = stage_memory(job, 1)
    assert one.total == one.runtime
    assert stage_memory(job, 2).recomputed > 0


def test_the_fullest_stage_may_be_any() -> None:
    assert fullest_stage(uneven(8, 8, 8, stages=3)).stage == 0
    assert fullest_stage(uneven(1, 22, 1, stages=3)).stage == 1
    assert fullest_stage(uneven(1, 1, 22, stages=3)).stage == 2


def test_equal_layers_named_one_by_one_are_equal_stages() -> None:
    job = replace(JOB, stages=2, model_chunks=3)
    assert stage_memories(replace(job, stage_layers=(4,) * 6)) == stage_memories(job)


def test_layers_are_recomputed_in_each_part() -> None:
    """Two of each part's layers: of 1, 4 and 3 layers 1, 2 and 2."""
    job = uneven(1, 4, 3, stages=3, recompute="full", recompute_method="block")
    assert replace(job, recompute_num_layers=2).recomputed_share == 5 / 8


@pytest.mark.parametrize(
    ("stages", "layers"),
    [(2, (0, 1, 3, 0)), (2, (5, 1, 1, 1, 0, 4)), (4, (1, 0, 2, 0, 0, 0, 3, 1)), (3, (9, 1, 1) * 2)],
)
def test_what_waits_is_what_the_schedule_holds(stages: int, layers: tuple[int, ...]) -> None:
    job = uneven(*layers, stages=stages)
    for stage in range(stages):
        of_chunks = layers[stage::stages]
        held = fullest = 0
        order = interleaved(list(range(8 * stages)), stage, stages, len(of_chunks), stages)
        for kind, _, chunk in order:
            held += of_chunks[chunk] if kind == "F" else -of_chunks[chunk]
            fullest = max(fullest, held)
        expected = fullest * kept_after_forward(job)
        assert waiting_activations(job, stage) == pytest.approx(expected)
