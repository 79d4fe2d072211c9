"""``megatron-hdp doctor``: what is installed, where HDP joins Megatron, and what is wrong.

A probe never fails: what it does not find becomes a problem with one line of advice. So this module
imports torch and Megatron only inside its probes.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import platform
import warnings
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from megatron_hdp import __version__
from megatron_hdp.data_plane.left_behind import LeftBehind, clean_up, find_left_behind
from megatron_hdp.exit_codes import ExitCode
from megatron_hdp.megatron.doctor.surroundings import (
    Checkout,
    PackageCheck,
    apex_advice,
    check_packages,
    current_folder_first,
    find_checkout,
    gpu_advice,
    network_advice,
    network_problems,
    ring_channels,
    version_of,
)
from megatron_hdp.runtime.cuda import compute_capability, describe

if TYPE_CHECKING:
    from megatron_hdp.megatron.lm.patches import PatchCheck


@dataclass(frozen=True)
class Seam:
    """A place in Megatron that HDP joins without replacing any of its functions."""

    target: str
    """``module:Class.attr``"""
    why: str
    parameter: str | None = None
    """The parameter of the target that HDP relies on."""


@dataclass(frozen=True)
class SeamCheck:
    """A seam, and what is wrong with it in the installed megatron-core (None: it is there)."""

    seam: Seam
    problem: str | None


@dataclass(frozen=True)
class Diagnosis:
    """All that doctor found; `problems` is empty when training can run."""

    versions: dict[str, str | None]
    device: str
    before_cuda: dict[str, str]
    """The settings that CUDA reads when it starts, and why."""
    cpu_shim_applies: bool
    cpu_shim_redirects: dict[str, str]
    gpu_gaps: dict[str, str]
    """What a run on a GPU defines because Megatron does not."""
    ring_channels: str
    """NCCL's channels of two neighbours of a ring, by the size of the job."""
    attention_kernel: str | None
    attention_refused: dict[str, str]
    """Preferred kernels that cannot be used, and why."""
    seams: tuple[SeamCheck, ...]
    megatron_lm: Checkout | None
    """That a run finds."""
    patches: tuple[PatchCheck, ...] | None
    """Those of the plugin for that Megatron-LM; None where there is none."""
    optional_packages: tuple[PackageCheck, ...]
    left_behind: tuple[LeftBehind, ...]
    """By data planes of dead jobs."""
    advice: tuple[str, ...]
    """What could be better, and what to do about it; training runs as it is."""
    problems: tuple[str, ...]
    """What keeps training from running, and what to do."""
    removed: tuple[LeftBehind, ...] | None = None
    """Of what was left behind, if that was asked for."""


