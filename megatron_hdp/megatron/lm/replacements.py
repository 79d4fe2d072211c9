"""The replacements of Megatron-LM's functions under HDP: each function here makes one.

It gets the original and returns the replacement (`patching.Patch.make`). Without
``--hybrid-data-parallel`` a replacement only calls the original, except for the flags themselves.
"""

from __future__ import annotations

import functools
import inspect
import sys
from typing import Any

from megatron_hdp.megatron.cpu import shim
from megatron_hdp.megatron.lm import options
from megatron_hdp.megatron.lm.patching import Function
from megatron_hdp.processes import launcher

_job: Any = None
"""The `PretrainJob` of this process while ``pretrain()`` runs."""
_run: Any = None
"""The `LmRun` of this process, from the moment that Megatron builds its data iterators."""
_make_outputs: Any = None


def use_outputs(make_outputs: Any) -> None:
    """Sets what makes a run's outputs besides Megatron's logs, see `LmRun`."""
    global _make_outputs
    _make_outputs = make_outputs


def add_flags(original: Function) -> Function:
    """Adds HDP's flags to the parser."""

    def add_megatron_arguments(parser: Any) -> Any:
        return options.add_flags(original(parser))

    return add_megatron_arguments


def load_yaml(original: Function) -> Function:
    """Refuses arguments from a file together with the flag."""

    def load_yaml(yaml_path: str) -> Any:
        args = original(yaml_path)
        options.refuse_in_yaml(args, sys.argv)
        return args

    return load_yaml


def validate(original: Function) -> Function:
    """Checks HDP's flags before and after Megatron derives its own."""

    def validate_args(args: Any, defaults: Any = None) -> Any:
        options.check(args)
        if args.hybrid_data_parallel:
            launcher.end_with_launcher()  # a patched script has not done it yet
            options.settle(args)
        validated = original(args, defaults or {})
        if args.hybrid_data_parallel:
            options.check_derived(args)
        return validated

    return validate_args


def surround(original: Function) -> Function:
    """``pretrain()`` within the process's `PretrainJob`."""

    def pretrain(*positional: Any, **named: Any) -> Any:
        global _job, _run
        from megatron_hdp.megatron.lm.pretrain_job import PretrainJob

        try:
            with PretrainJob() as _job:
                return original(*positional, **named)
        finally:
            if _run is not None:
                _run.close()
            _job = _run = None

    return pretrain


def skip_warm_up(original: Function) -> Function:
    """Skips the warm-up, which would make activations of ``--seq-length`` tokens on every rank.

    It compiles fused functions for shapes that no micro-batch of a run has.
    """

    def _warmup_jit_function(*positional: Any, **named: Any) -> None:
        if not _hdp_is_on():
            original(*positional, **named)

    return _warmup_jit_function


def adapt_model(original: Function) -> Function:
    """Adapts the model that the original's first argument, a function, makes for a stage."""
    signature = inspect.signature(original)
    first = next(iter(signature.parameters))

    def build(*positional: Any, **named: Any) -> Any:
        from megatron.training.global_vars import get_args

        args = get_args()
        if not args.hybrid_data_parallel:
            return original(*positional, **named)
        from megatron_hdp.megatron.cpu import gpu_gaps
        from megatron_hdp.megatron.lm.model import adapt

        _job.begin(args)
        if not shim.is_active():
            gpu_gaps.fill()
        bound = signature.bind(*positional, **named)
        make_stage = bound.arguments[first]

        def adapted(*its_positional: Any, **its_named: Any) -> Any:
            model = make_stage(*its_positional, **its_named)
            return adapt(model, fused_loss=args.hdp_fused_loss)

        bound.arguments[first] = adapted
        return original(*bound.args, **bound.kwargs)

    return build


def mark_norm(original: Function) -> Function:
    """Marks PyTorch's norms for sequence parallelism, where Megatron refuses them."""

    def __new__(cls: type, config: Any, *positional: Any, **named: Any) -> Any:
        if not config.sequence_parallel or not _hdp_is_on():
            return original(cls, config, *positional, **named)
        from megatron_hdp.megatron.model import SequenceParallelNorm

        return SequenceParallelNorm(config, *positional, **named)

    return __new__


def prepare_optimizer(original: Function) -> Function:
    """Times the optimizer's steps and corrects its checkpoints."""

    def get_megatron_optimizer(*positional: Any, **named: Any) -> Any:
        optimizer = original(*positional, **named)
        if _hdp_is_on():
            from megatron.training.global_vars import get_args

            from megatron_hdp.megatron.lm import checkpoint

            checkpoint.prepare_optimizer(optimizer, get_args())
            optimizer.step = _timed(optimizer.step)
        return optimizer

    return get_megatron_optimizer


