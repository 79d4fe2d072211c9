"""Splits and layouts are those that Megatron makes of the same flags."""

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megatron_hdp.megatron.options import (
    TrainingArguments,
    num_model_chunks,
    parse_arguments,
    planned_layers,
    planned_weights,
    stage_split,
    virtual_stage_choices,
    without_virtual_stages,
)
from megatron_hdp.options import OptionError
from megatron_hdp.planner.stages import StageSplit, parts_of
from tests.megatron.options.test_refusals import (
    FIRST,
    HDP,
    LAYERS_OF_VPP,
    LAYOUT,
    PP,
    REQUIRED,
    VPP,
)

pieces = st.sampled_from(["t", "|", "t*2", "t*0", "|*2", "(t|)*2", "(t*2|t)*3", ",", "(,t)*2"])


@given(pieces=st.lists(pieces, max_size=8))
def test_layouts_are_read_as_by_megatron(pieces: list[str]) -> None:
    layout = "E" + "".join(pieces) + "L"
    expected = PipelineParallelLayerLayout.parse_str_to_list(layout)
    assert parts_of(layout) == tuple(part.count(LayerType.decoder) for part in expected)


def megatron_split(
    layers: int, stages: int, chunks: int, flags: dict[str, Any]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Layers of virtual stages and the numbers of their first ones, as Megatron builds them."""
    names = {
        "first": "num_layers_in_first_pipeline_stage",
        "last": "num_layers_in_last_pipeline_stage",
        "embedding": "account_for_embedding_in_pipeline_split",
        "loss": "account_for_loss_in_pipeline_split",
    }
    config = TransformerConfig(
        num_layers=layers,
        hidden_size=8,
        num_attention_heads=1,
        pipeline_model_parallel_size=stages,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        pipeline_dtype="float",
        overlap_p2p_comm=True,
        batch_p2p_comm=False,
        **{names[name]: value for name, value in flags.items()},
    )
    places = [(c if chunks > 1 else None, s) for c in range(chunks) for s in range(stages)]
    return (
        tuple(get_num_layers_to_build(config, c, s) for c, s in places),
        tuple(get_transformer_layer_offset(config, c, s) for c, s in places),
    )


@settings(max_examples=400)
@example(layers=8, stages=2, chunks=2, ends=(4, 4), counted=(False, False))
@example(layers=1, stages=2, chunks=1, ends=(None, 2), counted=(False, False))
@example(layers=3, stages=1, chunks=1, ends=(None, 3), counted=(False, False))
@given(
    layers=st.integers(1, 20),
    stages=st.integers(2, 4),
    chunks=st.integers(1, 3),
    ends=st.tuples(*[st.none() | st.integers(1, 8)] * 2),
    counted=st.tuples(st.booleans(), st.booleans()),
)
def test_splits_are_those_of_megatron(
    layers: int,
    stages: int,
    chunks: int,
    ends: tuple[int | None, int | None],
    counted: tuple[bool, bool],
) -> None:
    flags: dict[str, Any] = {"first": ends[0], "last": ends[1]}
    flags |= {"embedding": counted[0], "loss": counted[1]}
    flags = {name: value for name, value in flags.items() if value}
    try:
        expected, offsets = megatron_split(layers, stages, chunks, flags)
    except (ValueError, AssertionError, ZeroDivisionError):
        expected = (-1,)
    if min(expected) < 0:  # of a stage that cannot be, Megatron takes some
        with pytest.raises(OptionError):
            StageSplit.of(layers, stages, chunks, **flags)
        return
    split = StageSplit.of(layers, stages, chunks, **flags)
    assert split.layers == expected
    assert offsets == tuple(sum(split.layers[:place]) for place in range(len(offsets)))


def parsed(flags: str) -> TrainingArguments:
    """Of seven layers on two stages."""
    return parse_arguments([*REQUIRED, *HDP, *f"--num-layers 7 {PP} {flags}".split()])


@pytest.mark.parametrize(
    ("flags", "layers"),
    [
        (FIRST, (3, 4)),
        ("--decoder-last-pipeline-num-layers 1", (6, 1)),
        ("--account-for-loss-in-pipeline-split", (4, 3)),
        (f"{LAYOUT} E|t*7,L", (0, 7)),
        (f"{LAYOUT} E|t|t*4|ttL", (0, 1, 4, 2)),
        (
            f"--decoder-first-pipeline-num-layers 4 --num-layers 10 {VPP} 2",
            (2, 3, 2, 3),
        ),
        (
            f"--account-for-embedding-in-pipeline-split {LAYERS_OF_VPP} 2",
            (1, 2, 2, 2),
        ),
    ],
)
def test_flags_cut_the_model(flags: str, layers: tuple[int, ...]) -> None:
    arguments = parsed(flags)
    assert stage_split(arguments).layers == layers
    assert num_model_chunks(arguments) == len(layers) // 2


def test_the_same_stages_without_virtual_ones() -> None:
    plain = without_virtual_stages(parsed(f"{LAYOUT} E|t|t*4|ttL"))
    assert stage_split(plain).layers == (4, 3)
    ends = "--decoder-first-pipeline-num-layers 4 --num-layers 10"
    plain = without_virtual_stages(parsed(f"{ends} {VPP} 2"))
    assert stage_split(plain).layers == (4, 6)


@pytest.mark.parametrize(
    ("flags", "choices"),
    [
        ("--num-layers 12", [1, 2, 3, 6]),
        (f"--num-layers 12 {VPP} 3", [1, 2, 3, 6]),
        (f"--num-layers 12 {LAYERS_OF_VPP} 3", [1, 2, 3, 6]),
        ("--num-layers 10 --decoder-first-pipeline-num-layers 4", [1, 2]),
        ("--num-layers 7 --account-for-embedding-in-pipeline-split", [1, 2, 4]),
        (
            "--num-layers 12 --recompute-granularity full --recompute-method uniform "
            "--recompute-num-layers 2",
            [1, 3],
        ),
        (f"--num-layers 7 {LAYOUT} E|t|t*4|ttL", []),
        ("--num-layers 12 --pipeline-model-parallel-size 1", []),
    ],
)
def test_virtual_stages_that_could_be_are_those_that_flags_allow(
    flags: str, choices: list[int]
) -> None:
    found = virtual_stage_choices(parsed(flags))
    assert list(found) == choices
    assert [num_model_chunks(one) for one in found.values()] == choices
    plain = flags.split(" --num-virtual")[0].split(" --num-layers-per")[0]
    for number, one in found.items():
        more = f" --num-virtual-stages-per-pipeline-rank {number}" if number > 1 else ""
        assert one == parsed(plain + more)


def test_all_ranks_plan_with_one_number_of_layers() -> None:
    assert planned_layers(parsed(FIRST)) == 4
    assert planned_layers(parsed(f"{FIRST} --hdp-offload auto")) == 3


def test_weights_count_what_a_token_meets() -> None:
    weights = planned_weights(parsed(FIRST), 1000)
    # parameters of attention and MLP, and of 64 tokens' attention each of the 64 channels
    layer, output = 4 * 64 * 64 + 2 * 64 * 256 + 64 * 64, 64 * 1000
    whole = 7 * layer + output
    assert weights == pytest.approx((3 * layer / whole, (4 * layer + output) / whole))
    even = planned_weights(parsed("--num-layers 8"), 1000)
    assert even is None


def test_stages_of_equally_many_layers_differ_where_layers_do() -> None:
    sparse = "--num-experts 4 --moe-router-topk 1 --moe-router-pre-softmax --moe-ffn-hidden-size 32"
    shared = "--moe-shared-expert-intermediate-size 16 --disable-bias-linear"
    found = planned_weights(parsed(f"--num-layers 4 --moe-layer-freq [0]*2+[1]*2 {sparse}"), 1000)
    more = planned_weights(
        parsed(f"--num-layers 4 --moe-layer-freq [0]*2+[1]*2 {sparse} {shared}"), 1000
    )
    attention, output = 4 * 64 * 64 + 64 * 64, 64 * 1000
    dense, routed = 2 * 64 * 256, 64 * 4 + 2 * 64 * 32
    for weights, mixture in ((found, routed), (more, routed + 2 * 64 * 16)):
        stages = 2 * (attention + dense), 2 * (attention + mixture) + output
        assert weights == pytest.approx([one / sum(stages) for one in stages])
    assert planned_weights(parsed(f"--num-layers 4 {sparse}"), 1000) is None
