"""Which functions of Megatron-LM the plugin replaces, why, and what runs in their place.

A replacement is called with the original, then with what the original's caller gives. Without
``--hybrid-data-parallel`` it only calls the original, except for the flags themselves.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from megatron_hdp.megatron.cpu import shim
from megatron_hdp.megatron.lm import options, releases
from megatron_hdp.megatron.lm.patching import Function, Patch
from megatron_hdp.megatron.lm.releases import everywhere
from megatron_hdp.processes import launcher

PATCHES: list[Patch] = []
_TRAINING = "megatron.training.training"

_job: Any = None
"""The `PretrainJob` of this process while ``pretrain()`` runs."""
_run: Any = None
"""The `LmRun` of this process, from the moment that Megatron builds its data iterators."""
_survival: Any = None
"""The `LmSurvival` of this process, if its run survives the loss of ranks."""
make_outputs: Any = None
"""Makes a run's outputs besides Megatron's logs, see `LmRun`; the plugin sets it."""


def patch(
    target: str, parameters: releases.Parameters = releases.ANY, **others: Any
) -> Callable[[Function], Function]:
    """Declares what replaces a target, see `Patch`; its docstring's first line says why."""

    def declare(replacement: Function) -> Function:
        why = (replacement.__doc__ or "").split("\n")[0].rstrip(".")
        PATCHES.append(Patch(target, why, parameters, replacement, **others))
        return replacement

    return declare


@patch("megatron.training.arguments:add_megatron_arguments", everywhere("parser"))
def add_flags(original: Function, parser: Any) -> Any:
    """HDP's flags are a group of Megatron's own parser."""
    return options.add_flags(original(parser))


@patch("megatron.training.yaml_arguments:load_yaml", everywhere("yaml_path"))
def load_yaml(original: Function, yaml_path: str) -> Any:
    """Megatron does not check arguments from a file, so HDP refuses them."""
    args = original(yaml_path)
    options.refuse_in_yaml(args, sys.argv)
    return args


@patch("megatron.training.arguments:validate_args", everywhere("args", "defaults"))
def validate(original: Function, args: Any, defaults: Any = None) -> Any:
    """HDP's flags are checked with Megatron's, before and after it derives its own."""
    options.check(args)
    if args.hybrid_data_parallel:
        launcher.end_with_launcher()  # a patched script has not done it yet
        options.settle(args)
    validated = original(args, defaults or {})
    if args.hybrid_data_parallel:
        options.check_derived(args)
    return validated


@patch(f"{_TRAINING}:pretrain")
def surround(original: Function, *positional: Any, **named: Any) -> Any:
    """Heartbeats report a rank that died or hangs to the others."""
    global _job, _run, _survival
    from megatron_hdp.megatron.lm.pretrain_job import PretrainJob

    try:
        with PretrainJob() as _job:
            return original(*positional, **named)
    finally:
        if _run is not None:
            _run.close()
        if _survival is not None:
            _survival.close()
        _job = _run = _survival = None


@patch("megatron.training.initialize:_initialize_distributed")
def join(original: Function, *positional: Any, **named: Any) -> Any:
    """With --hdp-survive the agent says who is in the job."""
    global _survival
    from megatron.training.global_vars import get_args

    args = get_args()
    if args.hybrid_data_parallel and args.hdp_survive:
        from megatron_hdp.megatron.lm.survival import LmSurvival

        _survival = LmSurvival(args, _job)
    return original(*positional, **named)


@patch(f"{_TRAINING}:train")
def train(original: Function, *positional: Any, **named: Any) -> Any:
    """With --hdp-survive it is left when ranks are lost or join, and called again."""
    if _survival is None:
        return original(*positional, **named)
    return _survival.train(_run, original, arguments_of(original, *positional, **named))


@patch(f"{_TRAINING}:train_step")
def train_step(original: Function, *positional: Any, **named: Any) -> Any:
    """With --hdp-survive all ranks agree before a step whether others join."""
    if _survival is None:
        return original(*positional, **named)
    return _survival.train_step(original, *positional, **named)


@patch("megatron.training.initialize:_warmup_jit_function", releases.WARM_UP)
def skip_warm_up(original: Function, *positional: Any, **named: Any) -> None:
    """Fused functions compile when they are called, not for a whole context's tokens.

    Megatron would make activations of ``--seq-length`` tokens on every rank for that.
    """
    if not _hdp_is_on():
        original(*positional, **named)