SEAMS = (
    Seam(
        "megatron.core.transformer.attention:SelfAttentionSubmodules.core_attention",
        "the layer specification names HDP's ring attention",
    ),
    Seam(
        "megatron.core.models.gpt.gpt_model:GPTModel.forward",
        "a micro-batch's ring and positions travel with its call",
        parameter="packed_seq_params",
    ),
    Seam(
        "megatron.core.models.common.embeddings.rotary_pos_embedding:"
        "RotaryEmbedding.get_rotary_seq_len",
        "a subclass on the model answers with each token's own position",
        parameter="packed_seq_params",
    ),
    Seam(
        "megatron.core.models.common.embeddings.rotary_pos_embedding:"
        "RotaryEmbedding.get_freqs_non_repeated",
        "the same subclass turns those positions into angles",
        parameter="max_seq_len",
    ),
    Seam(
        "megatron.core.models.common.embeddings.yarn_rotary_pos_embedding:"
        "YarnRotaryEmbedding.get_emb",
        "YaRN's frequencies are its angles of position 1, and its factor comes with them",
        parameter="max_seq_len",
    ),
    Seam(
        "megatron.core.transformer.multi_token_prediction:MultiTokenPredictionLayer._get_embeddings",
        "a subclass takes the tokens behind labels from the micro-batch instead of rolling",
        parameter="packed_seq_params",
    ),
    Seam(
        "megatron.core.models.gpt.gpt_model:GPTModel._postprocess",
        "a subclass of the model asks its output layer for the loss, unless --no-hdp-fused-loss",
        parameter="loss_mask",
    ),
    Seam(
        "megatron.core.tensor_parallel.layers:ColumnParallelLinear.forward",
        "a subclass, the model's output layer, returns the loss without making logits",
        parameter="runtime_gather_output",
    ),
    Seam(
        "megatron.core.transformer.multi_latent_attention:MLASelfAttention.forward",
        "a subclass, named by the layer specification, runs a pass of its own over its projections",
        parameter="packed_seq_params",
    ),
    Seam(
        "megatron.core.transformer.moe.moe_layer:MoESubmodules.router",
        "the layer specification names HDP's router of experts",
    ),
    Seam(
        "megatron.core.transformer.moe.router:TopKRouter.routing",
        "that router adds its own balancing loss to Megatron's choice",
        parameter="logits",
    ),
    Seam(
        "megatron.core.transformer.moe.router:TopKRouter.apply_z_loss",
        "that router adds its own z-loss instead of Megatron's",
        parameter="logits",
    ),
    Seam(
        "megatron.core.transformer.moe.router:TopKRouter._apply_expert_bias",
        "that router counts real tokens by expert, each once a step",
        parameter="routing_map",
    ),
    Seam(
        "megatron.core.distributed.finalize_model_grads:_update_router_expert_bias",
        "moves the expert bias by these counts, summed over all ranks of a stage",
    ),
    Seam(
        "megatron.core.tensor_parallel.layers:RowParallelLinear.forward",
        "a subclass, the second matrix of experts with biases, gives its output memory of its own",
        parameter="input_",
    ),
    Seam(
        "megatron.core.transformer.moe.moe_utils:MoEAuxLossAutoScaler.apply",
        "what the router adds takes part in backward",
    ),
    Seam(
        "megatron.core.transformer.transformer_layer:TransformerLayer.forward",
        "a subclass hands its router the micro-batch that runs",
    ),
    Seam(
        "megatron.core.model_parallel_config:ModelParallelConfig.finalize_model_grads_func",
        "gradients are divided by the global batch's loss tokens, once",
    ),
    Seam(
        "megatron.core.transformer.transformer_config:TransformerConfig.calculate_per_token_loss",
        "Megatron must not divide by anything of its own",
    ),
    Seam(
        "megatron.core.transformer.transformer_config:TransformerConfig.softmax_type",
        "HDP's attention has Megatron's sink, under its name; in a checkout it takes that one over",
    ),
    Seam(
        "megatron.core.transformer.utils:is_layer_window_attention",
        "HDP's attention asks it which layers have a window",
        parameter="layer_number",
    ),
    Seam(
        "megatron.core.pipeline_parallel.schedules:forward_backward_no_pipelining",
        "ranks may run different numbers of micro-batches through it",
        parameter="num_microbatches",
    ),
    Seam(
        "megatron.core.optimizer.distrib_optimizer:"
        "DistributedOptimizer._set_main_param_and_optimizer_states",
        "overridden on the instance while torch's Adam loads a checkpoint",
        parameter="tensors",
    ),
    Seam(
        "megatron.core.optimizer.distrib_optimizer:"
        "DistributedOptimizer.get_parameter_state_dp_zero",
        "overridden on the instance: gathers the state for a checkpoint, bucket padding included",
        parameter="return_on_all_ranks",
    ),
    Seam(
        "megatron.core.optimizer.distrib_optimizer:"
        "DistributedOptimizer._copy_model_grads_to_main_grads",
        "overridden on the instance with --fp64: gradients stay float64",
    ),
    Seam(
        "megatron.core.optimizer.optimizer:ChainedOptimizer.get_grad_norm",
        "overridden on the instance with --fp64: the norm is float64",
    ),
    Seam(
        "megatron.core.dist_checkpointing.serialization:save",
        "checkpoints are written under another name, renamed when every rank is done",
        parameter="async_sharded_save",
    ),
    Seam(
        "megatron.core.dist_checkpointing.strategies.filesystem_async:_results_queue",
        "replaced while a save begins: writers report through a file, no process outlives a kill",
    ),
    Seam(
        "torch.distributed.checkpoint.filesystem:pickle",
        "replaced while a checkpoint is read: its list of tensors runs no code",
    ),
    Seam(
        "torch.distributed.checkpoint.default_planner:DefaultLoadPlanner.load_bytes",
        "wrapped while a checkpoint is read: the objects in it run no code",
        parameter="value",
    ),
)


