"""HDP's flags beside Megatron's: what goes together, and what HDP's classes get."""

import argparse
import importlib.util
import json
import os
from unittest import mock

import pytest
import torch
from megatron.core.transformer.enums import AttnBackend

from megatron_hdp.megatron.lm import options
from megatron_hdp.megatron.options import token_multiple
from megatron_hdp.options import OptionError
from tests.support.processes import run_python

MEGATRONS = {"global_batch_size": 8, "attention_dropout": 0.0, "train_iters": 4}
MEGATRONS |= {"num_layers": 2, "seq_length": 256, "num_attention_heads": 4, "num_query_groups": 1}
MEGATRONS |= {"tensor_model_parallel_size": 1, "sequence_parallel": False}
MEGATRONS |= {"context_parallel_size": 1, "group_query_attention": False}
MEGATRONS |= {"recompute_granularity": None, "add_bias_linear": True}
MEGATRONS |= {"data_path": ["corpus"], "iterations_to_skip": [], "cuda_graph_impl": "none"}


def off(flags="", **megatrons):
    """HDP's flags parsed, and Megatron's arguments as its parser leaves them."""
    args = options.add_flags(argparse.ArgumentParser(allow_abbrev=False)).parse_args(flags.split())
    vars(args).update(MEGATRONS | megatrons)
    return args


def on(flags="", **megatrons):
    """The same of a run under HDP."""
    return off(f"--hybrid-data-parallel --hdp-tokens-per-rank 128 {flags}", **megatrons)


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
_FROM_19 = """dataloader_inter_document_masking expert_tensor_parallel_num_weight_shards
freeze_all_layers logits_load_dir logits_save_dir mtp_detach_heads
tensor_parallel_num_weight_shards"""
_FROM_17 = """mla_down_proj_fusion moe_router_force_biased
mtp_use_repeated_layer optimizer_cuda_graph use_mup"""
LACKING = {
    **dict.fromkeys(_FROM_19.split(), ("0.16", "0.17", "0.18")),
    **dict.fromkeys(_FROM_17.split(), ("0.16",)),
    **dict.fromkeys(("moe_expert_rank_capacity_factor", "moe_paged_stash"), ("0.16", "0.17")),
    "moe_use_legacy_grouped_gemm": ("0.17", "0.18", "0.19"),
    "use_legacy_models": ("0.18", "0.19"),
}
"""Of what is refused, what not every release has, and the releases that have it not."""


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("megatron.training") is None and "MEGATRON_LM_PATH" not in os.environ,
    reason="needs megatron-core 0.17 or newer, or MEGATRON_LM_PATH set to a Megatron-LM checkout",
)
def test_everything_on_the_list_is_a_flag_of_megatron():
    done = run_python("-c", DESTINATIONS, path=[os.environ.get("MEGATRON_LM_PATH", "")])
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
    for values, flags in (({}, ["--hybrid-data-parallel"]), ({"hybrid_data_parallel": True}, [])):
        with pytest.raises(OptionError, match="--yaml-cfg does not go with"):
            options.refuse_in_yaml(argparse.Namespace(**values), flags)


@pytest.mark.parametrize("backend", AttnBackend)
def test_kernels_that_know_no_rings_are_refused(backend):
    options.check(off(attention_backend=backend))
    if backend.name in ("unfused", "local"):
        words = f"--attention-backend {backend.name} .* needs auto, fused or fl"
        with pytest.raises(OptionError, match=words):
            options.check(on(attention_backend=backend))
    else:
        options.check(on(attention_backend=backend))


@pytest.mark.parametrize("name", sorted(options.REFUSED))
def test_everything_on_the_list_is_refused(name):
    wanted, why = options.REFUSED[name]
    several = wanted if isinstance(wanted, tuple) else (wanted,)
    is_text = wanted is None or isinstance(several[0], str)
    other = "other" if is_text else [1] if wanted == [] else 2
    assert other not in several
    for taken in several:
        options.check(on(**{name: taken, "yarn_beta_fast": None}))
    options.check(off(**{name: other}))  # not without HDP
    flag = "--" + name.replace("_", "-")
    with pytest.raises(OptionError, match=rf"^{flag} \(found .*does not go with --hybrid") as info:
        options.check(on(**{name: other}))
    assert why in str(info.value)


