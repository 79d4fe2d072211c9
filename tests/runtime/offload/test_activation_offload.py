"""Offload of a stack of layers: the same bits, the share asked for, nothing left behind."""

import gc
import random
import threading
import time
import weakref
from concurrent.futures import Future
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron_hdp.runtime.offload import ActivationOffload, saved_bytes
from megatron_hdp.runtime.offload.copies import ThreadCopyEngine
from megatron_hdp.runtime.offload.host_pool import HostPool
from megatron_hdp.runtime.offload.need import HostNeed
from megatron_hdp.runtime.offload.saved_bytes import SavedBytes
from megatron_hdp.runtime.offload.stash import MicroBatchStash, OffloadedStorage

WIDTH, TOKENS, NUM_LAYERS = 32, 64, 6
STORAGE_BYTES = TOKENS * 4 * WIDTH * 4  # the largest that a layer saves
COPIES = "megatron_hdp.runtime.offload.copies"
CPU_AND_GPU = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]


class Layer(nn.Module):
    """Saves views of one base, a parameter's transpose, and what all layers share."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide = nn.Linear(WIDTH, 4 * WIDTH)
        self.narrow = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden_states, *, turn):
        gate, up = self.wide(self.norm(hidden_states)).chunk(2, dim=-1)
        return hidden_states + self.narrow(nn.functional.silu(gate) * up) * turn


class Emptied(torch.autograd.Function):
    """A module whose output is emptied and made again: as Megatron's CheckpointWithoutOutput."""

    @staticmethod
    def forward(ctx, module, x):
        ctx.module = module
        ctx.save_for_backward(x.detach())
        out = module(x)  # without gradients
        ctx.storage = out.untyped_storage()
        return out

    @staticmethod
    def backward(ctx, gradient):
        torch.autograd.backward(ctx.again, gradient)
        return None, ctx.x.grad

    def fill(ctx, _):
        ctx.x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            ctx.again = ctx.module(ctx.x)
        again = ctx.again.untyped_storage()
        ctx.storage.resize_(again.nbytes())
        ctx.storage.copy_(again)


class EmptyingLayer(Layer):
    """Empties what its norm gave, and says so, if it was told to whom."""

    keep = None

    def forward(self, hidden_states, *, turn):
        normed = Emptied.apply(self.norm, hidden_states)
        if self.keep is not None:
            self.keep((normed,))
        gate, up = self.wide(normed).chunk(2, dim=-1)
        normed.untyped_storage().resize_(0)
        gate.register_hook(partial(Emptied.fill, normed.grad_fn))
        return hidden_states + self.narrow(nn.functional.silu(gate) * up) * turn


@pytest.fixture
def stack(request, monkeypatch):
    """Layers, their offload and a function that runs micro-batches, on the parameter's device."""
    monkeypatch.setattr(f"{COPIES}.StreamCopyEngine.least_bytes", 1)
    return Stack(torch.device(getattr(request, "param", "cpu")))


class Stack:
    def __init__(self, device, num_layers=NUM_LAYERS):
        torch.manual_seed(0)
        self.device = device
        self.layers = nn.ModuleList(Layer() for _ in range(num_layers)).to(device)
        self.offload = ActivationOffload(
            self.layers,
            device,
            self.layers.parameters,
            pool=HostPool(1 << 12, pin=device.type == "cuda"),
        )

    def forward(self, ratio, seed=1, tokens=TOKENS, recompute=False):
        generator = torch.Generator().manual_seed(seed)
        hidden = torch.randn(tokens, WIDTH, generator=generator).to(self.device).requires_grad_()
        turn = torch.rand(tokens, 1, generator=generator).to(self.device)
        with self.offload.micro_batch(ratio, tokens) as stash:
            for layer in self.layers:
                if recompute:
                    hidden = checkpoint(layer, hidden, turn=turn, use_reentrant=False)
                else:
                    hidden = layer(hidden, turn=turn)
        return hidden.square().sum(), stash

    def gradients(self, ratios, **how):
        """Gradients of several micro-batches that are alive together."""
        self.layers.zero_grad()
        losses = [self.forward(ratio, seed, **how)[0] for seed, ratio in enumerate(ratios)]
        for loss in losses:
            loss.backward()
        return [parameter.grad.clone() for parameter in self.layers.parameters()]


def equal(found, expected):
    return all(map(torch.equal, found, expected))


