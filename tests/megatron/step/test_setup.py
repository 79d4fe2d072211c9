"""Before the first step: what attention is asked for, the same on all ranks; long steps."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_hdp.megatron import parallel
from megatron_hdp.megatron.options import TrainingArguments
from megatron_hdp.megatron.parallel import RankPlace
from megatron_hdp.megatron.step import preparation, setup
from megatron_hdp.planner import CostModel
from megatron_hdp.runtime.attention import RunShapes, Selection
from megatron_hdp.runtime.epochs import keys
from megatron_hdp.training.loop import pretrain
from tests.support.gradients import tiny_arguments, write_corpus

PLACE = RankPlace(
    hdp_rank=3,
    num_hdp_ranks=16,
    stage=0,
    num_stages=2,
    tensor_rank=1,
    num_tensor_ranks=4,
    lockstep_ranks=1,
    token_multiple=4,
)
ARGUMENTS = TrainingArguments(
    num_attention_heads=32,
    num_query_groups=8,
    kv_channels=96,
    seq_length=65_536,
    hdp_tokens_per_rank=8192,
)
KIND = torch.device("cpu"), torch.float32, 96
SHAPES = RunShapes(*KIND, heads=8, kv_heads=2, longest=65_536, tokens_per_rank=8192, num_ranks=16)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, SHAPES),
        ({"num_query_groups": 1}, replace(SHAPES, kv_heads=1)),
        (
            {"multi_latent_attention": True, "num_query_groups": 32},
            replace(SHAPES, kv_heads=8, head_dim=192, value_dim=128),
        ),
        ({"hdp_offload": "auto"}, replace(SHAPES, tokens_per_rank=65_536)),
    ],
    ids=[
        "tensor ranks share heads",
        "at least one head",
        "values of another size",
        "offload makes room",
    ],
)
def test_what_attention_is_asked_for(changes, expected):
    assert setup._shapes_of(replace(ARGUMENTS, **changes), PLACE) == expected


class Named:
    def __init__(self, name):
        self.name = name


def take(names):
    name = names[dist.get_rank()]
    refused = {} if name == "transformer-engine 2.20.2" else {"transformer-engine": "OSError: no"}
    try:
        setup._require_one_attention(Selection(Named(name), refused))
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"fp8": "hybrid", "fp8_recipe": "delayed"}, "--fp8-recipe delayed does not go with"),
        ({"fp8": "e4m3", "fp8_recipe": "tensorwise", "fp8_param": True}, "--fp8-param-gather does"),
        (
            {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "hybridep"},
            "hybridep needs equally many tokens",
        ),
    ],
)
def test_a_model_that_others_built_is_refused_by_its_configuration(monkeypatch, config, message):
    """Its flags were never seen."""
    monkeypatch.setattr(setup, "get_model_config", lambda chunk: SimpleNamespace(**config))
    with pytest.raises(ValueError, match=message):
        setup.build_executor(ARGUMENTS, [None], mock.Mock())


@pytest.mark.parametrize("name", ["torch-flash", "transformer-engine 2.20.2"])
def test_equal_ones_pass(run_ranks, name):
    assert run_ranks(2, take, [name] * 2) == [None, None]


def test_every_rank_raises_and_says_who_differs(run_ranks):
    names = ["transformer-engine 2.20.2", "transformer-engine 2.20.2", "torch-flash"]
    errors = run_ranks(3, take, names)
    assert errors[0] == errors[1] == errors[2]
    for expected in (
        "rank 0 by transformer-engine 2.20.2",
        "rank 2 by torch-flash; not transformer-engine: OSError: no",
        "--hdp-attention",
    ):
        assert expected in errors[0]


@pytest.fixture
def said(monkeypatch):
    lines = []
    monkeypatch.setattr(preparation, "say", lines.append)
    return lines


def test_short_steps_are_not_told(said):
    one = preparation.LongStepWarning(10)
    one.check(0.0, "is planned to take")
    one.check(299.9, "took")
    assert not said


def test_a_long_step_is_told_once(said):
    one = preparation.LongStepWarning(10)
    one.check(900.0, "is planned to take")
    one.check(900.0, "took")
    (line,) = said
    assert "a step is planned to take 900 s" in line
    assert "found --distributed-timeout-minutes 10, expected at least 31" in line
    again = preparation.LongStepWarning(31)
    again.check(900.0, "took")
    assert len(said) == 1, "what is expected is enough"


def trained(arguments):
    lines = []
    with mock.patch.object(preparation, "say", lines.append):
        pretrain(arguments)
    return lines


def test_a_run_looks_at_the_plan_of_its_first_step(run_ranks, tmp_path):
    slow = CostModel(a=1.0, b=1.0, kv_bytes_per_token=1.0)
    (tmp_path / "slow.json").write_bytes(slow.to_json())
    arguments = tiny_arguments(write_corpus(tmp_path, [30, 20, 10]), train_iters=2)
    found = run_ranks(1, trained, replace(arguments, hdp_cost_model=tmp_path / "slow.json"))
    ((line,),) = found
    assert line.startswith("warning: a step is planned to take 1,460 s")
    assert "expected at least 50" in line


@pytest.mark.parametrize("is_bound", [True, False])
def test_a_rank_is_bound_to_its_gpus_node_before_anything_else(monkeypatch, is_bound):
    class NothingElseYet(Exception):
        pass

    bind, said = mock.Mock(return_value="bound"), mock.Mock()
    monkeypatch.setattr(setup, "compute_device", lambda: torch.device("cuda", 3))
    monkeypatch.setattr(setup, "pci_address", lambda index: f"0000:{index:02x}:00.0")
    monkeypatch.setattr(setup.numa, "bind", bind)
    monkeypatch.setattr(setup, "say", said)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setattr(setup, "clock_of", mock.Mock(side_effect=NothingElseYet))
    with pytest.raises(NothingElseYet):
        setup.build_executor(replace(ARGUMENTS, hdp_numa_binding=is_bound), [], mock.Mock())
    assert bind.mock_calls == [mock.call("0000:03:00.0", 8)] * is_bound
    assert said.mock_calls == [mock.call("CPUs: bound")] * is_bound


def ranks_per_node(known, settings, mapping):
    """Body of a rank: of a node, as its run plans."""
    make = parallel_state.initialize_model_parallel
    if mapping:  # Megatron's --use-tp-pp-dp-mapping
        make = partial(make, order="tp-cp-ep-pp-dp")
    with mock.patch.object(parallel_state, "initialize_model_parallel", make):
        parallel.initialise(arguments := tiny_arguments(None, **settings))
    model = CostModel(a=1.0, b=1.0, kv_bytes_per_token=1, ranks_per_node=known)
    return setup._on_nodes(model, parallel.rank_place(arguments)).ranks_per_node


@pytest.mark.parametrize(
    ("stages", "mapping", "known", "expected"),
    [(2, True, 4, 2), (2, False, 4, 4), (2, True, 1, 1), (1, True, 4, 4)],
    ids=["apart", "adjacent", "known-already", "no-stages"],
)
def test_hdp_ranks_that_lie_apart_share_fewer_nodes(run_ranks, stages, mapping, known, expected):
    """The four ranks of the job are one node's."""
    settings = {"pipeline_model_parallel_size": stages}
    assert run_ranks(4, ranks_per_node, known, settings, mapping) == [expected] * 4


def test_known_speeds_are_of_gpus_where_ranks_come_and_go(tmp_path, monkeypatch):
    """Two stages of two tensor ranks, three HDP ranks in the beginning, two later."""
    path = tmp_path / "speeds"
    path.write_text("0.5\n0.7\n0.9\n")
    arguments = replace(ARGUMENTS, hdp_rank_speeds=path)
    monkeypatch.setenv("WORLD_SIZE", "12")
    now = {0: ["2", "3", "8", "9"], 1: ["4", "7", None, "10"]}  # by HDP rank, places of its GPUs
    told = []
    monkeypatch.setattr(setup, "gathered", lambda mine: told.append(mine) or [*told])
    for hdp_rank, slots in now.items():
        place = replace(PLACE, num_tensor_ranks=2, num_hdp_ranks=2, hdp_rank=hdp_rank)
        for slot in slots:
            monkeypatch.delenv(keys.PLACE, raising=False)
            if slot is not None:
                monkeypatch.setenv(keys.PLACE, slot)
            found = setup._speeds_of_gpus(arguments, place)
    assert [speed for _, speed in told] == [0.7, 0.7, 0.7, 0.7, 0.9, 0.5, 1.0, 0.9]
    assert found == [0.7, 0.5]
