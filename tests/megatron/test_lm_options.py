"""HDP's flags beside Megatron's: what goes together, and what HDP's classes get."""

import argparse

import pytest

from megatron_hdp.megatron import lm_options
from megatron_hdp.options import OptionError


def parsed(*flags, **megatrons):
    """HDP's flags parsed, and Megatron's arguments as its parser leaves them."""
    parser = lm_options.add_flags(argparse.ArgumentParser(allow_abbrev=False))
    args = parser.parse_args(flags)
    values = {
        "global_batch_size": 8,
        "attention_dropout": 0.0,
        "train_iters": 4,
        "data_path": ["corpus"],
        "tensor_model_parallel_size": 1,
        "sequence_parallel": False,
        "context_parallel_size": 1,
        "group_query_attention": False,
        "num_attention_heads": 4,
        "num_query_groups": 1,
        "iterations_to_skip": [],
        "cuda_graph_impl": "none",
        "num_layers": 2,
        "seq_length": 256,
        **megatrons,
    }
    vars(args).update(values)
    return args


ON = ("--hybrid-data-parallel", "--hdp-tokens-per-rank", "128")


@pytest.mark.parametrize("name", sorted(lm_options.REFUSED))
def test_everything_on_the_list_is_refused(name):
    wanted, why = lm_options.REFUSED[name]
    other = "other" if wanted in (None, "none", "rope", "vanilla") else [1] if wanted == [] else 2
    lm_options.check(parsed(*ON, **{name: wanted}))
    lm_options.check(parsed(**{name: other}))  # not without HDP
    flag = "--" + name.replace("_", "-")
    with pytest.raises(OptionError, match=rf"^{flag} \(found .*does not go with --hybrid") as info:
        lm_options.check(parsed(*ON, **{name: other}))
    assert why in str(info.value)


@pytest.mark.parametrize(
    ("flags", "megatrons", "message"),
    [
        (ON[:1], {}, "needs --hdp-tokens-per-rank"),
        (ON, {"global_batch_size": None}, "found neither of"),
        (ON, {"attention_dropout": 0.1}, "--attention-dropout 0"),
        (ON, {"data_path": ["0.3", "a", "0.7", "b"]}, "found 4 values, expected one prefix"),
        (ON, {"data_path": None}, "found 0 values, expected one prefix"),
        (
            ON,
            {"tensor_model_parallel_size": 3, "sequence_parallel": True},
            "128 is not a multiple of --tensor-model-parallel-size 3",
        ),
        (("--hdp-strategy", "static"), {}, "no effect without --hybrid-data-parallel"),
    ],
)
def test_refusals_together(flags, megatrons, message):
    with pytest.raises(OptionError, match=message):
        lm_options.check(parsed(*flags, **megatrons))


def test_without_hdp_nothing_is_touched():
    args = parsed(attention_dropout=0.1, data_path=None, context_parallel_size=4)
    before = dict(vars(args))
    lm_options.check(args)
    assert vars(args) == before


def test_what_hdps_classes_read():
    args = parsed(*ON, "--hdp-strategy", "naive", kv_channels=8, bf16=True, save="checkpoints")
    found = lm_options.training_arguments(args)
    assert (found.hdp_strategy, found.hdp_tokens_per_rank) == ("naive", 128)
    assert (found.num_layers, found.kv_channels, found.bf16, found.fp64) == (2, 8, True, False)
    assert found.data_path == ("corpus",)
    assert found.num_query_groups == 4  # Megatron's 1 counts with --group-query-attention only
    grouped = parsed(*ON, group_query_attention=True, num_query_groups=2)
    assert lm_options.training_arguments(grouped).num_query_groups == 2


def test_what_is_set_of_megatrons():
    args = parsed(*ON, calculate_per_token_loss=False, apply_rope_fusion=True)
    lm_options.settle(args)
    assert args.calculate_per_token_loss and not args.apply_rope_fusion