def run_doctor(as_json: bool, clean: bool) -> int:
    """Prints the diagnosis and returns the exit code: 0 when training can run, 1 otherwise.

    Args:
        as_json: for tools.
        clean: what data planes of dead jobs have left behind is removed first.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron's imports warn of what the table below says
        diagnosis = diagnose()
    if clean:
        still_there = clean_up(diagnosis.left_behind)
        removed = tuple(one for one in diagnosis.left_behind if one not in still_there)
        diagnosis = replace(diagnosis, left_behind=still_there, removed=removed)
    print(json.dumps(asdict(diagnosis), indent=2) if as_json else _text(diagnosis))
    return ExitCode.FAILED if diagnosis.problems else ExitCode.DONE


@current_folder_first()
def diagnose() -> Diagnosis:
    """Looks at this machine and at what a run that starts here finds on it; changes nothing."""
    problems = [_advice(name) for name in ("torch", "megatron.core") if not _importable(name)]
    problems += _compiled_problems()
    has_torch = _importable("torch")
    problems += network_problems()
    num_gpus = 0
    device, shim_applies, redirects, gaps = "unknown", False, {}, {}
    kernel: str | None = None
    refused: dict[str, str] = {}
    if has_torch:
        from megatron_hdp.megatron.cpu import shim

        shim_applies, redirects = shim.needed(), shim.REDIRECTS
        device, num_gpus = _device()
        kernel, refused, problem = _attention(shim_applies)
        problems += [problem] if problem else []
    seams = tuple(SeamCheck(seam, check_seam(seam)) for seam in SEAMS)
    found = patches = note = None
    if _importable("megatron.core"):
        from megatron_hdp.megatron.cpu.gpu_gaps import GAPS
        from megatron_hdp.megatron.lm.patches import check_patches
        from megatron_hdp.megatron.lm.releases import installed_version, untested

        found, patches, note = find_checkout(), check_patches(), untested(installed_version())
        gaps = {} if shim_applies else GAPS
        problems += [check.problem for check in seams if check.problem is not None]
    advice = (apex_advice(), network_advice(), gpu_advice(num_gpus), _patch_advice(patches), note)
    return Diagnosis(
        versions=_versions(),
        device=device,
        before_cuda=describe(compute_capability()),
        cpu_shim_applies=shim_applies,
        cpu_shim_redirects=redirects,
        gpu_gaps=gaps,
        ring_channels=ring_channels() if has_torch else "unknown",
        attention_kernel=kernel,
        attention_refused=refused,
        seams=seams,
        megatron_lm=found,
        patches=patches,
        optional_packages=check_packages(),
        left_behind=find_left_behind(),
        advice=tuple(line for line in advice if line is not None),
        problems=tuple(problems),
    )


def check_seam(seam: Seam) -> str | None:
    """What is wrong with `seam` in the installed megatron-core; None when it is as expected."""
    module_name, _, path = seam.target.partition(":")
    remedy = "install a megatron-core that this version supports (see the README)"
    if not _importable(module_name):
        return f"{seam.target}: found no module {module_name}: {remedy}"
    found: Any = importlib.import_module(module_name)
    for name in path.split("."):
        if name in getattr(found, "__dataclass_fields__", {}):
            return None  # a field without default is no attribute of its class
        if not hasattr(found, name):
            return f"{seam.target}: {found.__name__} has no {name!r}: {remedy}"
        found = getattr(found, name)
    if seam.parameter is None or seam.parameter in inspect.signature(found).parameters:
        return None
    return f"{seam.target}{inspect.signature(found)} takes no {seam.parameter!r}: {remedy}"


def _versions() -> dict[str, str | None]:
    """Versions by name; None for what is not installed."""
    versions: dict[str, str | None] = {
        "megatron_hdp": __version__,
        "python": platform.python_version(),
    }
    versions |= {name: version_of(name) for name in ("torch", "megatron-core", "numpy")}
    if versions["torch"] and _importable("torch"):
        import torch

        if torch.version.cuda is not None:
            versions["CUDA of torch"] = torch.version.cuda
        if torch.cuda.is_available():
            versions["NCCL"] = ".".join(str(part) for part in torch.cuda.nccl.version())
    return versions


def _importable(module: str) -> bool:
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True


def _advice(module: str) -> str:
    return f"{module} does not import: `python -c 'import {module}'` shows why; reinstall it"


def _compiled_problems() -> list[str]:
    """What the rooms with C++ in them say that do not load; a later one may want an earlier one."""
    for room in ("planner", "data"):
        try:
            importlib.import_module(f"megatron_hdp.{room}")
        except ImportError as error:
            return [str(error)]
    return []


def _device() -> tuple[str, int]:
    """What ranks run on here, and how many GPUs there are."""
    import torch

    if torch.cuda.is_available():
        num_gpus = torch.cuda.device_count()
        return f"{num_gpus} x {torch.cuda.get_device_name()}", num_gpus
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPUs only"
    return (
        f"cpu ({torch.get_num_threads()} threads); no GPU found by a torch built for {built}: gloo "
        "instead of NCCL, no attention kernels of GPUs, no Triton",
        0,
    )


def _attention(on_cpu: bool) -> tuple[str | None, dict[str, str], str | None]:
    """What ``--hdp-attention auto`` takes and what it does not; or what is wrong.

    On a GPU for bfloat16 and a head dimension of 128: a run asks for its own.
    """
    import torch

    from megatron_hdp.runtime.attention import RunShapes, select_attention

    device = torch.device("cpu" if on_cpu else "cuda")
    dtype = torch.float32 if on_cpu else torch.bfloat16
    try:
        selection = select_attention(RunShapes(device, dtype, head_dim=128))
    except ValueError as error:
        return None, {}, str(error)
    return selection.backend.name, selection.refused, None


def _patch_advice(patches: tuple[PatchCheck, ...] | None) -> str | None:
    misfits = sum(check.problem is not None for check in patches or ())
    if not misfits:
        return None
    return (
        f"{misfits} patches do not fit this Megatron-LM, so `python -m megatron_hdp run` refuses "
        "it: install what is missing, or git checkout a release that the README's table of "
        "supported versions lists"
    )


def _text(diagnosis: Diagnosis) -> str:
    lines = [f"{name:18} {found or 'not found'}" for name, found in diagnosis.versions.items()]
    lines += [
        f"{'device':18} {diagnosis.device}",
        *(f"{name:18} {words}" for name, words in diagnosis.before_cuda.items()),
        f"{'ring channels':18} {diagnosis.ring_channels}",
        f"{'attention kernel':18} {diagnosis.attention_kernel or 'none'}",
        *(f"{'':18} not {name}: {why}" for name, why in diagnosis.attention_refused.items()),
        "",
        "seams in megatron-core (HDP replaces none of its functions):",
    ]
    for check in diagnosis.seams:
        suffix = f"({check.seam.parameter}=...)" if check.seam.parameter else ""
        lines.append(f"  {'MISSING' if check.problem else 'ok':8}{check.seam.target}{suffix}")
        lines.append(f"{'':10}{check.seam.why}")
    lines += ["", *_megatron_lm_lines(diagnosis.megatron_lm, diagnosis.patches or ())]
    if diagnosis.cpu_shim_applies:
        lines += ["", "without a GPU, a run redirects until it ends:"]
        lines += [f"  {what}: {how}" for what, how in diagnosis.cpu_shim_redirects.items()]
    else:
        lines += ["", "the CPU shim does not apply here; a run defines until it ends:"]
        lines += [f"  {what}: {how}" for what, how in diagnosis.gpu_gaps.items()]
    lines += ["", "optional packages:"]
    for item in diagnosis.optional_packages:
        found = item.found or f"not found: {item.package.without_it}"
        lines.append(f"  {item.package.name:20}{found}")
        if item.found is None:
            lines.append(f"{'':22}to get it: {item.package.remedy}")
    lines += _left_behind_lines(diagnosis)
    if diagnosis.advice:
        lines += ["", "advice:", *(f"  - {line}" for line in diagnosis.advice)]
    lines.append("")
    if diagnosis.problems:
        lines.append("training cannot run:")
        lines += [f"  - {problem}" for problem in diagnosis.problems]
    else:
        lines.append("training can run")
    return "\n".join(lines)


def _left_behind_lines(diagnosis: Diagnosis) -> list[str]:
    remedy = "`megatron-hdp doctor --clean-up` removes it"
    lines = []
    if diagnosis.removed is not None:
        remedy = "it cannot be removed: look at its permissions"
        lines += ["", "removed, left behind by data planes of dead jobs:"]
        lines += [f"  {one.folder}" for one in diagnosis.removed] or ["  nothing, none was there"]
    if diagnosis.left_behind:
        lines += ["", f"left behind by data planes of dead jobs ({remedy}):"]
    for one in diagnosis.left_behind:
        pids = f", processes {', '.join(map(str, one.pids))}" if one.pids else ""
        lines.append(f"  {one.folder} ({one.num_bytes / 1e6:.1f} MB{pids})")
        if one.why_kept is not None:
            lines.append(f"{'':4}it ended badly, its log is there: {one.why_kept}")
    return lines


def _megatron_lm_lines(found: Checkout | None, patches: tuple[PatchCheck, ...]) -> list[str]:
    if found is None:
        return [
            "no Megatron-LM here for `python -m megatron_hdp run`: run in its checkout, or put it "
            "on PYTHONPATH"
        ]
    where = (
        "the current folder: its pretrain_gpt.py uses it, from any folder"
        if found.is_current
        else "on Python's path: a run uses it unless its script's folder has another one"
    )
    lines = [
        f"{'Megatron-LM':18} {found.folder} ({found.release})",
        f"{'':18} {where}",
        "functions of this Megatron-LM that `python -m megatron_hdp run` replaces:",
    ]
    for check in patches:
        lines.append(f"  {'MISFIT' if check.problem else 'ok':8}{check.target}")
        lines.append(f"{'':10}{check.problem or check.why}")
    return lines