TE_LAYERS = {"transformer_impl": "transformer_engine", "fp8": "hybrid"}
TENSORWISE = TE_LAYERS | {"fp8_recipe": "tensorwise"}
BLOCKWISE = TE_LAYERS | {"fp8_recipe": "blockwise"}
BACKEND, DISPATCHER = "moe_flex_dispatcher_backend", "moe_token_dispatcher_type"
FLEX = {DISPATCHER: "flex", "bf16": True, "expert_model_parallel_size": 2}
PADDED_FLEX = {BACKEND: "hybridep", "moe_hybridep_pad_uneven_dispatch_inputs": True}
BESIDE = {DISPATCHER: "alltoall", "moe_shared_expert_overlap": True}
BESIDE |= {"moe_shared_expert_intermediate_size": 8, "add_bias_linear": False}
BASE = {"pretrained_checkpoint": "base"}
TWO = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
SELECTIVE = {"recompute_granularity": "selective"}
RAMP = {"rampup_batch_size": [2, 2, 8]}
UNSCALED = {"use_rope_scaling": True, "rope_scaling_factor": 32.0}


@pytest.mark.parametrize(
    ("flags", "megatrons", "message"),
    [
        ("--stall-timeout-seconds nan", {}, "--stall-timeout-seconds: found nan"),
        (f"--hdp-corrupt-limit 1{'0' * 20}", {}, "--hdp-corrupt-limit: found 1000"),
        (f"--hdp-trace t --hdp-trace-steps {'9' * 5000}", {}, "--hdp-trace-steps: fou"),
        ("", {"global_batch_size": None}, "found neither of"),
        ("", {"attention_dropout": 0.1}, "--attention-dropout 0"),
        ("", {"data_path": None}, "--data-path is missing"),
        ("--hdp-data f", {"train_data_path": ["a"]}, "--train-data-path, expected"),
        ("", {"recompute_modules": ["core_attn", "moe"]}, "--recompute-modules moe does not go"),
        ("", SELECTIVE | {"recompute_modules": ["moe_act"]}, "moe_act: found no TransformerEngine"),
        ("", SELECTIVE | {"recompute_modules": ["mlp"]}, "mlp: found biases"),
        ("", TE_LAYERS | {"fp8_recipe": "delayed"}, "delayed does not go .* needs tensorwise or b"),
        ("", TE_LAYERS | {"fp8_recipe": "mxfp8"}, "mxfp8 does not go .* Blackwell"),
        ("", TE_LAYERS | {"fp8_recipe": "custom"}, "custom does not go .* HDP does not know it"),
        (
            "",
            TENSORWISE | {"transformer_impl": "local"},
            "-impl local: expected transform",
        ),
        ("", TENSORWISE | {"fp8_param_gather": True}, "--fp8-param-gather does not go with"),
        ("--hdp-offload auto", TENSORWISE, "--hdp-offload auto with --fp8-format: expected off"),
        ("--hdp-tokens-per-rank 120", TENSORWISE, "120 is not a multiple of 16, .* give 112"),
        ("", BLOCKWISE | TWO, "128 is not a multiple of 256, .* give 256"),
        ("", FLEX | {BACKEND: "hybridep"}, "equally many tokens .* use deepe"),
        ("", FLEX | {BACKEND: "ncclep"}, "ncclep does not go .* needs deepep"),
        ("--hdp-offload auto", BESIDE, "--moe-shared-expert-overlap with --hdp-offload auto: expe"),
        ("", {"spec": ["a.module", "name"]}, "--spec: found .*'a.module'.* expected none"),
        ("", {"hybrid_layer_pattern": "*-M-"}, "-pattern: found M, expected .* a Mamba block"),
        ("", {"hybrid_layer_pattern": "*-/G-"}, "-pattern: found G, expected .* gated delta net"),
        ("", {"hybrid_layer_pattern": "D-"}, "-pattern: found D, expected .* sparse attention"),
        ("--hdp-encoder e", {"hidden_dropout": 0.1}, "found --hidden-dropout 0.1, which does not"),
        ("--lora-rank 2", BASE | {"ckpt_format": "torch"}, "format torch, expected torch_dist"),
        ("--lora-rank 2", BASE | {"finetune": True}, "and --finetune beside it, expected one"),
        # what Megatron-LM's script reads and leaves out
        ("", {"position_embedding_type": "yarn"}, "expected 0.19 or newer"),
        ("", UNSCALED, "--rope-scaling-factor: found 32.0, expected 8"),
        ("", RAMP | {"step_batch_size_schedule": None}, "--rampup-batch-size: .* give --step-batc"),
    ],
)
def test_refusals_together(flags, megatrons, message):
    with pytest.raises(OptionError, match=message):
        options.check(on(flags, **megatrons))
    options.check(off(**megatrons))


