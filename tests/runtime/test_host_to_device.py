"""A micro-batch's arrays: one copy each, begun before the micro-batch before is given out."""

from contextlib import contextmanager
from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_hdp.runtime import host_to_device
from megatron_hdp.runtime.host_to_device import PackedArrays, with_arrays_ahead


def arrays_of(seed):
    """Like those of a micro-batch; the mask first, so that what follows is not where it may be."""
    random, num_tokens = np.random.default_rng(seed), 3 + 2 * seed
    return {
        "loss_mask": random.random(num_tokens) < 0.5,
        "tokens": random.integers(0, 2**40, num_tokens),
        "offsets": random.integers(0, 9, (2, 3)).astype(np.int32),
        "positions": np.arange(num_tokens),
        "nothing": np.zeros(0, dtype=np.int64),
    }


def assert_same(tensors, arrays):
    assert tensors.keys() == arrays.keys()
    for name, array in arrays.items():
        assert tensors[name].dtype == torch.from_numpy(array).dtype
        assert np.array_equal(tensors[name].numpy(), array), name


@pytest.mark.parametrize("seed", range(4))
def test_packed_arrays_come_out_as_they_went_in(seed):
    arrays = arrays_of(seed)
    packed = PackedArrays(arrays)
    copy = packed.buffer.clone()
    packed.buffer.zero_()
    assert_same(packed.views(copy), arrays)
    assert all(part.data_ptr() % 8 == 0 for part in packed.views(copy).values())


def test_on_the_cpu_nothing_is_copied():
    arrays = [arrays_of(seed) for seed in range(3)]
    pairs = list(with_arrays_ahead(range(3), arrays.__getitem__, torch.device("cpu"), None))
    assert [item for item, _ in pairs] == [0, 1, 2]
    for item, tensors in pairs:
        assert_same(tensors, arrays[item])
        assert tensors["tokens"].data_ptr() == arrays[item]["tokens"].ctypes.data
    assert list(with_arrays_ahead([], arrays_of, torch.device("cpu"), None)) == []


class FakeStreams:
    """Streams and events by name; what is copied where, and who waits for what, in order."""

    def __init__(self, monkeypatch):
        self.log, self.current, self._numbers = [], "compute", count(1)
        monkeypatch.setattr(torch.cuda, "Event", self.event)
        monkeypatch.setattr(torch.cuda, "stream", self.stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self)
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: self.log.append("kept"))
        monkeypatch.setattr(host_to_device, "PackedArrays", self.packed)

    def event(self):
        name = f"copy {next(self._numbers)}"
        record = lambda stream: self.log.append(f"{name} on {stream}")  # noqa: E731
        return SimpleNamespace(name=name, record=record)

    def wait_event(self, event):
        self.log.append(f"{self.current} waits for {event.name}")

    @contextmanager
    def stream(self, name):
        self.current, before = name, self.current
        yield
        self.current = before

    def packed(self, arrays, pin):
        assert pin, "the host would wait for the copy of a buffer that is not pinned"
        return PackedArrays(arrays)


class Copies(TorchDispatchMode):
    """Counts copies to a device that is none, and gives what was copied."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function is torch.ops.aten._to_copy.default:
            assert kwargs["non_blocking"] and kwargs.pop("device").type == "meta"
            self.count += 1
        return function(*args, **kwargs)


def test_each_item_is_one_copy_begun_before_the_one_before_it_is_given_out(monkeypatch):
    streams = FakeStreams(monkeypatch)
    given = with_arrays_ahead(range(3), arrays_of, torch.device("meta"), "copies")
    with Copies() as copies:
        for item, tensors in given:
            assert_same(tensors, arrays_of(item))
            assert copies.count == min(item + 2, 3)
            streams.log.append(f"forward {item}")
    assert streams.log == [
        *("copy 1 on copies", "copy 2 on copies"),
        *("compute waits for copy 1", "kept", "forward 0", "copy 3 on copies"),
        *("compute waits for copy 2", "kept", "forward 1"),
        *("compute waits for copy 3", "kept", "forward 2"),
    ]
