"""What runs in the place of Megatron-LM's functions under HDP.

A replacement is called with the original, then with what the original's caller gives. Without
``--hybrid-data-parallel`` it only calls the original, except for the flags themselves.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

from megatron_hdp.megatron.cpu import shim
from megatron_hdp.megatron.lm import options
from megatron_hdp.megatron.lm.patching import Function
from megatron_hdp.processes import launcher

_job: Any = None
"""The `PretrainJob` of this process while ``pretrain()`` runs."""
_run: Any = None
"""The `LmRun` of this process, from the moment that Megatron builds its data iterators."""
make_outputs: Any = None
"""Makes a run's outputs besides Megatron's logs, see `LmRun`; the plugin sets it."""


def add_flags(original: Function, parser: Any) -> Any:
    """Adds HDP's flags to the parser."""
    return options.add_flags(original(parser))


def load_yaml(original: Function, yaml_path: str) -> Any:
    """Refuses arguments from a file together with the flag."""
    args = original(yaml_path)
    options.refuse_in_yaml(args, sys.argv)
    return args


def validate(original: Function, args: Any, defaults: Any = None) -> Any:
    """Checks HDP's flags before and after Megatron derives its own."""
    options.check(args)
    if args.hybrid_data_parallel:
        launcher.end_with_launcher()  # a patched script has not done it yet
        options.settle(args)
    validated = original(args, defaults or {})
    if args.hybrid_data_parallel:
        options.check_derived(args)
    return validated


def surround(original: Function, *positional: Any, **named: Any) -> Any:
    """``pretrain()`` within the process's `PretrainJob`."""
    global _job, _run
    from megatron_hdp.megatron.lm.pretrain_job import PretrainJob

    try:
        with PretrainJob() as _job:
            return original(*positional, **named)
    finally:
        if _run is not None:
            _run.close()
        _job = _run = None


def skip_warm_up(original: Function, *positional: Any, **named: Any) -> None:
    """Skips the warm-up, which would make activations of ``--seq-length`` tokens on every rank.

    It compiles fused functions for shapes that no micro-batch of a run has.
    """
    if not _hdp_is_on():
        original(*positional, **named)


def adapt_model(original: Function, *positional: Any, **named: Any) -> Any:
    """Adapts the model that the original's first argument, a function, makes for a stage."""
    from megatron.training.global_vars import get_args

    args = get_args()
    if not args.hybrid_data_parallel:
        return original(*positional, **named)
    from megatron_hdp.megatron.cpu import gpu_gaps
    from megatron_hdp.megatron.lm.model import adapt

    _job.begin(args)
    if not shim.is_active():
        gpu_gaps.fill()
    bound = inspect.signature(original).bind(*positional, **named)
    first = next(iter(bound.signature.parameters))
    make_stage = bound.arguments[first]

    def adapted(*its_positional: Any, **its_named: Any) -> Any:
        return adapt(make_stage(*its_positional, **its_named), fused_loss=args.hdp_fused_loss)

    bound.arguments[first] = adapted
    return original(*bound.args, **bound.kwargs)


def mark_norm(original: Function, cls: type, config: Any, *positional: Any, **named: Any) -> Any:
    """Marks PyTorch's norms for sequence parallelism, where Megatron refuses them."""
    if not config.sequence_parallel or not _hdp_is_on():
        return original(cls, config, *positional, **named)
    from megatron_hdp.megatron.model import SequenceParallelNorm

    return SequenceParallelNorm(config, *positional, **named)


def prepare_optimizer(original: Function, *positional: Any, **named: Any) -> Any:
    """Times the optimizer's steps and corrects its checkpoints."""
    optimizer = original(*positional, **named)
    if not _hdp_is_on():
        return optimizer
    from megatron.training.global_vars import get_args

    from megatron_hdp.megatron.optimizer import gather_whole_states

    args, step = get_args(), optimizer.step
    if args.use_distributed_optimizer and args.dist_ckpt_optim_fully_reshardable:
        gather_whole_states(optimizer)

    def timed(*its_positional: Any, **its_named: Any) -> Any:
        with _job.optimizer_step():
            return step(*its_positional, **its_named)

    optimizer.step = timed
    return optimizer


