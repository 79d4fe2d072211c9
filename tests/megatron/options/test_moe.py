"""Options of experts that do not go together are refused with the remedy."""

from types import SimpleNamespace

import pytest

from megatron_hdp.megatron.options import expert_domain_size, parse_arguments
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
        ("--add-bias-linear", "needs --disable-bias-linear"),
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
    "argv",
    ["--moe-router-topk 1", "--expert-model-parallel-size 2", "--expert-tensor-parallel-size 2"],
)
def test_without_experts_an_option_of_theirs_is_refused(argv: str) -> None:
    with pytest.raises(OptionError, match="no effect without --num-experts"):
        parse_arguments([*REQUIRED, *argv.split()])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--moe-aux-loss-coeff 0.1", "aux_loss levels each rank's micro-batch.*use seq_aux_loss"),
        (
            "--moe-aux-loss-coeff 0.1 --moe-router-load-balancing-type global_aux_loss",
            "global_aux_loss levels the micro-batches so far.*use seq_aux_loss",
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
