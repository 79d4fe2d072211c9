"""Which functions of Megatron-LM the plugin replaces, its switch, and a check that changes none."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any

from megatron_hdp.megatron.cpu import shim as cpu_shim
from megatron_hdp.megatron.lm import releases, replacements
from megatron_hdp.megatron.lm.patching import Patch, PatchSet
from megatron_hdp.megatron.lm.releases import ANY, TESTED, everywhere, installed_version

_TRAINING = "megatron.training.training"


def activate(make_outputs: Any) -> str | None:
    """Puts all patches in; on a machine without a GPU the CPU shim too. A second call does nothing.

    Args:
        make_outputs: makes what a run writes besides Megatron's logs, see `LmRun`.

    Returns:
        A note if this version of Megatron was not tested.

    Raises:
        PatchError: Megatron-LM is not found, or not as expected; nothing is changed.
    """
    if PATCHES.is_applied:
        return None
    replacements.make_outputs = make_outputs
    shim = cpu_shim.needed() and not cpu_shim.is_active()
    if shim:
        cpu_shim.apply()  # before Megatron's training modules are imported
    try:
        return PATCHES.apply(installed_version())
    except BaseException:
        if shim:
            cpu_shim.revert()
        raise


def deactivate() -> None:
    """Takes all out again; does nothing when nothing is in.

    Raises:
        PatchError: somebody patched the same functions later.
    """
    if PATCHES.is_applied:
        from megatron_hdp.megatron.cpu import gpu_gaps

        PATCHES.revert()
        cpu_shim.revert()
        gpu_gaps.revert()


@dataclass(frozen=True)
class PatchCheck:
    """A patch of the plugin, and what keeps it from being applied (None: it fits)."""

    target: str
    why: str
    problem: str | None


def check_patches() -> tuple[PatchCheck, ...] | None:
    """Compares every patch with the Megatron-LM that Python finds, and applies none.

    Returns:
        None if there is no ``megatron.training``.
    """
    if importlib.util.find_spec("megatron.training") is None:
        return None
    shim = cpu_shim.needed() and not cpu_shim.is_active()
    if shim:
        cpu_shim.apply()  # without a GPU Megatron's training modules import under it only
    try:
        version = installed_version()
        patches = PATCHES.of(version) or PATCHES.patches
        whole = PATCHES.problem_of_all(version)
        return tuple(PatchCheck(p.target, p.why, whole or p.problem(version)) for p in patches)
    finally:
        if shim:
            cpu_shim.revert()


PATCHES = PatchSet(
    [
        Patch(
            "megatron.training.arguments:add_megatron_arguments",
            "HDP's flags are a group of Megatron's own parser",
            everywhere("parser"),
            replacements.add_flags,
        ),
        Patch(
            "megatron.training.arguments:validate_args",
            "HDP's flags are checked together with Megatron's",
            everywhere("args", "defaults"),
            replacements.validate,
        ),
        Patch(
            "megatron.training.yaml_arguments:load_yaml",
            "Megatron does not check arguments from a file, so HDP refuses them",
            everywhere("yaml_path"),
            replacements.load_yaml,
        ),
        Patch(
            f"{_TRAINING}:pretrain",
            "heartbeats report a rank that died or hangs to the others",
            ANY,
            replacements.surround,
        ),
        Patch(
            "megatron.training.initialize:_warmup_jit_function",
            "fused functions compile when they are called, not for a whole context's tokens",
            releases.WARM_UP,
            replacements.skip_warm_up,
        ),
        Patch(
            f"{_TRAINING}:get_model",
            "the model gets HDP's attention, positions and loss before DDP wraps it",
            releases.GET_MODEL,
            replacements.adapt_model,
        ),
        Patch(
            "megatron.training.models.dist_utils:unimodal_build_distributed_models",
            "the same for models that come from a builder, as pretrain_gpt's from 0.19",
            releases.BUILD_MODELS,
            replacements.adapt_model,
        ),
        Patch(
            "megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__",
            "PyTorch's norms work with sequence parallelism, where there are no others",
            releases.TORCH_NORM,
            replacements.mark_norm,
        ),
        Patch(
            f"{_TRAINING}:get_megatron_optimizer",
            "its step is timed, and its checkpoints gather whole states correctly",
            ANY,
            replacements.prepare_optimizer,
            owner_only=True,
        ),
        Patch(
            "megatron.training.checkpointing:save_checkpoint",
            "heartbeats wait for it, and its writers end with their rank",
            ANY,
            replacements.save,
        ),
        Patch(
            "megatron.training.checkpointing:load_checkpoint",
            "the distributed optimizer can restore torch's Adam",
            ANY,
            replacements.load,
        ),
        Patch(
            "megatron.training.checkpointing:check_checkpoint_args",
            "a resumed run keeps the order of the data that it began with",
            ANY,
            replacements.compare_order,
        ),
        Patch(
            f"{_TRAINING}:build_train_valid_test_data_iterators",
            "sequences are read slice by slice, as the plan says",
            everywhere("build_train_valid_test_datasets_provider"),
            replacements.build_iterators,
        ),
        Patch(
            f"{_TRAINING}:get_forward_backward_func",
            "a step follows its plan; elsewhere the function stays as it is",
            releases.SCHEDULE,
            replacements.schedule,
            owner_only=True,
        ),
        Patch(
            f"{_TRAINING}:num_floating_point_operations",
            "throughput counts each sequence at its own length",
            releases.OPERATIONS,
            replacements.count_flops,
        ),
        Patch(
            f"{_TRAINING}:training_log",
            "HDP's figures go to Megatron's writers",
            releases.TRAINING_LOG,
            replacements.log,
        ),
        Patch(
            f"{_TRAINING}:evaluate_and_print_results",
            "the loss of each validation set is logged",
            releases.EVALUATION,
            replacements.log_validation_sets,
        ),
    ],
    TESTED,
)