def _timed(step: Function) -> Function:
    def timed(*positional: Any, **named: Any) -> Any:
        with _job.optimizer_step():
            return step(*positional, **named)

    return timed


def save(original: Function) -> Function:
    """Saves by writers that end with this process, with a note for the heartbeats."""

    def save_checkpoint(*positional: Any, **named: Any) -> Any:
        if _run is None:
            return original(*positional, **named)
        from megatron_hdp.megatron.lm import checkpoint

        with _job.saving(), checkpoint.saving():
            return original(*positional, **named)

    return save_checkpoint


def load(original: Function) -> Function:
    """Loads, with torch's Adam made restorable."""
    signature = inspect.signature(original)

    def load_checkpoint(*positional: Any, **named: Any) -> Any:
        if not _hdp_is_on():
            return original(*positional, **named)
        from megatron_hdp.megatron.lm import checkpoint

        optimizer = signature.bind(*positional, **named).arguments["optimizer"]
        with checkpoint.loading(optimizer):
            return original(*positional, **named)

    return load_checkpoint


def compare_order(original: Function) -> Function:
    """Compares the order of the data as well as Megatron's saved arguments."""

    def check_checkpoint_args(checkpoint_args: Any, *positional: Any, **named: Any) -> Any:
        from megatron.training.global_vars import get_args

        from megatron_hdp.megatron.lm import checkpoint

        args = get_args()
        arguments = options.training_arguments(args) if args.hybrid_data_parallel else None
        checkpoint.continue_order(args, arguments, checkpoint_args)
        if arguments is not None:
            checkpoint.restore_tokens(args, checkpoint_args)
        return original(checkpoint_args, *positional, **named)

    return check_checkpoint_args


def _hdp_is_on() -> bool:
    """Whether this process's run has the flag; False before Megatron has parsed its arguments."""
    from megatron.training import global_vars

    return bool(getattr(global_vars._GLOBAL_ARGS, "hybrid_data_parallel", False))


def build_iterators(original: Function) -> Function:
    """Returns iterators that only name their split; the first call begins the run's `LmRun`.

    Megatron calls once for each model chunk of a rank.
    """

    def build_train_valid_test_data_iterators(provider: Any) -> Any:
        from megatron.training.global_vars import get_args, get_tokenizer

        global _run
        args = get_args()
        if not args.hybrid_data_parallel:
            return original(provider)
        from megatron_hdp.megatron.lm.run import LmRun

        if _run is None:
            _run = LmRun(args, get_tokenizer().vocab_size, _job, _make_outputs)
        return tuple(_run.data_iterators())

    return build_train_valid_test_data_iterators


def schedule(original: Function) -> Function:
    """Returns `LmRun.forward_backward` instead of Megatron's schedules."""

    def get_forward_backward_func(*positional: Any, **named: Any) -> Any:
        if _run is None:
            return original(*positional, **named)
        return _run.forward_backward

    return get_forward_backward_func


def count_flops(original: Function) -> Function:
    """Counts the operations of a step's sequences, each at its own length."""

    def num_floating_point_operations(args: Any, batch_size: int, *sums: Any, **named: Any) -> Any:
        if _run is None:
            return original(args, batch_size, *sums, **named)
        return _run.log.flops(original, batch_size)

    return num_floating_point_operations


def log(original: Function) -> Function:
    """Logs a step as Megatron does, and hands HDP's figures to its writers."""
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


def log_validation_sets(original: Function) -> Function:
    """Evaluates as Megatron does, and logs the loss of each validation set after it."""
    signature = inspect.signature(original)

    def evaluate_and_print_results(*positional: Any, **named: Any) -> Any:
        result = original(*positional, **named)
        if _run is None:
            return result
        bound = signature.bind(*positional, **named)
        bound.apply_defaults()
        given = bound.arguments
        found, sets = _run.take_evaluation(), _run.validation_sets
        if found is None or sets is None:
            return result
        from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer
        from megatron.training.utils import print_rank_last

        for line in sets.lines(found, given["prefix"]):
            print_rank_last(line)
        tensorboard, wandb = get_tensorboard_writer(), get_wandb_writer()
        if tensorboard is None or not given["write_to_tensorboard"]:
            return result
        for name, value, place in sets.scalars(found, given["iteration"], _run.args):
            tensorboard.add_scalar(name, value, place)
        if wandb:
            wandb.log(sets.losses(found), given["iteration"])
        return result

    return evaluate_and_print_results


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
