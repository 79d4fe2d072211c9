"""What differs between releases of megatron-core is found in either form."""

import functools
import inspect
from types import SimpleNamespace

import pytest
from megatron.core import dist_checkpointing
from megatron.core.transformer.spec_utils import ModuleSpec

from megatron_hdp.megatron import releases

PARTS = SimpleNamespace(router="Megatron's")


@pytest.mark.parametrize(
    "specification",
    [ModuleSpec(module=dict, submodules=PARTS), functools.partial(dict, submodules=PARTS)],
    ids=["ModuleSpec", "partial"],
)
def test_submodules_of_a_part(specification):
    assert releases.submodules_of(specification) is PARTS


@pytest.mark.parametrize("name", ["get_main_grads_for_grad_norm", "get_grads_for_grad_norm"])
def test_gradients_in_the_norm(name):
    assert releases.gradients_in_norm(SimpleNamespace(**{name: lambda: (1, 2)})) == [1, 2]


def test_an_optimizer_of_another_release_is_an_error():
    with pytest.raises(AttributeError, match="get_main_grads_for_grad_norm"):
        releases.gradients_in_norm(SimpleNamespace())


def test_the_writer_is_named_where_a_save_asks_for_one(monkeypatch):
    inspect.signature(dist_checkpointing.save).bind(
        {}, "folder", **releases.own_checkpoint_writer()
    )
    monkeypatch.setattr(dist_checkpointing, "save", lambda state, folder: None)
    assert releases.own_checkpoint_writer() == {}
    monkeypatch.setattr(dist_checkpointing, "save", lambda state, async_strategy="nvrx": None)
    assert releases.own_checkpoint_writer() == {"async_strategy": "mcore"}