def save(original: Function, *positional: Any, **named: Any) -> Any:
    """Saves by writers that end with this process, with a note for the heartbeats."""
    if _run is None:
        return original(*positional, **named)
    from megatron_hdp.megatron.lm import checkpoint

    with _job.saving(), checkpoint.saving():
        return original(*positional, **named)


def load(original: Function, *positional: Any, **named: Any) -> Any:
    """Loads, with torch's Adam made restorable; without an optimizer, the weights alone."""
    optimizer = None
    if _hdp_is_on():
        optimizer = inspect.signature(original).bind(*positional, **named).arguments["optimizer"]
    if optimizer is None:
        return original(*positional, **named)
    from megatron_hdp.megatron.optimizer import torch_adam

    with torch_adam.restorable(optimizer):
        return original(*positional, **named)


def compare_order(original: Function, checkpoint_args: Any, *positional: Any, **named: Any) -> Any:
    """Compares the order of the data as well as Megatron's saved arguments."""
    from megatron.training.global_vars import get_args

    from megatron_hdp.megatron.lm import checkpoint

    args = get_args()
    arguments = options.training_arguments(args) if args.hybrid_data_parallel else None
    checkpoint.continue_order(args, arguments, checkpoint_args)
    if arguments is not None:
        checkpoint.restore_tokens(args, checkpoint_args)
    return original(checkpoint_args, *positional, **named)


def _hdp_is_on() -> bool:
    """Whether this process's run has the flag; False before Megatron has parsed its arguments."""
    from megatron.training import global_vars

    return bool(getattr(global_vars._GLOBAL_ARGS, "hybrid_data_parallel", False))


def build_iterators(original: Function, provider: Any) -> Any:
    """Returns iterators that only name their split; the first call begins the run's `LmRun`.

    Megatron calls once for each model chunk of a rank.
    """
    from megatron.training.global_vars import get_args, get_tokenizer

    global _run
    args = get_args()
    if not args.hybrid_data_parallel:
        return original(provider)
    from megatron_hdp.megatron.lm.run import LmRun

    if _run is None:
        _run = LmRun(args, get_tokenizer().vocab_size, _job, make_outputs)
    return tuple(_run.data_iterators())


def schedule(original: Function, *positional: Any, **named: Any) -> Any:
    """Returns `LmRun.forward_backward` instead of Megatron's schedules."""
    return original(*positional, **named) if _run is None else _run.forward_backward


def count_flops(original: Function, args: Any, batch_size: int, *sums: Any, **named: Any) -> Any:
    """Counts the operations of a step's sequences, each at its own length."""
    if _run is None:
        return original(args, batch_size, *sums, **named)
    return _run.log.flops(original, batch_size)


def log(original: Function, *positional: Any, **named: Any) -> Any:
    """Logs a step as Megatron does, and hands HDP's figures to its writers."""
    if _run is None:
        return original(*positional, **named)
    bound = inspect.signature(original).bind(*positional, **named).arguments
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


def log_validation_sets(original: Function, *positional: Any, **named: Any) -> Any:
    """Evaluates as Megatron does, and logs the loss of each validation set after it."""
    result = original(*positional, **named)
    if _run is None:
        return result
    bound = inspect.signature(original).bind(*positional, **named)
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


def _writers(args: Any, iteration: int) -> list[Callable[[str, float], None]]:
    """Megatron's TensorBoard and W&B writers of this rank, if it writes at this iteration."""
    from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

    tensorboard, wandb = get_tensorboard_writer(), get_wandb_writer()
    if tensorboard is None or iteration % args.tensorboard_log_interval:
        return []
    writers = [lambda name, value: tensorboard.add_scalar(name, value, iteration)]
    if wandb:
        writers.append(lambda name, value: wandb.log({name: value}, iteration))
    return writers
