"""What a checkpoint's writer is given: tensors in host memory, nothing of the trainer's GPU."""

import pickle
import sys
from collections import namedtuple
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from megatron_hdp.megatron.checkpoint.staging import Staged, with_staged_tensors
from megatron_hdp.megatron.lm import replacements

Request = namedtuple("Request", "async_fn async_fn_args async_fn_kwargs preload_fn call_idx")
BLOCK = torch.arange(24.0).reshape(4, 6)
TENSORS = {
    "part": BLOCK[1:3],
    "transposed": BLOCK.T,
    "bfloat16": torch.linspace(-3, 3, 7, dtype=torch.bfloat16),
    "one-element": torch.tensor(5, dtype=torch.int64),
    "nothing": torch.empty(0, 3),
    "parameter": torch.nn.Parameter(torch.ones(3)),
    "flags": torch.tensor([True, False]),
    "last": torch.tensor([2.5]),
}


def written(*arguments):
    """Stands for Megatron's writer."""
    return arguments


@pytest.fixture(scope="module")
def read():
    staged = Staged({"name": "x", "tensors": TENSORS})
    return pickle.loads(pickle.dumps(staged))


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_is_read_as_it_was_and_alone(read, name):
    """Writers save whole storages: a part of a storage would take the rest along."""
    expected, found = TENSORS[name], read["tensors"][name]
    assert torch.equal(found, expected) and found.dtype == expected.dtype
    assert found.untyped_storage().nbytes() == expected.numel() * expected.element_size()
    assert read["name"] == "x"


def test_a_writer_gets_nothing_of_the_gpu():
    on_gpu, on_host = torch.empty(2, 3, device="meta"), torch.arange(6.0).reshape(2, 3)
    buckets = partial(list, [("file", "key", ([], [("item", on_host)]))])
    request = Request(partial(written, []), [3, [on_gpu], "queue"], {}, buckets, 0)
    staged = with_staged_tensors(request)
    assert staged.preload_fn is None
    rank, [(file, _, (_, [(item, tensor)]))], queue = pickle.loads(
        pickle.dumps(staged.async_fn_args)
    )
    assert (rank, file, item, queue) == (3, "file", "item", "queue")
    assert tensor.device.type == "cpu" and torch.equal(tensor, on_host)
    with pytest.raises(NotImplementedError, match="meta tensor"):  # nothing is left out silently
        Staged([on_gpu])


@pytest.mark.parametrize("persistent", [True, False])
def test_a_checkout_s_persistent_writer_gets_nothing_either(persistent, monkeypatch):
    args = SimpleNamespace(use_persistent_ckpt_worker=persistent)
    training = SimpleNamespace(get_args=lambda: args)
    monkeypatch.setitem(sys.modules, "megatron.training", training)
    request = Request(written, [3, [BLOCK], "queue"], {}, partial(list, [BLOCK]), 0)
    assert replacements.schedule_save(lambda one: one, request) is request  # without HDP
    monkeypatch.setattr(replacements, "_run", object())
    found = replacements.schedule_save(lambda one: one, request)
    assert (found.preload_fn is None) == isinstance(found.async_fn_args[1], Staged) == persistent


def test_what_has_nothing_to_preload_stays():
    for request in (Request(None, [], {}, None, 0), Request(written, [1], {}, None, 0)):
        assert with_staged_tensors(request) is request


def test_what_was_staged_ends_with_the_request():
    data = pickle.dumps(Staged([BLOCK]))
    with pytest.raises(FileNotFoundError):
        pickle.loads(data)
