"""Layers of every virtual stage by Megatron's flags; tests/megatron/model compares with its own."""

from typing import Any

import pytest

from megatron_hdp.options import OptionError
from megatron_hdp.planner.stages import StageSplit

EMBEDDING, LOSS = {"embedding": True}, {"loss": True}


@pytest.mark.parametrize(
    ("layers", "stages", "chunks", "flags", "expected"),
    [
        (4, 1, 1, {}, (4,)),
        (8, 2, 2, {}, (2, 2, 2, 2)),
        (3, 2, 1, {"first": 1}, (1, 2)),
        (3, 2, 1, {"last": 1}, (2, 1)),
        (3, 2, 1, {"first": 2, "last": 1}, (2, 1)),
        (61, 8, 1, {"first": 4, "last": 3}, (4, 9, 9, 9, 9, 9, 9, 3)),
        (94, 4, 1, {"first": 23, "last": 23}, (23, 24, 24, 23)),
        (10, 2, 2, {"first": 4}, (2, 3, 2, 3)),
        (3, 1, 1, {"first": 3}, (3,)),
        (3, 1, 1, {"last": 3}, (3,)),
        (94, 4, 1, EMBEDDING | LOSS, (23, 24, 24, 23)),
        (7, 4, 1, EMBEDDING, (1, 2, 2, 2)),
        (7, 4, 2, LOSS, (1, 1, 1, 1, 1, 1, 1, 0)),
        (2, 2, 2, EMBEDDING | LOSS, (0, 1, 1, 0)),
        (5, 2, 1, {"layout": "Et|t*4,L"}, (1, 4)),
        (5, 2, 1, {"layout": "E|t*2|t*3|L"}, (0, 2, 3, 0)),
    ],
)
def test_layers_in_the_models_order(
    layers: int, stages: int, chunks: int, flags: dict[str, Any], expected: tuple[int, ...]
) -> None:
    split = StageSplit.of(layers, stages, chunks, **flags)
    assert split.layers == expected
    assert split.is_even == (len(set(expected)) == 1)


def test_layers_of_stages_and_chunks() -> None:
    split = StageSplit.of(9, 2, layout="E|t*2|t*3|t*4,L")
    assert (split.of_chunks(0), split.of_chunks(1)) == ((0, 3), (2, 4))
    assert split.of_stages == (3, 6)
    assert (split.fewest, split.most) == (3, 6)


@pytest.mark.parametrize(
    ("layers", "stages", "chunks", "flags", "message"),
    [
        (94, 4, 1, {}, "--num-layers 94 is not a multiple of --pipeline-model-parallel-size 4"),
        (61, 4, 1, EMBEDDING, "--num-layers 61 + 1 (embedding) = 62 is not a multiple of"),
        (94, 4, 5, EMBEDDING | LOSS, "5 virtual stages on a rank do not divide the 24 layers"),
        (1, 1, 1, {"layout": "EttL"}, "found 2 layers (t), expected --num-layers 1"),
        (3, 2, 1, {"layout": "Et|t|tL"}, "found 3 parts, expected a multiple of"),
        (3, 2, 1, {"first": 3}, "--decoder-first-pipeline-num-layers 3 leave 0 of --num-layers 3"),
        (3, 2, 1, {"first": 2, "last": 2}, "leave -1 of --num-layers 3 to 0 of"),
        (4, 2, 1, {"first": 1, "last": 1}, "leave 2 of --num-layers 4 to 0 of"),
        (8, 4, 1, {"last": 1}, "leave 7 of --num-layers 8 to the other 3 stages"),
        (9, 3, 2, {"first": 3}, "found 3 layers of --decoder-first-pipeline-num-layers, expected"),
        (10, 2, 2, {"first": 6, **LOSS}, "found --decoder-first-pipeline-num-layers and --account"),
        (4, 2, 1, {"last": 1, "layout": "EttL"}, "found --pipeline-model-parallel-layout and --d"),
        (4, 2, 1, {"layout": "EttL", **EMBEDDING}, "expected one way to cut the model"),
    ],
)
def test_what_megatron_refuses_is_refused(
    layers: int, stages: int, chunks: int, flags: dict[str, Any], message: str
) -> None:
    with pytest.raises(OptionError) as error:
        StageSplit.of(layers, stages, chunks, **flags)
    assert message in str(error.value)
