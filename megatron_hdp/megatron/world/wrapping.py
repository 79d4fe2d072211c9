"""Megatron's DDP around live weights: unbound from its groups, and bound to others.

The wrapper stays the same object, whose content changes, so that whoever holds one needs no other.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from megatron.core.distributed import DistributedDataParallel
from megatron.core.utils import get_model_config

_OF_BUFFERS = ("main_grad", "main_param", "grad_added_to_main_grad")
"""What DDP and the optimizer leave at parameters."""
_FUNCTIONS = ("finalize_model_grads_func", "no_sync_func", "param_sync_func", "grad_sync_func")
"""What the configuration of a model keeps of those who run it."""


def unbind(chunks: Sequence[DistributedDataParallel]) -> None:
    """Takes off a rank's parts of the model what belongs to groups: hooks, buffers, gradients.

    Weights stay. Gradients are freed first, so that at no time there are more than weights twice.
    """
    for chunk in chunks:
        if "buffers" not in vars(chunk):
            continue  # it was not bound
        for handle in chunk.remove_forward_pre_hook_handles.values():
            handle.remove()
        buffers = chunk.buffers + chunk.expert_parallel_buffers
        for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
            group.grad_reduce_handle = group.param_gather_handle = None
        for buffer in buffers:
            buffer.grad_data.untyped_storage().resize_(0)
        for parameter in chunk.module.parameters():
            parameter.grad = None
            for name in _OF_BUFFERS:
                with suppress(AttributeError):
                    delattr(parameter, name)
        kept = chunk.config, chunk.ddp_config, chunk.module
        for node in chunk.grad_accs:
            _forget_hooks(node)
        chunk.remove_forward_pre_hook_handles.clear()
        of_module = {
            name: value
            for name, value in vars(chunk).items()
            if name.startswith("_") or name == "training"
        }
        vars(chunk).clear()
        vars(chunk).update(of_module)
        chunk.config, chunk.ddp_config, chunk.module = kept
    config = get_model_config(chunks[0])
    for name in _FUNCTIONS:
        setattr(config, name, None)


def _forget_hooks(node: Any) -> None:
    """Takes DDP's hook off a parameter's node of autograd, which whoever keeps a graph keeps.

    PyTorch gives no handle of it afterwards; one of another hook knows all of the node.
    """
    hooks = node.register_hook(lambda *_: None).hooks_dict_ref()
    assert hooks is not None
    hooks.clear()


def bind(chunks: Sequence[DistributedDataParallel]) -> None:
    """Wraps the parts anew, over the groups that Megatron has by now."""
    for number, chunk in enumerate(chunks):
        made = DistributedDataParallel(
            chunk.config, chunk.ddp_config, chunk.module, disable_bucketing=number > 0
        )
        made.train(chunk.training)
        become(chunk, made)


def become(old: Any, made: Any) -> None:
    """Gives an object the content of another, which hooks and methods may go on to refer to."""
    assert type(old) is type(made), "a rank enters a job as what it left it"
    old.__dict__ = made.__dict__
