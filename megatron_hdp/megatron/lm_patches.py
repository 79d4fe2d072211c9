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
from megatron_hdp.megatron.lm_releases import RELEASES, WHATEVER, everywhere, installed_release
from megatron_hdp.megatron.patching import Function, Patch, PatchSet

_TRAINING = "megatron.training.training"

_job: Any = None
"""The `LmJob` of this process while ``pretrain()`` runs."""
_run: Any = None
"""The `LmRun` of this process, from the moment that Megatron builds its data iterators."""
_make_outputs: Any = None


def activate(make_outputs: Any) -> None:
    """Puts all patches in; on a machine without a GPU the CPU shim too. A second call does nothing.

    Args:
        make_outputs: makes what a run writes besides Megatron's logs, see `LmRun`.

    Raises:
        PatchError: Megatron-LM is not found, or not as expected; nothing is changed.
    """
    global _make_outputs
    if PATCHES.is_applied:
        return
    _make_outputs = make_outputs
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
    if PATCHES.is_applied:
        from megatron_hdp.megatron import gpu_gaps

        PATCHES.revert()
        cpu_shim.revert()
        gpu_gaps.revert()


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
        validated = original(args, defaults or {})
        if args.hybrid_data_parallel:
            lm_options.check_derived(args)
        return validated

    return validate_args


def _surround(original: Function) -> Function:
    def pretrain(*positional: Any, **named: Any) -> Any:
        global _job, _run
        from megatron_hdp.megatron.lm_job import LmJob

        try:
            with LmJob() as _job:
                return original(*positional, **named)
        finally:
            if _run is not None:
                _run.close()
            _job = _run = None

    return pretrain


def _adapt_model(original: Function) -> Function:
    """For functions whose first parameter is a function that makes a stage of the model."""
    signature = inspect.signature(original)
    first = next(iter(signature.parameters))

    def build(*positional: Any, **named: Any) -> Any:
        from megatron.training.global_vars import get_args

        args = get_args()
        if not args.hybrid_data_parallel:
            return original(*positional, **named)
        from megatron_hdp.megatron import gpu_gaps
        from megatron_hdp.megatron.lm_model import adapt

        _job.begin(args)
        if not cpu_shim.is_active():
            gpu_gaps.fill()
        bound = signature.bind(*positional, **named)
        make_stage = bound.arguments[first]

        def adapted(*its_positional: Any, **its_named: Any) -> Any:
            model = make_stage(*its_positional, **its_named)
            return adapt(model, fused_loss=args.hdp_fused_loss)

        bound.arguments[first] = adapted
        return original(*bound.args, **bound.kwargs)

    return build


def _mark_norm(original: Function) -> Function:
    def __new__(cls: type, config: Any, *positional: Any, **named: Any) -> Any:
        if not config.sequence_parallel or not _hdp_is_on():
            return original(cls, config, *positional, **named)
        from megatron_hdp.megatron.norm import SequenceParallelNorm

        return SequenceParallelNorm(config, *positional, **named)

    return __new__


def _prepare_optimizer(original: Function) -> Function:
    def get_megatron_optimizer(*positional: Any, **named: Any) -> Any:
        optimizer = original(*positional, **named)
        if _hdp_is_on():
            from megatron.training.global_vars import get_args

            from megatron_hdp.megatron import lm_checkpoint

            lm_checkpoint.prepare_optimizer(optimizer, get_args())
            optimizer.step = _timed(optimizer.step)
        return optimizer

    return get_megatron_optimizer


def _timed(step: Function) -> Function:
    def timed(*positional: Any, **named: Any) -> Any:
        with _job.optimizer_step():
            return step(*positional, **named)

    return timed


def _save(original: Function) -> Function:
    def save_checkpoint(*positional: Any, **named: Any) -> Any:
        if _run is None:
            return original(*positional, **named)
        with _job.saving():
            return original(*positional, **named)

    return save_checkpoint


def _load(original: Function) -> Function:
    signature = inspect.signature(original)

    def load_checkpoint(*positional: Any, **named: Any) -> Any:
        if not _hdp_is_on():
            return original(*positional, **named)
        from megatron_hdp.megatron import lm_checkpoint

        optimizer = signature.bind(*positional, **named).arguments["optimizer"]
        with lm_checkpoint.loading(optimizer):
            return original(*positional, **named)

    return load_checkpoint


def _compare_order(original: Function) -> Function:
    def check_checkpoint_args(checkpoint_args: Any, *positional: Any, **named: Any) -> Any:
        from megatron.training.global_vars import get_args

        from megatron_hdp.megatron import lm_checkpoint

        args = get_args()
        arguments = lm_options.training_arguments(args) if args.hybrid_data_parallel else None
        lm_checkpoint.require_same_order(args, arguments, checkpoint_args)
        if arguments is not None:
            lm_checkpoint.restore_tokens(args, checkpoint_args)
        return original(checkpoint_args, *positional, **named)

    return check_checkpoint_args


def _hdp_is_on() -> bool:
    """Whether this process's run has the flag; False before Megatron has parsed its arguments."""
    from megatron.training import global_vars

    return bool(getattr(global_vars._GLOBAL_ARGS, "hybrid_data_parallel", False))


def _build_iterators(original: Function) -> Function:
    def build_train_valid_test_data_iterators(provider: Any) -> Any:
        from megatron.training.global_vars import get_args, get_tokenizer

        global _run
        args = get_args()
        if not args.hybrid_data_parallel:
            return original(provider)
        from megatron_hdp.megatron.lm_run import LmRun

        _run = LmRun(args, get_tokenizer().vocab_size, _job, _make_outputs)
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
        return _run.log.flops(original, batch_size)

    return num_floating_point_operations


def _log(original: Function) -> Function:
    signature = inspect.signature(original)

    def training_log(*positional: Any, **named: Any) -> Any:
        if _run is None:
            return original(*positional, **named)
        bound = signature.bind(*positional, **named).arguments
        iteration = bound["iteration"]
        _run.prepare_log()
        _run.log.is_writing = True
        try:
            result = original(*positional, **named)
        finally:
            _run.log.is_writing = False
        _run.log.write(iteration, _writers(_run.args, iteration))
        _run.end_step(iteration, bound["grad_norm"], bound["learning_rate"])
        if iteration % _run.args.log_interval == 0 and not bound.get("is_first_iteration"):
            _run.log.clear()
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
            f"{_TRAINING}:pretrain",
            "ranks learn from heartbeats that another one has died or stands still",
            WHATEVER,
            _surround,
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
            "megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__",
            "PyTorch's norms, where there are no others, with sequence parallelism too",
            WHATEVER,
            _mark_norm,
        ),
        Patch(
            f"{_TRAINING}:get_megatron_optimizer",
            "its step is timed, and its whole states are gathered at their places",
            WHATEVER,
            _prepare_optimizer,
            owner_only=True,
        ),
        Patch(
            "megatron.training.checkpointing:save_checkpoint",
            "heartbeats allow it the time that it takes",
            WHATEVER,
            _save,
        ),
        Patch(
            "megatron.training.checkpointing:load_checkpoint",
            "the distributed optimizer can restore torch's Adam",
            WHATEVER,
            _load,
        ),
        Patch(
            "megatron.training.checkpointing:check_checkpoint_args",
            "a resumed run goes on in the order of the data that it began with",
            WHATEVER,
            _compare_order,
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