@pytest.mark.parametrize("stack", CPU_AND_GPU, indirect=True)
@pytest.mark.parametrize(
    ("ratio", "recompute"),
    [(0.01, False), (0.25, False), (0.5, False), (0.75, False), (1.0, False), (1.0, True)],
)
def test_the_bits_are_the_same(stack, ratio, recompute):
    found = stack.gradients([ratio, 0.3, ratio], recompute=recompute)
    assert equal(found, stack.gradients([0, 0, 0]))
    assert stack.offload.offloaded_bytes > 0


def emptying(stack, monkeypatch):
    """The stack with layers that empty what their norms gave, and say so."""
    expected = stack.gradients([0, 0])
    for layer in stack.layers:
        layer.__class__ = EmptyingLayer
    assert equal(stack.gradients([0, 0]), expected)
    enter = MicroBatchStash.enter_layer

    def entering(stash, *args):
        EmptyingLayer.keep = stash.keep
        enter(stash, *args)

    monkeypatch.setattr(EmptyingLayer, "keep", None)
    monkeypatch.setattr(MicroBatchStash, "enter_layer", entering)
    return expected


@pytest.mark.parametrize("stack", CPU_AND_GPU, indirect=True)
@pytest.mark.parametrize("ratio", [0.01, 0.3, 0.7, 1.0])
def test_what_its_maker_empties_stays(stack, ratio, monkeypatch):
    expected = emptying(stack, monkeypatch)
    assert equal(stack.gradients([ratio, 0.5]), expected)
    _, stash = stack.forward(1.0)
    normed, statistics = TOKENS * 4 * WIDTH, 2 * TOKENS * 4  # of a layer; not counted as going
    _, plain = Stack(stack.device).forward(1.0)
    assert plain.seen_bytes - stash.seen_bytes == (NUM_LAYERS - 2) * (normed + statistics)


def test_what_is_emptied_without_a_word_ends_the_step(stack, monkeypatch):
    """Planted: nobody tells the stash. (Copies are done at once: memory is freed under others.)"""
    emptying(stack, monkeypatch)
    monkeypatch.setattr(
        ThreadCopyEngine, "_copy", lambda _, kind, target, source: target.copy_(source).size
    )
    monkeypatch.setattr(MicroBatchStash, "keep", lambda stash, tensors: None)
    with pytest.raises(RuntimeError, match="the layer that made it emptied it"):
        stack.forward(1.0)


@pytest.mark.parametrize("stack", CPU_AND_GPU, indirect=True)
@pytest.mark.parametrize("ratio", [0.1, 0.25, 0.3, 0.5, 0.9, 1.0])
def test_the_share_is_at_least_what_was_asked_for_and_at_most_one_storage_more(stack, ratio):
    _, stash = stack.forward(ratio)
    assert 0 <= stash.offloaded_bytes - ratio * stash.seen_bytes < STORAGE_BYTES


def test_the_last_two_layers_stay(stack):
    _, stash = stack.forward(1.0)
    every_layer = stash.seen_bytes / (NUM_LAYERS - 2)
    shallow = Stack(stack.device)
    shallow.offload = ActivationOffload(
        shallow.layers[2:], stack.device, shallow.layers.parameters, pool=HostPool(1 << 12)
    )
    _, fewer = shallow.forward(1.0)
    # the first layers are before the first that is known, so nothing of them goes
    assert fewer.seen_bytes == pytest.approx(2 * every_layer)


def test_ratio_zero_installs_nothing(stack):
    with stack.offload.micro_batch(0.0) as stash:
        assert stash is None
        x = torch.ones(TOKENS, WIDTH, requires_grad=True)
        y = x * x
        assert not stack.layers[0]._forward_pre_hooks
    assert y.grad_fn._saved_self is x
    assert stack.offload.pool.held_bytes == 0


@pytest.mark.parametrize("ratio", [-0.1, 1.01, float("nan")])
def test_a_ratio_out_of_range_is_refused(stack, ratio):
    with (
        pytest.raises(ValueError, match="expected 0 < ratio <= 1"),
        stack.offload.micro_batch(ratio),
    ):
        pass