@pytest.mark.parametrize("fp8", [TENSORWISE, BLOCKWISE, TENSORWISE | TWO])
def test_fp8_scaled_by_the_tensor_or_its_blocks_is_taken(fp8):
    padded = "first_last_layers_bf16", "moe_router_padding_for_fp8"
    options.check(on(**fp8, **dict.fromkeys(padded, True)))
    args = on(**fp8, num_experts=None)
    options.check_derived(args)
    assert token_multiple(args) == {1: 16, 2: 32}[args.tensor_model_parallel_size]


def test_what_is_on_and_off_by_halves_is_refused():
    with pytest.raises(OptionError, match="needs --hdp-tokens-per-rank"):
        options.check(off("--hybrid-data-parallel"))
    with pytest.raises(OptionError, match="no effect without --hybrid-data-parallel"):
        options.check(off("--hdp-strategy static"))
    with pytest.raises(OptionError, match="-objective has no effect without --hybrid-data-para"):
        options.check(off("--hdp-objective simpo"))


def test_what_a_release_hands_to_the_model_is_not_refused():
    options.check(on(position_embedding_type="yarn", yarn_beta_fast=None))
    options.check(on(**UNSCALED | {"rope_scaling_factor": 8.0}))
    options.check(on(**RAMP))


def test_a_schedule_of_sizes_stands_for_the_batch_size():
    sizes = {"global_batch_size": None, "step_batch_size_schedule": "0:2 1K:4", "num_experts": None}
    args = on(**sizes)
    options.check(args)
    args.global_batch_size = 2  # Megatron derives one
    options.check_derived(args)
    with pytest.raises(OptionError, match="found 'x', expected FROM:SIZE"):
        options.check(on(**(sizes | {"step_batch_size_schedule": "x"})))


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
    options.check(off(**args))  # Megatron's own business without HDP
    options.check(on(**(args | {"moe_grouped_gemm": False})))
    if found is None:
        options.check(on(**args))
        return
    with pytest.raises(OptionError) as info:
        options.check(on(**args))
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


LAYERS, CHUNKS, GROUPS = (
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
    "microbatch_group_size_per_vp_stage",
)
BALANCING = "moe_router_load_balancing_type"
SHARED = {"add_bias_linear": True, "moe_shared_expert_intermediate_size": 8}
THREE = {"tensor_model_parallel_size": 3, "sequence_parallel": True}


@pytest.mark.parametrize(
    ("flags", "megatrons", "message"),
    [
        ("", THREE, "128 is not a multiple of --tensor-model-parallel-size 3"),
        ("--hdp-offload auto", {}, "no effect with 2 layers on a rank"),
        ("", EXPERTS | SHARED, "needs --disable-bias-linear"),
        ("", EXPERTS | {"moe_router_score_function": "sqrtsoftplus"}, "expected softmax or sigmoi"),
        ("", EXPERTS | {"moe_layer_freq": [1, 0, 1]}, "expected 2 numbers that are 0 or 1"),
        ("", EXPERTS | {BALANCING: "aux_loss"}, "use seq_aux_loss, or"),
        ("", EXPERTS | {BALANCING: ["aux_loss"]}, "--moe-router-load-balancing-type: found .'aux"),
        ("", EXPERTS | {"moe_token_dispatcher_type": "x"}, "found 'x', expected allgather or"),
        ("", EXPERTS | FLEX | {"expert_model_parallel_size": 1}, "flex: found a single rank for a"),
        ("", EXPERTS | FLEX | {"bf16": False}, "flex: found no --bf16, expected .*use alltoall"),
        ("", EXPERTS | BESIDE | {DISPATCHER: "allgather"}, "expected alltoall, be"),
        ("", VIRTUAL | {GROUPS: 3}, "-per-virtual-pipeline-stage: found 3, expected 2, the pipeli"),
        ("", VIRTUAL | {"overlap_p2p_comm": False}, "--no-overlap-p2p-communication with virtual"),
        ("", VIRTUAL | {"overlap_p2p_comm_warmup_flush": True}, "-warmup-flush: found it, expecte"),
    ],
)
def test_what_megatron_has_derived_is_checked_by_the_rules_of_our_own_command(
    flags, megatrons, message
):
    args = on(flags, **({"num_experts": None} | megatrons))
    options.check(args)
    with pytest.raises(OptionError, match=message):
        options.check_derived(args)


