"""Hands a checkpoint's tensors to the process that writes it beside training: through host memory.

Megatron's persistent writer copies them itself: CUDA hands it the memory of the trainer's GPU. With
expandable segments, which HDP switches on, that takes a right that containers do not give
(``pidfd_getfd``, so ``SYS_PTRACE``). Then the writer fails, and the trainer waits for it for ever.
Here the trainer copies first, for which it waited before too. The writer needs no GPU.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
from multiprocessing import get_context
from typing import Any

import torch
from megatron.core.dist_checkpointing.strategies.async_utils import (
    AsyncCallsQueue,
    TemporalAsyncCaller,
)

from megatron_hdp.megatron.checkpoint.memory_file import MemoryFile

_ALIGNMENT = 64


class Staged:
    """Any object with its tensors, copied to host memory.

    Unpickled by a process of the same user while this object lives it is the object that was
    given, on the CPU; every tensor has a storage of its own.
    """

    def __init__(self, content: Any) -> None:
        self._memory = MemoryFile("hdp-checkpoint-staged-")
        rest = io.BytesIO()
        with open(self._memory.descriptor, "wb", closefd=False) as file:
            _Pickler(rest, file).dump(content)
            self._begin_of_rest = file.tell()
            file.write(rest.getbuffer())

    def __reduce__(self) -> tuple[Any, ...]:
        return _read, (self._memory.path, self._begin_of_rest)


def with_staged_tensors(request: Any) -> Any:
    """Of Megatron's request of a save: the same one, whose tensors are in host memory already."""
    if request.async_fn is None or request.preload_fn is None:
        return request
    first, _, *others = request.async_fn_args  # the second are the tensors to preload
    arguments = [first, Staged(request.preload_fn()), *others]
    return request._replace(async_fn_args=arguments, preload_fn=None)


class SavesInNewProcesses(AsyncCallsQueue):
    """Megatron's queue of saves, each written by a process that neither forks this nor has CUDA."""

    def _get_async_caller(self) -> TemporalAsyncCaller:
        return _NewProcess()


class _NewProcess(TemporalAsyncCaller):
    def schedule_async_call(self, async_req: Any) -> None:
        if async_req.async_fn is None:
            return
        # kept here, for the process that is started keeps its arguments for the other one alone
        self._request = request = with_staged_tensors(async_req)
        write = (request.async_fn, request.async_fn_args, request.async_fn_kwargs)
        self.process = get_context("spawn").Process(target=_write, args=write)
        self.start_time = 0.0  # it is logged only
        self.process.start()


def _write(write: Any, args: Any, kwargs: Any) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a context takes up to 1 GB of the trainer's GPU
    write(*args, **kwargs)


class _Pickler(pickle.Pickler):
    """Pickles all but tensors, whose elements go to a file of their own."""

    def __init__(self, rest: io.BytesIO, tensors: io.BufferedWriter) -> None:
        super().__init__(rest, protocol=pickle.HIGHEST_PROTOCOL)
        self._tensors = tensors

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, torch.Tensor):
            return None
        self._tensors.write(bytes(-self._tensors.tell() % _ALIGNMENT))
        begin = self._tensors.tell()
        elements = obj.detach().to("cpu").contiguous().reshape(-1)
        self._tensors.write(elements.view(torch.uint8).numpy().data)
        return begin, obj.dtype, tuple(obj.shape)


class _Unpickler(pickle.Unpickler):
    def __init__(self, mapped: mmap.mmap) -> None:
        super().__init__(mapped)
        self._mapped = mapped

    def persistent_load(self, pid: Any) -> torch.Tensor:
        begin, dtype, shape = pid
        empty = torch.empty(shape, dtype=dtype, device="meta")
        if not (count := empty.numel()):
            return torch.empty_like(empty, device="cpu")
        elements = torch.frombuffer(self._mapped, dtype=dtype, offset=begin, count=count)
        return elements.reshape(shape)


def _read(path: str, begin_of_rest: int) -> Any:
    with open(path, "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    mapped.seek(begin_of_rest)
    return _Unpickler(mapped).load()