def test_parameters_their_views_and_what_layers_share_stay(stack, monkeypatch):
    gone, leaving = [], NUM_LAYERS - 2
    note(monkeypatch, gone, OffloadedStorage, "__init__", lambda _, storage, *__: storage.nbytes())
    stack.layers[0].wide.weight.data = torch.randn(5 * WIDTH, WIDTH)[WIDTH:]  # a view of a buffer
    _, stash = stack.forward(1.0)
    sizes = [size for _, size in gone]
    assert set(sizes) == {TOKENS * 4 * width for width in (WIDTH, 4 * WIDTH, 2 * WIDTH, 1)}
    # [t, 1] of the norm's mean and deviation, but not the turn, which is of the same size
    assert sizes.count(TOKENS * 4) == 2 * leaving
    assert sizes.count(STORAGE_BYTES) == leaving, "gate and up are views of one, which goes once"
    assert sum(sizes) == stash.offloaded_bytes


def test_memory_is_let_go_two_layers_later(stack, monkeypatch):
    events = []
    note(monkeypatch, events, MicroBatchStash, "enter_layer", lambda _, layer, *__: layer)
    note(monkeypatch, events, OffloadedStorage, "__init__", lambda storage, *_: id(storage))
    note(monkeypatch, events, OffloadedStorage, "let_go", id)
    stack.forward(1.0)
    layer_of, layer = {}, -1
    for name, value in events:
        if name == "enter_layer":
            layer = value
        elif name == "__init__":
            layer_of[value] = layer
        else:
            assert layer == layer_of.pop(value) + 2
    assert not layer_of


def test_a_layer_is_fetched_while_backward_is_in_the_one_after_it(stack, monkeypatch):
    events = []
    note(monkeypatch, events, MicroBatchStash, "_fetch", lambda _, layer: layer)
    note(monkeypatch, events, MicroBatchStash, "unpack", lambda _, saved: saved.layer)
    stack.forward(1.0)[0].backward()
    for layer in range(NUM_LAYERS - 2):
        assert events.index(("_fetch", layer)) == events.index(("unpack", layer + 1)) + 2
    assert [layer for name, layer in events if name == "_fetch"][0] == NUM_LAYERS - 1


def note(monkeypatch, events, owner, name, value):
    """Notes (name, value of the arguments) of every call."""
    method = getattr(owner, name)

    def noting(*args):
        events.append((name, value(*args)))
        return method(*args)

    monkeypatch.setattr(owner, name, noting)


def test_slow_copies_change_nothing(stack, monkeypatch):
    """Copies that end long after they were asked for: every use waits for them."""
    expected = stack.gradients([0, 0])
    slow_down(monkeypatch)
    assert equal(stack.gradients([1.0, 0.5]), expected)


def test_a_use_that_does_not_wait_is_seen(stack, monkeypatch):
    """Planted: nobody waits for the way back."""
    expected, done = stack.gradients([0, 0]), threading.Event()
    slow_down(monkeypatch, begin=done.wait)
    monkeypatch.setattr(Future, "result", lambda self: None)
    found = stack.gradients([1.0, 0.5])
    done.set()
    assert not equal(found, expected)


def slow_down(monkeypatch, begin=lambda: time.sleep(0.002)):
    for name in ("to_host", "to_device"):
        monkeypatch.setattr(ThreadCopyEngine, name, late(getattr(ThreadCopyEngine, name), begin))


def late(method, begin):
    class Late:
        """A copy that begins some time after it was asked for."""

        def __init__(self, target):
            self.target = target

        def copy_(self, source):
            begin()
            return self.target.copy_(source)

    return lambda self, target, source: method(self, Late(target), source)


def test_storages_and_host_memory_die_with_the_graph(stack):
    loss, stash = stack.forward(1.0)
    assert stack.offload.pool.used_bytes >= stash.offloaded_bytes
    gone = weakref.ref(stash)
    del stash, loss  # a forward whose backward never comes
    assert stack.offload.pool.used_bytes == 0
    loss, stash = stack.forward(1.0)
    del stash
    loss.backward()
    del loss
    assert stack.offload.pool.used_bytes == 0
    assert gone() is None


def test_backward_twice_through_one_graph(stack):
    found = []
    for ratio in (0.7, 0):
        stack.layers.zero_grad()
        loss, _ = stack.forward(ratio, seed=0)
        loss.backward(retain_graph=True)
        loss.backward()
        found.append([parameter.grad.clone() for parameter in stack.layers.parameters()])
    assert equal(*found) and not equal(found[0], stack.gradients([0]))


def test_an_error_in_forward_takes_the_hooks_off(stack):
    with pytest.raises(ZeroDivisionError), stack.offload.micro_batch(1.0):
        stack.layers[0](torch.ones(2, WIDTH), turn=torch.ones(2, 1))
        raise ZeroDivisionError
    assert not any(layer._forward_pre_hooks for layer in stack.layers)
    assert equal(stack.gradients([1.0]), stack.gradients([0]))