@patch(f"{_TRAINING}:get_model", releases.GET_MODEL)
@patch(  # the same for models that come from a builder, as pretrain_gpt's from 0.19
    "megatron.training.models.dist_utils:unimodal_build_distributed_models", releases.BUILD_MODELS
)
def adapt_model(original: Function, *positional: Any, **named: Any) -> Any:
    """The model gets HDP's attention, positions and loss before DDP wraps it.

    The original's first argument is a function, which makes the model of a stage.
    """
    from megatron.training.global_vars import get_args

    args = get_args()
    if not args.hybrid_data_parallel:
        return original(*positional, **named)
    from megatron_hdp.megatron.cpu import gpu_gaps
    from megatron_hdp.megatron.lm.model import adapt
    from megatron_hdp.megatron.model import choose_trained, require_trained

    _job.begin(args)
    if not shim.is_active():
        gpu_gaps.fill()
    bound = inspect.signature(original).bind(*positional, **named)
    first = next(iter(bound.signature.parameters))
    make_stage = bound.arguments[first]
    encoders = []
    if args.hdp_encoder is not None:
        from megatron_hdp.megatron.lm.encoder import read_encoder

        encoders.append(read_encoder(args))

    def adapted(*its_positional: Any, **its_named: Any) -> Any:
        model = adapt(make_stage(*its_positional, **its_named), fused_loss=args.hdp_fused_loss)
        # of a rank's parts of the model the first is made first, and has the encoder
        choose_trained(model, args, encoders.pop() if encoders else None)
        return model

    bound.arguments[first] = adapted
    chunks = original(*bound.args, **bound.kwargs)
    require_trained(chunks, args)
    return chunks


@patch("megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__", releases.TORCH_NORM)
def mark_norm(original: Function, cls: type, config: Any, *positional: Any, **named: Any) -> Any:
    """PyTorch's norms work with sequence parallelism, where there are no others."""
    if not config.sequence_parallel or not _hdp_is_on():
        return original(cls, config, *positional, **named)
    from megatron_hdp.megatron.model import SequenceParallelNorm

    return SequenceParallelNorm(config, *positional, **named)


@patch(f"{_TRAINING}:get_megatron_optimizer", owner_only=True)
def prepare_optimizer(original: Function, *positional: Any, **named: Any) -> Any:
    """Its step is timed, and its checkpoints gather whole states correctly."""
    if _survival is None:
        return _prepared(original(*positional, **named))
    given = arguments_of(original, *positional, **named)

    def make(chunks: list[Any]) -> Any:
        optimizer = original(**{**given, "model_chunks": chunks})
        _survival.holds(optimizer, make)
        return _prepared(optimizer)

    return make(given["model_chunks"])


def _prepared(optimizer: Any) -> Any:
    if not _hdp_is_on():
        return optimizer
    from megatron.training.global_vars import get_args

    from megatron_hdp.megatron.optimizer import gather_whole_states

    args = get_args()
    step = optimizer.step if _survival is None else _survival.optimizer_step
    if args.use_distributed_optimizer and args.dist_ckpt_optim_fully_reshardable:
        gather_whole_states(optimizer)

    def timed(*its_positional: Any, **its_named: Any) -> Any:
        with _job.optimizer_step():
            return step(*its_positional, **its_named)

    optimizer.step = timed
    return optimizer


@patch("megatron.training.checkpointing:save_checkpoint")
def save(original: Function, *positional: Any, **named: Any) -> Any:
    """Heartbeats wait for it, and its writers end with their rank."""
    if _run is None:
        return original(*positional, **named)
    if _survival is not None:
        _survival.all_have_logged()
        if _run.args.async_save:
            iteration = arguments_of(original, *positional, **named)["iteration"]
            _survival.saves.begin(iteration)
    from megatron_hdp.megatron.lm import adapters, checkpoint

    chunks = arguments_of(original, *positional, **named)["model"]
    with _job.saving(), checkpoint.saving(), adapters.of_save(_run.args, chunks):
        return original(*positional, **named)


@patch("megatron.training.async_utils:init_persistent_async_worker")
def warm_up_writer(original: Function, *positional: Any, **named: Any) -> None:
    """With --hdp-survive a persistent writer starts with a save, so that it ends with its rank.

    In 0.16 this starts none, and comes before the arguments are known.
    """
    from megatron.training import global_vars

    if positional and _hdp_is_on() and global_vars._GLOBAL_ARGS.hdp_survive:
        return
    original(*positional, **named)


@patch("megatron.training.async_utils:schedule_async_save", everywhere("async_request"))
def schedule_save(original: Function, async_request: Any) -> Any:
    """A persistent writer is handed host memory: CUDA's needs SYS_PTRACE with HDP's allocator."""
    from megatron.training import get_args

    if _run is None or not get_args().use_persistent_ckpt_worker:
        return original(async_request)
    from megatron_hdp.megatron.checkpoint.staging import with_staged_tensors

    return original(with_staged_tensors(async_request))


