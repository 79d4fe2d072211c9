"""Where the host of a GPU would wait, seen on a CPU: calls of PyTorch that wait there, by caller.

A GPU's host runs ahead until it asks for a value, or for a size that depends on values, or copies
from or to memory that is not pinned. A CPU does not wait, so the calls themselves are counted.
"""

import sys
from collections import Counter
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import megatron.core
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import megatron_hdp
from megatron_hdp.megatron.step import setup
from megatron_hdp.runtime.clocks import DeviceClock
from megatron_hdp.runtime.health import Heartbeat

_FOLDERS = {
    f"{Path(megatron_hdp.__file__).parent}/": "",
    f"{Path(megatron.core.__file__).parent}/": "megatron/core/",
}
_NOBODY = ("megatron/cpu/", "runtime/clocks.py", "runtime/timeline.py")  # their caller waits
_MAKES = ("tensor", "as_tensor", "asarray", "new_tensor")
_CALLS = {
    torch.Tensor: ("tolist", "numpy", "cpu", "__array__", "to", "cuda", "new_tensor"),
    torch: _MAKES[:3],
    dist: ("barrier", "all_gather_object", "broadcast_object_list"),
}
_OF_VALUES = {
    *("_local_scalar_dense", "equal", "allclose", "nonzero", "masked_select", "bincount"),
    *("_unique2", "unique_consecutive", "unique_dim"),
}
_INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}


def _caller():
    """``file function`` of the innermost frame that is the package's or Megatron's."""
    frame = sys._getframe(2)
    while frame is not None:
        path, name = frame.f_code.co_filename, frame.f_code.co_name
        for folder, shown in _FOLDERS.items():
            place = path.replace(folder, shown)
            if path.startswith(folder) and name[0] != "<" and not place.startswith(_NOBODY):
                return f"{place} {name}"
        frame = frame.f_back
    return "elsewhere"


def _call_that_waits(name, args, kwargs):
    """What a call of PyTorch does by its arguments, as on a CPU nothing is copied; or None."""
    if name in _MAKES:
        return f"pageable {name}" if "device" in kwargs or name == "new_tensor" else None
    if name not in ("to", "cuda"):
        return name
    moves = "device" in kwargs or any(isinstance(a, torch.device | str) for a in args[1:])
    is_pageable = (moves or name == "cuda") and not kwargs.get("non_blocking")
    return f"pageable {name}" if is_pageable else None


class _Operators(TorchDispatchMode):
    """Operators whose result the host needs to know, those of backward, too."""

    def __init__(self, found):
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        name = operator.overloadpacket.__name__
        if name in _OF_VALUES or operator is torch.ops.aten.repeat_interleave.Tensor:
            self.found[f"{_caller()}: {name}"] += 1
        elif name in _INDEXED and _knows_by_mask(args):
            self.found[f"{_caller()}: index by a mask"] += 1
        return operator(*args, **(kwargs or {}))


def _knows_by_mask(args):
    """Whether places are counted; one value is put by a mask without."""
    _, indices, *value = args
    is_filled = bool(value) and value[0].numel() == 1
    masks = (torch.bool, torch.uint8)
    return not is_filled and any(one is not None and one.dtype in masks for one in indices)


class _Stream:
    """Makes events as `DeviceClock` wants them; the device gets on only while somebody waits."""

    def __init__(self, found):
        self.found, self.recorded, self.reached = found, 0, 0

    def __call__(self):
        return _Event(self)


class _Event:
    def __init__(self, stream):
        self._stream = stream

    def record(self):
        self._stream.recorded += 1
        self._number = self._stream.recorded

    def query(self):
        return self._number <= self._stream.reached

    def synchronize(self):
        if not self.query():
            self._stream.found[f"{_caller()}: event"] += 1
            self._stream.reached = self._stream.recorded  # nothing is launched meanwhile

    def elapsed_time(self, later):
        return 1e3 * (later._number - self._number)


@contextmanager
def device_clock(found):
    """Within it a run takes its times from events; waits for them are counted."""
    with mock.patch.object(setup, "clock_of", lambda device: DeviceClock(_Stream(found))):
        yield


@contextmanager
def counted(found):
    """Counts in `found` what would wait inside: ``file function: call``."""

    def noting(name, function):
        def called(*args, **kwargs):
            call = _call_that_waits(name, args, kwargs)
            if call is not None:
                found[f"{_caller()}: {call}"] += 1
            return function(*args, **kwargs)

        return called

    with ExitStack() as patches:
        patches.enter_context(torch._dynamo.config.patch(disable=True))
        for owner, names in _CALLS.items():
            for name in names:
                call = noting(name, getattr(owner, name))
                patches.enter_context(mock.patch.object(owner, name, call))
        patches.enter_context(_Operators(found))
        yield


def waits_of_step(train, arguments, number):
    """What ``train(arguments)`` waits for from the begin of a step to that of the next one."""
    found, clock, watching = Counter(), Counter(), ExitStack()
    begin_step = Heartbeat.begin_step

    def watched(self, step):
        watching.close()
        if step == number + 1:
            found.update(clock)
        begin_step(self, step)
        if step == number:
            clock.clear()
            watching.enter_context(counted(found))

    with (
        mock.patch.object(Heartbeat, "begin_step", watched),
        device_clock(clock),
    ):
        train(arguments)
    return dict(found)