def test_many_steps_leave_nothing_behind():
    """Micro-batches of any length and ratio; what is held stops growing, nothing stays in use."""
    stack, draw = Stack(torch.device("cpu"), num_layers=4), random.Random(0)
    counts = []
    gc.collect()
    gc.freeze()  # what other tests hold takes longer to look through than this one
    for step in range(30):
        losses = [
            stack.forward(draw.random(), step, tokens=draw.randint(1, TOKENS))[0]
            for _ in range(draw.randint(1, 2))
        ]
        for loss in losses:
            loss.backward()
        del losses, loss
        if step % 6 == 5:
            gc.collect()
            living = sum(type(x) is OffloadedStorage for x in gc.get_objects())
            counts.append((stack.offload.pool.held_bytes, living, stack.offload.pool.used_bytes))
    gc.unfreeze()
    assert [count[1:] for count in counts] == [(0, 0)] * 5
    assert counts[-1][0] == counts[2][0]


SAVED = SavedBytes(layers=[800, 800, 1000, 900], largest=300)
"""Of ten tokens."""


@pytest.mark.parametrize(
    "stack, loads, most_alive, expected",
    [
        ((4,), [], 1, (0, 0)),
        ((4,), [(40, 0.0)], 1, (0, 0)),
        # two of four layers leave, a storage more than the share: 40 (0.5 x 2 x 100 + 30) x 9 / 8
        ((4,), [(40, 0.5)], 1, (5850, 1200)),
        ((4,), [(40, 0.5), (80, 0.0), (8, 1.0)], 1, (5850, 1200)),
        ((4,), [(40, 0.5), (8, 1.0), (40, 0.5)], 2, (5850 + 2070, 1200)),
        ((4,), [(40, 0.5), (8, 1.0)], 4, (5850 + 2070, 1200)),
        ((4, 2), [(40, 0.5)], 1, (40 * (100 + 2 * 30) * 9 // 8, 1200)),  # each part a storage more
        ((2,), [(40, 1.0)], 1, (0, 1200)),
    ],
)
def test_by_hand(stack, loads, most_alive, expected):
    need = HostNeed(*stack)
    need.expect(SAVED, 10)
    assert need.of(loads, most_alive) == expected


def test_streams_and_what_offloads_are_alive_together():
    need = HostNeed(4)
    need.expect(SAVED, 10)
    loads, streams = [(40, 0.5), (90, 0.0), (8, 1.0)], [(0, 0), (1600, 1300), (0, 0)]
    assert need.of(loads, 1, streams) == (5850, 1300)
    assert need.of(loads, 2, streams) == (5850 + 1800, 1300)
    assert need.of(loads, 3, streams) == (5850 + 1800 + 2070, 1300)


def stack_that_knows():
    stack = Stack(torch.device("cpu"))
    saved = saved_bytes(stack.layers, stack.layers.parameters(), lambda: stack.forward(0, tokens=8))
    stack.offload.need.expect(saved, 8)
    return stack


@pytest.mark.parametrize("ratios", [[1.0], [0.3, 0.7, 1.0, 0.01]])
def test_no_forward_asks_for_host_memory(ratios):
    stack = stack_that_knows()
    stack.offload.reserve([(TOKENS, ratio) for ratio in ratios], most_alive=len(ratios))
    held_bytes = stack.offload.pool.held_bytes
    stack.gradients(ratios)
    assert stack.offload.pool.num_late == 0
    assert stack.offload.pool.held_bytes == held_bytes < 3 * stack.offload.offloaded_bytes


def test_what_saves_more_than_the_example_is_known_to_the_next_step():
    """Planted: the example was counted wrongly, at a tenth."""
    stack = stack_that_knows()
    stack.offload.need = HostNeed(len(stack.layers))
    stack.offload.need.expect(SavedBytes(layers=[5000], largest=500), 10)
    stack.offload.reserve([(TOKENS, 1.0)])
    with pytest.warns(UserWarning, match="beyond the"):
        stack.forward(1.0)
    late = stack.offload.pool.num_late
    stack.offload.reserve([(TOKENS, 1.0)] * 3, most_alive=3)
    stack.gradients([1.0] * 3)
    assert stack.offload.pool.num_late == late > 0
