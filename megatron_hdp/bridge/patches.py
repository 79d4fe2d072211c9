"""The functions of Megatron-Bridge that HDP replaces, and the switch that does it."""

from __future__ import annotations

import inspect
from importlib.metadata import version
from typing import Any

from megatron_hdp.bridge.loop import HdpLoop
from megatron_hdp.bridge.refusals import require_known
from megatron_hdp.megatron.checkpoint.checkpoints import new_queue
from megatron_hdp.megatron.cpu import shim
from megatron_hdp.megatron.lm.patching import Function, Patch, PatchSet
from megatron_hdp.megatron.optimizer import torch_adam

TESTED = ("0.6.2",)
"""Versions of Megatron-Bridge with which this was run."""
_RELEASE = "0.6"
_loop: HdpLoop | None = None
_has_shim = False


def activate(*, hdp_tokens_per_rank: int, **options: Any) -> str | None:
    """Has Bridge's loop run its steps by HDP, until `deactivate`.

    On a machine without a GPU Megatron and Bridge run on the CPU. Call it on every rank, with the
    same arguments.

    Args:
        hdp_tokens_per_rank: capacity: tokens that a rank can hold in one micro-batch. A row of
            Bridge's of n tokens counts as n + 1, its last label included.
        options: others of HDP's, by the names of `HdpOptions`: ``hdp_strategy="naive"``.

    Returns:
        A note if this version of Bridge was not tested.

    Raises:
        PatchError: Bridge is not found, or not as expected; nothing is changed.
    """
    global _loop, _has_shim
    deactivate()
    if shim.needed() and not shim.is_active():
        shim.apply()
        _has_shim = True
    try:
        note = PATCHES.apply(version("megatron-bridge"))
    except BaseException:
        _take_shim_out()
        raise
    _loop = HdpLoop({"hdp_tokens_per_rank": hdp_tokens_per_rank, **options})
    return note


def deactivate() -> None:
    """Puts Bridge's functions back; does nothing when nothing was replaced.

    Raises:
        PatchError: somebody patched the same functions later.
    """
    global _loop
    PATCHES.revert()
    loop, _loop = _loop, None
    if loop is not None:
        loop.end()
    _take_shim_out()


def _take_shim_out() -> None:
    global _has_shim
    if _has_shim:
        shim.revert()
        _has_shim = False


def _schedule(original: Function, *positional: Any, **named: Any) -> Any:
    assert _loop is not None
    return _loop.forward_backward


def _surround(
    original: Function, state: Any, forward_step_func: Any, *positional: Any, **named: Any
) -> Any:
    assert _loop is not None
    require_known(state.cfg, forward_step_func)
    try:
        return original(state, forward_step_func, *positional, **named)
    finally:
        _loop.end()


def _load(original: Function, *positional: Any, **named: Any) -> Any:
    optimizer = inspect.signature(original).bind(*positional, **named).arguments.get("optimizer")
    if optimizer is None:
        return original(*positional, **named)
    with torch_adam.restorable(optimizer):
        return original(*positional, **named)


def _queue_of_saves(original: Function, state: Any) -> None:
    checkpoint = state.cfg.checkpoint if state.cfg else None
    if (
        state._async_calls_queue is None
        and checkpoint
        and checkpoint.save
        and checkpoint.async_save
    ):
        state._async_calls_queue = new_queue()


def _patch(target: str, why: str, replacement: Function, *parameters: str) -> Patch:
    names = parameters or None
    return Patch(f"megatron.bridge.training.{target}", why, {_RELEASE: names}, replacement, True)


PATCHES = PatchSet(
    (
        _patch("train:get_forward_backward_func", "A step follows its plan", _schedule),
        _patch("eval:get_forward_backward_func", "Evaluation follows its plan", _schedule),
        _patch(
            "pretrain:_pretrain",
            "A configuration is checked before a model is built; the model is given back",
            _surround,
            *("state", "forward_step_func", "callback_manager", "store"),
            "inprocess_call_wrapper",
        ),
        _patch(
            "checkpointing:_load_checkpoint_from_path",
            "The distributed optimizer can restore torch's Adam",
            _load,
        ),
        _patch(
            "state:GlobalState.initialize_async_checkpoint_worker",
            "Megatron's persistent writer wants CUDA, and SYS_PTRACE with HDP's allocator",
            _queue_of_saves,
            "self",
        ),
    ),
    TESTED,
    package="megatron-bridge",
)