@patch("megatron.training.checkpointing:load_checkpoint")
def load(original: Function, *positional: Any, **named: Any) -> Any:
    """The distributed optimizer can restore torch's Adam; adapters may have a base of their own."""
    if _survival is not None and _survival.joins:
        return 0, 0  # others give it their weights
    if not _hdp_is_on():
        return original(*positional, **named)
    from megatron.training import get_args

    from megatron_hdp.megatron.lm import adapters, encoder
    from megatron_hdp.megatron.optimizer import torch_adam

    args = get_args()
    bound = inspect.signature(original).bind(*positional, **named).arguments
    chunks, optimizer = bound["ddp_model"], bound["optimizer"]
    with ExitStack() as stack:
        if adapters.are_alone(args):
            if not adapters.load_base(chunks, args):
                return 0, 0
            stack.enter_context(adapters.alone(chunks))
        else:
            adapters.require_own(args)
            if encoder.is_missing(args):
                stack.enter_context(encoder.left_out(chunks))
        if optimizer is not None:
            stack.enter_context(torch_adam.restorable(optimizer))
        return original(*positional, **named)


@patch("megatron.training.checkpointing:check_checkpoint_args")
def compare_order(original: Function, checkpoint_args: Any, *positional: Any, **named: Any) -> Any:
    """A resumed run keeps the order of the data that it began with."""
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


@patch(
    f"{_TRAINING}:build_train_valid_test_data_iterators",
    everywhere("build_train_valid_test_datasets_provider"),
)
def build_iterators(original: Function, provider: Any) -> Any:
    """Sequences are read slice by slice, as the plan says.

    Iterators only name their split. The first call begins the run's `LmRun`; Megatron calls once
    for each model chunk of a rank.
    """
    from megatron.training.global_vars import get_args, get_tokenizer

    global _run
    args = get_args()
    if not args.hybrid_data_parallel:
        return original(provider)
    from megatron_hdp.megatron.lm.run import LmRun

    if _run is None:
        joins = _survival is not None and _survival.joins
        _run = LmRun(args, get_tokenizer().vocab_size, _job, make_outputs, joins)
    return tuple(_run.data_iterators())


@patch(f"{_TRAINING}:get_forward_backward_func", releases.SCHEDULE, owner_only=True)
def schedule(original: Function, *positional: Any, **named: Any) -> Any:
    """A step follows its plan; elsewhere the function stays as it is."""
    return original(*positional, **named) if _run is None else _run.forward_backward


@patch(f"{_TRAINING}:num_floating_point_operations", releases.OPERATIONS)
def count_flops(original: Function, args: Any, batch_size: int, *sums: Any, **named: Any) -> Any:
    """Throughput counts each sequence at its own length."""
    if _run is None:
        return original(args, batch_size, *sums, **named)
    found = _run.log.flops(original, batch_size)
    if _survival is not None and not _run.log.is_writing:
        _survival.count_operations(found)
    return found


@patch(f"{_TRAINING}:training_log", releases.TRAINING_LOG)
def log(original: Function, *positional: Any, **named: Any) -> Any:
    """HDP's figures go to Megatron's writers."""
    if _run is None:
        return original(*positional, **named)
    bound = arguments_of(original, *positional, **named)
    iteration = bound["iteration"]
    _run.prepare_log()
    _run.log.is_writing = True
    try:
        result = original(**bound) if _survival is None else _survival.log(original, bound)
    finally:
        _run.log.is_writing = False
    with_line = _survival is None or _survival.writes_line(iteration)
    _run.log.write(iteration, _writers(_run.args, iteration), with_line)
    if _survival is not None:
        _survival.has_logged(iteration)
    _run.end_step(iteration, bound["grad_norm"], bound["learning_rate"])
    if iteration % _run.args.log_interval == 0 and not bound.get("is_first_iteration"):
        _run.log.clear()
    return result


def arguments_of(function: Function, *positional: Any, **named: Any) -> dict[str, Any]:
    """The arguments of a call by their names, defaults included."""
    bound = inspect.signature(function).bind(*positional, **named)
    bound.apply_defaults()
    return dict(bound.arguments)


@patch(f"{_TRAINING}:evaluate_and_print_results", releases.EVALUATION)
def log_validation_sets(original: Function, *positional: Any, **named: Any) -> Any:
    """The loss of each validation set is logged."""
    if _survival is not None:
        _survival.all_have_logged()
    result = original(*positional, **named)
    if _run is None:
        return result
    given = arguments_of(original, *positional, **named)
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