@pytest.mark.parametrize(
    "megatrons",
    [
        EXPERTS,
        EXPERTS | {"moe_layer_freq": [0, 1], "moe_shared_expert_intermediate_size": 8},
        EXPERTS | {"moe_layer_freq": 2, "add_bias_linear": True},
        EXPERTS | FLEX,
        EXPERTS | FLEX | PADDED_FLEX,
        EXPERTS | BESIDE,
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
    args = on(**megatrons)
    options.check(args)
    options.check_derived(args)


def test_without_hdp_nothing_is_touched():
    args = off(attention_dropout=0.1, data_path=None, context_parallel_size=4)
    before = dict(vars(args))
    options.check(args)
    assert vars(args) == before


def test_what_hdps_classes_read():
    args = on("--hdp-strategy naive", kv_channels=8, bf16=True, save="checkpoints")
    found = options.training_arguments(args)
    assert (found.hdp_strategy, found.hdp_tokens_per_rank) == ("naive", 128)
    assert (found.num_layers, found.kv_channels, found.bf16, found.fp64) == (2, 8, True, False)
    assert found.data_path == ("corpus",)
    assert found.num_query_groups == 4  # Megatron's 1 counts with --group-query-attention only
    grouped = on(group_query_attention=True, num_query_groups=2)
    assert options.training_arguments(grouped).num_query_groups == 2


def test_what_is_set_of_megatrons():
    args = on(calculate_per_token_loss=False, apply_rope_fusion=True)
    options.settle(args)
    assert args.calculate_per_token_loss
    assert not args.apply_rope_fusion  # a CPU has no such kernel


@pytest.mark.parametrize("wanted", [False, True])
def test_fused_rotation_stays_as_it_is_wanted_where_its_kernel_is(monkeypatch, wanted):
    monkeypatch.setattr(options, "fused_kernel_is_there", lambda: True)
    args = on(apply_rope_fusion=wanted, num_experts=None, kv_channels=8)
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
    args = on(multiple_validation_sets=True, validation_set_names=names)
    options.settle(args)
    assert args.hdp_validation_sets == (names or [])
    assert not args.multiple_validation_sets and args.validation_set_names is None
    args = on(validation_set_names=names)
    options.settle(args)
    assert args.hdp_validation_sets is None and args.validation_set_names == names


@pytest.mark.parametrize(
    ("flags", "megatrons", "found"),
    [
        ("", {"async_save": True, "async_strategy": "nvrx"}, "nvrx, expected mcore"),
        ("", {"log_straggler": True}, "--log-straggler"),
        ("", {"use_nccl_ub": True}, "--use-nccl-ub"),
        ("", {}, "found no MEGATRON_HDP_MEMBER"),
    ],
)
def test_what_does_not_survive_is_refused(monkeypatch, flags, megatrons, found):
    monkeypatch.delenv("MEGATRON_HDP_MEMBER", raising=False)
    with pytest.raises(OptionError, match=f"^--hdp-survive: .*{found}"):
        options.check(on(f"--hdp-survive {flags}", **megatrons))


@pytest.mark.parametrize("found", [None, "3"])
def test_ranks_on_gpus_set_what_they_need_to_survive(found):
    variables = {"MEGATRON_HDP_MEMBER": "0", "MASTER_ADDR": "here", "MASTER_PORT": "1"}
    variables |= {} if found is None else {"TORCH_NCCL_ASYNC_ERROR_HANDLING": found}
    on_gpu = mock.patch.object(options, "compute_device", lambda: torch.device("cuda"))
    with mock.patch.dict(os.environ, variables), on_gpu:
        if found is None:
            options._check_survival(on("--hdp-survive"))
            assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
            return
        with pytest.raises(OptionError, match="HANDLING=3, expected 0, or unset: else PyTorch's w"):
            options._check_survival(on("--hdp-survive"))


def test_buffers_of_deep_ep_do_not_survive():
    args = on("--hdp-survive", **FLEX)
    with pytest.raises(OptionError, match="flex with --hdp-survive: expected alltoall"):
        options.check_dispatcher(args, options.training_arguments(args))
