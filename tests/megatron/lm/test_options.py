"""HDP's flags beside Megatron's: what goes together, and what HDP's classes get."""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from megatron.core.transformer.enums import AttnBackend

from megatron_hdp.megatron.lm import options
from megatron_hdp.options import OptionError


def parsed(*flags, **megatrons):
    """HDP's flags parsed, and Megatron's arguments as its parser leaves them."""
    parser = options.add_flags(argparse.ArgumentParser(allow_abbrev=False))
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
DESTINATIONS = """
import argparse, json
from megatron_hdp.megatron.cpu import shim
if shim.needed():
    shim.apply()
from megatron.core.package_info import __version__
from megatron.training.arguments import add_megatron_arguments
names = [action.dest for action in add_megatron_arguments(argparse.ArgumentParser())._actions]
print(json.dumps([__version__, names]))
"""
LACKING = {
    "dataloader_inter_document_masking": ("0.16", "0.17", "0.18"),
    "expert_tensor_parallel_num_weight_shards": ("0.16", "0.17", "0.18"),
    "freeze_all_layers": ("0.16", "0.17", "0.18"),
    "hybrid_layer_pattern": ("0.16",),
    "logits_load_dir": ("0.16", "0.17", "0.18"),
    "logits_save_dir": ("0.16", "0.17", "0.18"),
    "mla_down_proj_fusion": ("0.16",),
    "moe_expert_rank_capacity_factor": ("0.16", "0.17"),
    "moe_paged_stash": ("0.16", "0.17"),
    "moe_router_force_biased": ("0.16",),
    "moe_use_legacy_grouped_gemm": ("0.17", "0.18", "0.19"),
    "mtp_detach_heads": ("0.16", "0.17", "0.18"),
    "mtp_use_repeated_layer": ("0.16",),
    "optimizer_cuda_graph": ("0.16",),
    "tensor_parallel_num_weight_shards": ("0.16", "0.17", "0.18"),
    "use_legacy_models": ("0.18", "0.19"),
    "use_mup": ("0.16",),
}
"""Of what is refused, what not every release has, and the releases that have it not."""


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("megatron.training") is None and "MEGATRON_LM_PATH" not in os.environ,
    reason="needs megatron-core 0.17 or newer, or MEGATRON_LM_PATH set to a Megatron-LM checkout",
)
def test_everything_on_the_list_is_a_flag_of_megatron():
    path = [str(Path(__file__).parents[3]), os.environ.get("MEGATRON_LM_PATH", "")]
    done = subprocess.run(
        [sys.executable, "-c", DESTINATIONS],
        env=os.environ
        | {
            "PYTHONPATH": os.pathsep.join([*path, os.environ.get("PYTHONPATH", "")]),
            "PYTHONWARNINGS": "ignore",
        },
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    version, names = json.loads(done.stdout.splitlines()[-1])
    release = ".".join(version.split(".")[:2])
    expected = {name for name in options.REFUSED if release not in LACKING.get(name, ())}
    assert expected <= set(names), f"{release} lacks {sorted(expected - set(names))}"
    there = {name for name in LACKING if release in LACKING[name] and name in names}
    assert not there, f"{release} has {sorted(there)}"


def test_every_name_that_a_release_lacks_is_refused_elsewhere():
    assert set(LACKING) <= set(options.REFUSED)
    assert all(len(releases) < 4 for releases in LACKING.values())


def test_help_is_printed_whatever_megatrons_texts_hold():
    parser = argparse.ArgumentParser()
    parser.add_argument("--theirs", default=3, help="1.1 = 10%). 5 %% of %(default)s")
    assert "10%). 5 % of 3" in options.add_flags(parser).format_help()


def test_arguments_from_a_file_go_without_hdp():
    args = argparse.Namespace(yaml_cfg="file.yaml")
    options.refuse_in_yaml(args, ["--yaml-cfg", "file.yaml"])
    assert args.hybrid_data_parallel is False
    for values, flags in (({}, [ON[0]]), ({"hybrid_data_parallel": True}, [])):
        with pytest.raises(OptionError, match="--yaml-cfg does not go with"):
            options.refuse_in_yaml(argparse.Namespace(**values), flags)


@pytest.mark.parametrize("name", ["unfused", "local"])
def test_kernels_that_know_no_rings_are_refused(name):
    backend = AttnBackend[name]
    with pytest.raises(OptionError, match=f"--attention-backend {name} .* needs auto, fused or fl"):
        options.check(parsed(*ON, attention_backend=backend))
    options.check(parsed(attention_backend=backend))
    for other in ("auto", "fused", "flash"):
        options.check(parsed(*ON, attention_backend=AttnBackend[other]))


@pytest.mark.parametrize("name", sorted(options.REFUSED))
def test_everything_on_the_list_is_refused(name):
    wanted, why = options.REFUSED[name]
    several = wanted if isinstance(wanted, tuple) else (wanted,)
    is_text = wanted is None or isinstance(several[0], str)
    other = "other" if is_text else [1] if wanted == [] else 2
    assert other not in several
    for taken in several:
        options.check(parsed(*ON, **{name: taken, "yarn_beta_fast": None}))
    options.check(parsed(**{name: other}))  # not without HDP
    flag = "--" + name.replace("_", "-")
    with pytest.raises(OptionError, match=rf"^{flag} \(found .*does not go with --hybrid") as info:
        options.check(parsed(*ON, **{name: other}))
    assert why in str(info.value)


@pytest.mark.parametrize(
    ("flags", "megatrons", "message"),
    [
        (ON[:1], {}, "needs --hdp-tokens-per-rank"),
        ((*ON, "--stall-timeout-seconds", "nan"), {}, "--stall-timeout-seconds: found nan"),
        ((*ON, "--hdp-corrupt-limit", "1" + "0" * 20), {}, "--hdp-corrupt-limit: found 1000"),
        ((*ON, "--hdp-trace", "t", "--hdp-trace-steps", "9" * 5000), {}, "--hdp-trace-steps: fou"),
        (ON, {"global_batch_size": None}, "found neither of"),
        (ON, {"attention_dropout": 0.1}, "--attention-dropout 0"),
        (ON, {"data_path": None}, "--data-path is missing"),
        (
            (*ON, "--hdp-data", "f"),
            {"train_data_path": ["a"]},
            "--train-data-path, expected",
        ),
        (ON, {"recompute_modules": ["core_attn", "moe"]}, "--recompute-modules moe does not go"),
        (("--hdp-strategy", "static"), {}, "no effect without --hybrid-data-parallel"),
    ],
)
def test_refusals_together(flags, megatrons, message):
    with pytest.raises(OptionError, match=message):
        options.check(parsed(*flags, **megatrons))


@pytest.mark.parametrize(
    ("megatrons", "message"),
    [
        ({"position_embedding_type": "yarn"}, "expected 0.19 or newer"),
        (
            {"use_rope_scaling": True, "rope_scaling_factor": 32.0},
            "--rope-scaling-factor: found 32.0, expected 8",
        ),
    ],
)
def test_scalings_that_megatrons_script_leaves_out_are_refused(megatrons, message):
    with pytest.raises(OptionError, match=message):
        options.check(parsed(*ON, **megatrons))
    options.check(parsed(**megatrons))
    of_19 = {"yarn_beta_fast": None, "rope_scaling_factor": 8.0}
    options.check(parsed(*ON, **(megatrons | of_19)))


def test_a_ramp_that_megatron_reads_and_leaves_out_is_refused():
    ramp = {"rampup_batch_size": [2, 2, 8]}
    options.check(parsed(*ON, **ramp))
    with pytest.raises(OptionError, match="--rampup-batch-size: .* give --step-batch"):
        options.check(parsed(*ON, step_batch_size_schedule=None, **ramp))


def test_a_schedule_of_sizes_stands_for_the_batch_size():
    sizes = {"global_batch_size": None, "step_batch_size_schedule": "0:2 1K:4", "num_experts": None}
    args = parsed(*ON, **sizes)
    options.check(args)
    args.global_batch_size = 2  # Megatron derives one
    options.check_derived(args)
    with pytest.raises(OptionError, match="found 'x', expected FROM:SIZE"):
        options.check(parsed(*ON, **(sizes | {"step_batch_size_schedule": "x"})))


TE = "megatron.core.extensions.transformer_engine.TEColumnParallelGroupedLinear"


@pytest.mark.parametrize(
    ("impl", "kernel", "found"),
    [
        ("local", object, "--transformer-impl local"),
        ("inference_optimized", object, "--transformer-impl inference_optimized"),
        ("transformer_engine", None, "no TransformerEngine that has it"),
        ("transformer_engine", object, None),
    ],
)
def test_grouped_experts_need_transformer_engines_kernel(monkeypatch, impl, kernel, found):
    monkeypatch.setattr(TE, kernel)
    args = {"moe_grouped_gemm": True, "transformer_impl": impl}
    options.check(parsed(**args))  # Megatron's own business without HDP
    options.check(parsed(*ON, **(args | {"moe_grouped_gemm": False})))
    if found is None:
        options.check(parsed(*ON, **args))
        return
    with pytest.raises(OptionError) as info:
        options.check(parsed(*ON, **args))
    expected = f"--moe-grouped-gemm: found {found}, expected TransformerEngine's grouped kernel"
    assert str(info.value).startswith(expected) and "pip install" in str(info.value)


EXPERTS = {
    "num_experts": 4,
    "moe_ffn_hidden_size": 8,
    "moe_router_topk": 2,
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_aux_loss_coeff": 0.01,
    "expert_tensor_parallel_size": 1,
    "add_bias_linear": False,
}


VIRTUAL = {
    "num_experts": None,
    "num_layers": 8,
    "pipeline_model_parallel_size": 2,
    "num_virtual_stages_per_pipeline_rank": 2,
    "microbatch_group_size_per_vp_stage": None,
    "overlap_p2p_comm": True,
    "overlap_p2p_comm_warmup_flush": False,
}


@pytest.mark.parametrize(
    ("flags", "megatrons", "message"),
    [
        (
            ON,
            {"tensor_model_parallel_size": 3, "sequence_parallel": True},
            "128 is not a multiple of --tensor-model-parallel-size 3",
        ),
        ((*ON, "--hdp-offload", "auto"), {}, "no effect with 2 layers on a rank"),
        (
            ON,
            EXPERTS | {"add_bias_linear": True, "moe_shared_expert_intermediate_size": 8},
            "needs --disable-bias-linear",
        ),
        (ON, EXPERTS | {"moe_router_score_function": "sqrtsoftplus"}, "expected softmax or sigmoi"),
        (ON, EXPERTS | {"moe_layer_freq": [1, 0, 1]}, "expected 2 numbers that are 0 or 1"),
        (ON, EXPERTS | {"moe_router_load_balancing_type": "aux_loss"}, "use seq_aux_loss, or"),
        (
            ON,
            EXPERTS | {"moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"]},
            "--moe-router-load-balancing-type: found .'aux_loss', 'seq_aux_loss'.",
        ),
        (ON, EXPERTS | {"moe_token_dispatcher_type": "flex"}, "found 'flex', expected allgather"),
        (
            ON,
            VIRTUAL | {"microbatch_group_size_per_vp_stage": 3},
            "--microbatch-group-size-per-virtual-pipeline-stage: found 3, expected 2, the pipeline",
        ),
        (ON, VIRTUAL | {"overlap_p2p_comm": False}, "--no-overlap-p2p-communication with virtual"),
        (
            ON,
            VIRTUAL | {"overlap_p2p_comm_warmup_flush": True},
            "--overlap-p2p-communication-warmup-flush: found it, expected none",
        ),
    ],
)
def test_what_megatron_has_derived_is_checked_by_the_rules_of_our_own_command(
    flags, megatrons, message
):
    args = parsed(*flags, **({"num_experts": None} | megatrons))
    options.check(args)
    with pytest.raises(OptionError, match=message):
        options.check_derived(args)


