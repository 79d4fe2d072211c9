"""What the plugin replaces in Megatron-LM, and the switch that puts it in.

Every replacement asks first whether this run has ``--hybrid-data-parallel``; without it, it calls
the original and does nothing else, but for the flags themselves.
"""

from __future__ import annotations

import functools
import inspect
import sys
from typing import Any

from megatron_hdp.megatron import cpu_shim, lm_options, lm_releases
from megatron_hdp.megatron.lm_releases import RELEASES, everywhere, installed_release
from megatron_hdp.megatron.patching import Function, Patch, PatchSet

_TRAINING = "megatron.training.training"

_run: Any = None
"""The `LmRun` of this process, from the moment that Megatron builds its data iterators."""


def activate() -> None:
    """Puts all patches in; on a machine without a GPU the CPU shim too. A second call does nothing.

    Raises:
        PatchError: Megatron-LM is not found, or not as expected; nothing is changed.
    """
    if PATCHES.is_applied:
        return
    shim = cpu_shim.needed() and not cpu_shim.is_active()
    if shim:
        cpu_shim.apply()  # before Megatron's training modules are imported
    try:
        PATCHES.apply(installed_release())
    except BaseException:
        if shim:
            cpu_shim.revert()
        raise


def deactivate() -> None:
    """Takes all out again; does nothing when nothing is in.

    Raises:
        PatchError: somebody patched the same functions later.
    """
    global _run
    if PATCHES.is_applied:
        PATCHES.revert()
        cpu_shim.revert()
        if _run is not None:
            _run.close()
        _run = None


def _add_flags(original: Function) -> Function:
    def add_megatron_arguments(parser: Any) -> Any:
        return lm_options.add_flags(original(parser))

    return add_megatron_arguments


def _load_yaml(original: Function) -> Function:
    def load_yaml(yaml_path: str) -> Any:
        args = original(yaml_path)
        lm_options.refuse_in_yaml(args, sys.argv)
        return args

    return load_yaml


def _validate(original: Function) -> Function:
    def validate_args(args: Any, defaults: Any = None) -> Any:
        lm_options.check(args)
        if args.hybrid_data_parallel:
            lm_options.settle(args)
        return original(args, defaults or {})

    return validate_args


def _adapt_model(original: Function) -> Function:
    """For functions whose first parameter is a function that makes a stage of the model."""
    signature = inspect.signature(original)
    first = next(iter(signature.parameters))

    def build(*positional: Any, **named: Any) -> Any:
        from megatron.training.global_vars import get_args

        args = get_args()
        if not args.hybrid_data_parallel:
            return original(*positional, **named)
        from megatron_hdp.megatron.lm_model import adapt

        bound = signature.bind(*positional, **named)
        make_stage = bound.arguments[first]

        def adapted(*its_positional: Any, **its_named: Any) -> Any:
            model = make_stage(*its_positional, **its_named)
            return adapt(model, fused_loss=args.hdp_fused_loss)

        bound.arguments[first] = adapted
        return original(*bound.args, **bound.kwargs)

    return build


def _build_iterators(original: Function) -> Function:
    def build_train_valid_test_data_iterators(provider: Any) -> Any:
        from megatron.training.global_vars import get_args, get_tokenizer

        global _run
        args = get_args()
        if not args.hybrid_data_parallel:
            return original(provider)
        from megatron_hdp.megatron.lm_run import LmRun

        _run = LmRun(args, get_tokenizer().vocab_size)
        return tuple(_run.data_iterators())

    return build_train_valid_test_data_iterators


def _schedule(original: Function) -> Function:
    def get_forward_backward_func(*positional: Any, **named: Any) -> Any:
        if _run is None:
            return original(*positional, **named)
        return _run.forward_backward

    return get_forward_backward_func


def _count_flops(original: Function) -> Function:
    def num_floating_point_operations(args: Any, batch_size: int, *sums: Any, **named: Any) -> Any:
        if _run is None:
            return original(args, batch_size, *sums, **named)
        return _run.flops(original, batch_size)

    return num_floating_point_operations


def _log(original: Function) -> Function:
    signature = inspect.signature(original)

    def training_log(*positional: Any, **named: Any) -> Any:
        if _run is None:
            return original(*positional, **named)
        bound = signature.bind(*positional, **named).arguments
        iteration = bound["iteration"]
        _run.in_log = True
        try:
            result = original(*positional, **named)
        finally:
            _run.in_log = False
        _run.log(iteration, _writers(_run.args, iteration))
        if iteration % _run.args.log_interval == 0 and not bound.get("is_first_iteration"):
            _run.since_log.clear()
        return result

    return training_log


def _writers(args: Any, iteration: int) -> list[Any]:
    """Megatron's TensorBoard and W&B writers of this rank, if it writes at this iteration."""
    from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

    tensorboard, wandb = get_tensorboard_writer(), get_wandb_writer()
    if tensorboard is None or iteration % args.tensorboard_log_interval:
        return []
    writers = [functools.partial(_to_tensorboard, tensorboard, iteration)]
    if wandb:
        writers.append(functools.partial(_to_wandb, wandb, iteration))
    return writers


def _to_tensorboard(writer: Any, iteration: int, name: str, value: float) -> None:
    writer.add_scalar(name, value, iteration)


def _to_wandb(writer: Any, iteration: int, name: str, value: float) -> None:
    writer.log({name: value}, iteration)


PATCHES = PatchSet(
    [
        Patch(
            "megatron.training.arguments:add_megatron_arguments",
            "HDP's flags are a group of Megatron's own parser",
            everywhere("parser"),
            _add_flags,
        ),
        Patch(
            "megatron.training.arguments:validate_args",
            "HDP's flags are checked together with Megatron's",
            everywhere("args", "defaults"),
            _validate,
        ),
        Patch(
            "megatron.training.yaml_arguments:load_yaml",
            "arguments from a file are not checked, and go without HDP",
            everywhere("yaml_path"),
            _load_yaml,
        ),
        Patch(
            f"{_TRAINING}:get_model",
            "the model gets HDP's attention, positions and loss before DDP wraps it",
            lm_releases.GET_MODEL,
            _adapt_model,
        ),
        Patch(
            "megatron.training.models.dist_utils:unimodal_build_distributed_models",
            "the same for models that come from a builder, as pretrain_gpt's from 0.19",
            lm_releases.BUILD_MODELS,
            _adapt_model,
        ),
        Patch(
            f"{_TRAINING}:build_train_valid_test_data_iterators",
            "sequences are read slice by slice, as the plan says",
            everywhere("build_train_valid_test_datasets_provider"),
            _build_iterators,
        ),
        Patch(
            f"{_TRAINING}:get_forward_backward_func",
            "a step runs its plan; the function itself stays what it is elsewhere",
            lm_releases.SCHEDULE,
            _schedule,
            owner_only=True,
        ),
        Patch(
            f"{_TRAINING}:num_floating_point_operations",
            "throughput counts each sequence at its own length",
            lm_releases.OPERATIONS,
            _count_flops,
        ),
        Patch(
            f"{_TRAINING}:training_log",
            "HDP's figures go to Megatron's writers",
            lm_releases.TRAINING_LOG,
            _log,
        ),
    ],
    RELEASES,
)
