"""With --pretrained-checkpoint, checkpoints of a run with adapters hold these alone.

Megatron asks models for what it saves and hands them what it has loaded: within `alone` they know
their adapters only. What those stand beside is read at each start.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.utils import get_attr_wrapped_model

from megatron_hdp.megatron.adapters import adapter_record, is_adapter, require_same_adapters
from megatron_hdp.megatron.checkpoint.folder import CheckpointFolder
from megatron_hdp.megatron.checkpoint.reading import read_common
from megatron_hdp.megatron.checkpoint.together import on_first_rank
from megatron_hdp.megatron.checkpoint.weights import IN_ARGUMENTS, load_weights, saved_adapters
from megatron_hdp.megatron.parallel import say


def are_alone(args: argparse.Namespace) -> bool:
    """Whether checkpoints of the run hold adapters alone; others hold whole models."""
    return args.lora_rank is not None and args.pretrained_checkpoint is not None


def of_save(args: argparse.Namespace, chunks: Sequence[Any]) -> AbstractContextManager[None]:
    """Within it a checkpoint gets what it holds of the run's model, and says which adapters.

    Whoever saves says so: one that has joined a job has loaded nothing.
    """
    if not are_alone(args):
        return nullcontext()
    setattr(args, IN_ARGUMENTS, adapter_record(args))
    return alone(chunks)


def alone(chunks: Sequence[Any]) -> AbstractContextManager[None]:
    """Within it parts of a model give and take adapters alone; see `some_weights`."""
    return some_weights(chunks, is_adapter)


@contextmanager
def some_weights(chunks: Sequence[Any], is_wanted: Callable[[str], bool]) -> Iterator[None]:
    """Within the block parts of a model give and take the weights of some names alone.

    Args:
        chunks: this rank's, each a GPT in whatever wraps it.
        is_wanted: of a weight's name in its part of the model.
    """
    models = [get_attr_wrapped_model(one, "decoder", return_model_obj=True) for one in chunks]
    for model in models:
        model.sharded_state_dict = partial(_given, model.sharded_state_dict, is_wanted)
        model.load_state_dict = partial(_taken, model.load_state_dict, is_wanted)
    try:
        yield
    finally:
        for model in models:
            del model.sharded_state_dict, model.load_state_dict


def _given(
    give: Callable[..., dict[str, Any]],
    is_wanted: Callable[[str], bool],
    *rest: Any,
    **named: Any,
) -> dict[str, Any]:
    return {name: one for name, one in give(*rest, **named).items() if is_wanted(name)}


def _taken(
    take: Callable[..., Any],
    is_wanted: Callable[[str], bool],
    state: dict[str, Any],
    strict: bool = True,
    **named: Any,
) -> Any:
    found = take(state, strict=False, **named)
    missing = [name for name in found.missing_keys if is_wanted(name)]
    if strict and (missing or found.unexpected_keys):
        raise RuntimeError(f"weights: missing {missing}, unexpected {found.unexpected_keys}")
    return found


def load_base(chunks: Sequence[Any], args: argparse.Namespace) -> bool:
    """Loads what adapters are trained beside; whether there are adapters to load as well.

    Every rank must call this before the run saves anything.

    Args:
        chunks: this rank's parts of the model, in Megatron's DDP.
        args: Megatron's.

    Raises:
        ValueError: there is no base or it holds adapters, or what --load names is of others.
    """
    base = Path(args.pretrained_checkpoint)
    source = on_first_rank(CheckpointFolder(base).newest)
    if source is None:
        raise ValueError(
            f"--pretrained-checkpoint {base} holds no checkpoint, expected the weights that "
            "adapters are trained beside: name the folder that --save or `megatron-hdp convert "
            "--to` was given"
        )
    require_same_adapters(None, saved_adapters(read_common(source)), source)
    load_weights(chunks, base, checksums=False, say=say)
    return require_own(args)


def require_own(args: argparse.Namespace) -> bool:
    """Refuses to load adapters as a whole model, other adapters, or a whole model as adapters.

    Every rank must call this, before Megatron loads.

    Args:
        args: Megatron's.

    Returns:
        Whether there is something to load.

    Raises:
        ValueError: what was found, and which flags to give.
    """
    mine = adapter_record(args) if are_alone(args) else None
    source = None if args.load is None else on_first_rank(partial(_source, args))
    if source is None:
        return False
    if dist_checkpointing.check_is_distributed_checkpoint(str(source)):
        require_same_adapters(mine, saved_adapters(read_common(source)), source)
    return True


def _source(args: argparse.Namespace) -> Path | None:
    """What --load names, if it is there."""
    folder = CheckpointFolder(Path(args.load))
    step = getattr(args, "ckpt_step", None)
    return folder.newest() if step is None else folder.find(step)