LAYERS, CHUNKS, GROUPS = (
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
    "microbatch_group_size_per_vp_stage",
)


@pytest.mark.parametrize(
    "megatrons",
    [
        EXPERTS,
        EXPERTS | {"moe_layer_freq": [0, 1], "moe_shared_expert_intermediate_size": 8},
        EXPERTS | {"moe_layer_freq": 2, "add_bias_linear": True},
        EXPERTS | {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
        VIRTUAL | {GROUPS: None},
        VIRTUAL | {GROUPS: 2},
        VIRTUAL | {CHUNKS: None, LAYERS: 2, GROUPS: None},
        VIRTUAL | {CHUNKS: None, LAYERS: 2, GROUPS: 2},
        VIRTUAL | {CHUNKS: None, "decoder_first_pipeline_num_layers": 2},
        VIRTUAL | {"account_for_embedding_in_pipeline_split": True, "num_layers": 15},
        VIRTUAL | {"pipeline_model_parallel_layout": "Et|ttt|ttt|tL"},
        VIRTUAL | {CHUNKS: 1, "overlap_p2p_comm": False},  # no virtual stages
    ],
)
def test_experts_and_stages_go_together_with_hdp(megatrons):
    args = parsed(*ON, **megatrons)
    options.check(args)
    options.check_derived(args)


def test_without_hdp_nothing_is_touched():
    args = parsed(attention_dropout=0.1, data_path=None, context_parallel_size=4)
    before = dict(vars(args))
    options.check(args)
    assert vars(args) == before


def test_what_hdps_classes_read():
    args = parsed(*ON, "--hdp-strategy", "naive", kv_channels=8, bf16=True, save="checkpoints")
    found = options.training_arguments(args)
    assert (found.hdp_strategy, found.hdp_tokens_per_rank) == ("naive", 128)
    assert (found.num_layers, found.kv_channels, found.bf16, found.fp64) == (2, 8, True, False)
    assert found.data_path == ("corpus",)
    assert found.num_query_groups == 4  # Megatron's 1 counts with --group-query-attention only
    grouped = parsed(*ON, group_query_attention=True, num_query_groups=2)
    assert options.training_arguments(grouped).num_query_groups == 2


def test_what_is_set_of_megatrons():
    args = parsed(*ON, calculate_per_token_loss=False, apply_rope_fusion=True)
    options.settle(args)
    assert args.calculate_per_token_loss
    assert not args.apply_rope_fusion  # a CPU has no such kernel


@pytest.mark.parametrize("wanted", [False, True])
def test_fused_rotation_stays_as_it_is_wanted_where_its_kernel_is(monkeypatch, wanted):
    monkeypatch.setattr(options, "fused_kernel_is_there", lambda: True)
    args = parsed(*ON, apply_rope_fusion=wanted, num_experts=None, kv_channels=8)
    options.settle(args)
    options.check_derived(args)
    assert args.apply_rope_fusion == wanted
    args.hdp_tokens_per_rank = 2**31 // (3 * 8 * args.num_attention_heads) + 1
    if wanted:
        with pytest.raises(options.OptionError, match="add --no-rope-fusion"):
            options.check_derived(args)
    else:
        options.check_derived(args)


@pytest.mark.parametrize("names", [None, ["a", "b"]])
def test_validation_sets_are_told_apart_by_hdp_alone(names):
    args = parsed(*ON, multiple_validation_sets=True, validation_set_names=names)
    options.settle(args)
    assert args.hdp_validation_sets == (names or [])
    assert not args.multiple_validation_sets and args.validation_set_names is None
    args = parsed(*ON, validation_set_names=names)
    options.settle(args)
    assert args.hdp_validation_sets is None and args.validation_set_names == names
