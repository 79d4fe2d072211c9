"""Options of experts that do not go together are refused with the remedy."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_hdp.megatron.options import (
    expert_domain_size,
    expert_layers,
    expert_layers_of_chunk,
    parse_arguments,
)
from megatron_hdp.options import OptionError
from tests.megatron.options.test_arguments import HDP, REQUIRED

MOE = ["--num-experts", "8", "--disable-bias-linear"]


def test_defaults_follow_megatron() -> None:
    plain = parse_arguments(REQUIRED)
    assert (plain.num_experts, plain.moe_ffn_hidden_size) == (None, None)
    args = parse_arguments([*REQUIRED, *MOE, "--ffn-hidden-size", "96"])
    assert (args.num_experts, args.moe_router_topk, args.moe_ffn_hidden_size) == (8, 2, 96)
    assert (args.expert_model_parallel_size, args.expert_tensor_parallel_size) == (1, 1)
    assert (args.moe_router_load_balancing_type, args.moe_aux_loss_coeff) == ("aux_loss", 0)
    assert parse_arguments([*REQUIRED, *MOE, "--swiglu"]).moe_ffn_hidden_size == 128


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--moe-router-topk 9", "--moe-router-topk 9 is more than --num-experts 8"),
        ("--moe-router-topk 1", "needs --moe-router-pre-softmax"),
        (
            "--add-bias-linear --moe-shared-expert-intermediate-size 8",
            "Megatron's shared experts have no bias",
        ),
        (
            "--add-bias-linear --expert-tensor-parallel-size 2 --expert-model-parallel-size 2",
            "each of these ranks would add an expert's bias",
        ),
        ("--moe-shared-expert-gate", "no effect without --moe-shared-expert-intermediate-size"),
        (
            "--moe-shared-expert-intermediate-size 9 --tensor-model-parallel-size 2 "
            "--sequence-parallel",
            "size 9 is not a multiple of --tensor-model-parallel-size 2",
        ),
        ("--moe-router-enable-expert-bias", "needs --moe-router-score-function sigmoid"),
        (
            "--moe-router-score-function sigmoid --moe-router-pre-softmax",
            "--moe-router-pre-softmax has no effect",
        ),
        ("--moe-router-score-function sqrtsoftplus", "invalid choice: 'sqrtsoftplus'"),
        ("--moe-router-num-groups 2", "go together: give both or neither"),
        ("--moe-router-num-groups 3 --moe-router-group-topk 1", "divides --num-experts 8"),
        ("--moe-router-num-groups 2 --moe-router-group-topk 4", "at most that many"),
        (
            "--moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-topk 3",
            "expected a multiple of --moe-router-group-topk 2",
        ),
        (
            "--moe-router-num-groups 4 --moe-router-group-topk 1 --moe-router-topk 4",
            "at most 1 x 2",
        ),
        ("--moe-layer-freq [0]*2", "found no layer with experts"),
        ("--moe-layer-freq [1]*3", "found [1, 1, 1], expected 2 numbers that are 0 or 1"),
        ("--moe-layer-freq 0", "found 0, expected at least 1, or a list of 0 and 1"),
        ("--moe-layer-freq [2,1]", "found [2, 1], expected 2 numbers that are 0 or 1"),
        ("--moe-layer-freq [1]+1", "--moe-layer-freq: found '[1]+1', expected a number, or"),
        ("--moe-router-load-balancing-type none --moe-aux-loss-coeff 0.1", "no effect with"),
        ("--moe-router-load-balancing-type sinkhorn", "invalid choice: 'sinkhorn'"),
        ("--expert-model-parallel-size 3", "not a multiple of --expert-model-parallel-size 3"),
        (
            "--moe-ffn-hidden-size 9 --expert-model-parallel-size 2 "
            "--expert-tensor-parallel-size 2",
            "--moe-ffn-hidden-size 9 is not a multiple of --expert-tensor-parallel-size 2",
        ),
        ("--tensor-model-parallel-size 2", "needs --sequence-parallel"),
        (
            "--num-experts 6 --tensor-model-parallel-size 2 --sequence-parallel "
            "--expert-tensor-parallel-size 1 --expert-model-parallel-size 3",
            "neither divide nor are a multiple of --tensor-model-parallel-size 2",
        ),
        ("--expert-tensor-parallel-size 2", "raise --expert-model-parallel-size"),
    ],
)
def test_a_bad_combination_is_refused(argv: str, message: str) -> None:
    with pytest.raises(OptionError) as error:
        parse_arguments([*REQUIRED, *MOE, *argv.split()])
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("text", "layers", "expected"),
    [
        ("1", 3, [1, 1, 1]),
        ("2", 5, [1, 0, 1, 0, 1]),
        ("[0]*1+[1]*3", 4, [0, 1, 1, 1]),
        ("([1]*2+[0])*2", 6, [1, 1, 0, 1, 1, 0]),
        ("[0, 1]", 2, [0, 1]),
    ],
)
def test_layers_with_experts(text: str, layers: int, expected: list[int]) -> None:
    flags = ["--num-layers", str(layers), "--moe-layer-freq", text]
    assert expert_layers(parse_arguments([*REQUIRED, *MOE, *flags])) == tuple(map(bool, expected))
    assert expert_layers(parse_arguments([*REQUIRED, *flags[:2]])) == (False,) * layers


def test_layers_of_a_model_chunk() -> None:
    flags = ["--num-layers", "5", "--moe-layer-freq", "[0]*2+[1]*3"]
    layout = ["--pipeline-model-parallel-layout", "Et|t|tt|tL", "--pipeline-model-parallel-size"]
    args = parse_arguments([*REQUIRED, *MOE, *HDP, *flags, *layout, "2"])
    chunks = [expert_layers_of_chunk(args, stage, chunk) for chunk in (0, 1) for stage in (0, 1)]
    assert chunks == [(False,), (False,), (True, True), (True,)]


def test_a_pattern_in_yaml(tmp_path: Path) -> None:
    for text, expected in (("2", (True, False)), ("'[0]+[1]'", (False, True))):
        (tmp_path / "model.yaml").write_text(f"moe-layer-freq: {text}\n")
        args = parse_arguments([*REQUIRED, *MOE, "--config", str(tmp_path / "model.yaml")])
        assert expert_layers(args) == expected


@pytest.mark.parametrize(
    "argv",
    ["--moe-router-topk 1", "--expert-model-parallel-size 2", "--expert-tensor-parallel-size 2"],
)
def test_without_experts_an_option_of_theirs_is_refused(argv: str) -> None:
    with pytest.raises(OptionError, match="no effect without --num-experts"):
        parse_arguments([*REQUIRED, *argv.split()])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--moe-aux-loss-coeff 0.1", "aux_loss balances each rank's micro-batch.*use seq_aux_loss"),
        (
            "--moe-aux-loss-coeff 0.1 --moe-router-load-balancing-type global_aux_loss",
            "global_aux_loss balances the micro-batches so far.*use seq_aux_loss",
        ),
        ("--expert-model-parallel-size 4", "spans 4 HDP ranks.*use alltoall"),
    ],
)
def test_what_would_depend_on_the_plan_is_refused_with_hdp_only(argv: str, message: str) -> None:
    flags = [*REQUIRED, *MOE, *argv.split()]
    parse_arguments(flags)
    with pytest.raises(OptionError, match=message):
        parse_arguments([*flags, *HDP])


def test_hdp_takes_what_does_not_depend_on_the_plan() -> None:
    balanced = ["--moe-aux-loss-coeff", "0.1", "--moe-router-load-balancing-type", "seq_aux_loss"]
    across = ["--expert-model-parallel-size", "4", "--moe-token-dispatcher-type", "alltoall"]
    parse_arguments([*REQUIRED, *HDP, *MOE, *balanced, *across])
    parse_arguments([*REQUIRED, *HDP, *MOE])  # Megatron's default type, without weight


@pytest.mark.parametrize(
    ("tensor", "expert", "expert_tensor", "size"),
    [(1, 1, 1, 1), (1, 4, 1, 4), (2, 2, 1, 1), (2, 2, 2, 2), (4, 2, 1, 1), (2, 8, 1, 4)],
)
def test_size_of_an_expert_domain(tensor: int, expert: int, expert_tensor: int, size: int) -> None:
    args = SimpleNamespace(
        tensor_model_parallel_size=tensor,
        expert_model_parallel_size=expert,
        expert_tensor_parallel_size=expert_tensor,
    )
    assert expert_domain_size(args) == size
