"""The fused loss, and that of logits, against PyTorch's cross entropy in float64; all chunks."""

import sys
from contextlib import nullcontext
from subprocess import SubprocessError
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as functional

from megatron_hdp.runtime.loss import fused_cross_entropy as fused
from megatron_hdp.runtime.loss.fused_cross_entropy import (
    TorchRows,
    chunk_tokens,
    linear_cross_entropy,
)
from megatron_hdp.runtime.loss.token_sum import token_sum_loss
from tests.support.largest_tensor import LargestTensor

TOKENS, HIDDEN, VOCABULARY = 23, 8, 30
TOLERANCES = {torch.bfloat16: 0.03, torch.float16: 0.004, torch.float32: 3e-6}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
ONE_TOKEN = VOCABULARY * 8  # bytes of a token's float64 logits
SCALE = 0.37  # of the loss, for a gradient of the output that is not 1


def case(tokens=TOKENS, vocabulary=VOCABULARY, dtype=torch.float64, device="cpu"):
    """Hidden states, weights, labels (some far outside where masked) and mask."""
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(tokens, HIDDEN, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocabulary, HIDDEN, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, vocabulary, (tokens,), generator=generator)
    mask = torch.arange(tokens) % 3 != 0
    labels[~mask] = -(2**40)
    tensors = hidden.to(dtype), weight.to(dtype), labels, mask
    return [one.to(device) for one in tensors]


def reference(tokens=TOKENS, vocabulary=VOCABULARY, mask=None):
    """(loss, d hidden, d weight), by definition, of the loss times `SCALE`."""
    hidden, weight, labels, default = case(tokens, vocabulary)
    mask = default if mask is None else mask
    hidden.requires_grad_()
    weight.requires_grad_()
    losses = functional.cross_entropy(hidden @ weight.t(), labels.clamp(0), reduction="none")
    loss = (losses * mask).sum() * SCALE
    loss.backward()
    return loss.detach(), hidden.grad, weight.grad


def learn(hidden, weight, labels, mask, group=None, logits_bytes=None):
    """(loss, d hidden, d weight) of the fused loss times `SCALE`."""
    hidden.requires_grad_()
    weight.requires_grad_()
    loss = linear_cross_entropy(hidden, weight, labels, mask, group, logits_bytes) * SCALE
    loss.backward()
    return loss.detach(), hidden.grad, weight.grad


def largest_error(found, expected):
    """Largest relative error, norm by norm, of the loss and both gradients."""
    return max(
        ((a.double().cpu() - b).norm() / b.norm().clamp(min=1e-300)).item()
        for a, b in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tokens_a_chunk", [1, 5, 22, 23, 1000])
def test_equals_cross_entropy_in_float64(device, tokens_a_chunk):
    found = learn(*case(device=device), logits_bytes=tokens_a_chunk * ONE_TOKEN)
    assert largest_error(found, reference()) < 1e-13


def rows_of_this_rank():
    """Its part of the vocabulary."""
    width = VOCABULARY // dist.get_world_size()
    return slice(dist.get_rank() * width, (dist.get_rank() + 1) * width)


def error_on_one_rank(found, expected):
    """The largest error of this rank's part, gradients of the hidden states summed over ranks."""
    (result, dhidden, dweight), (right, right_dhidden, right_dweight) = found, expected
    dist.all_reduce(dhidden)
    expected = right, right_dhidden, right_dweight[rows_of_this_rank()]
    return largest_error((result, dhidden, dweight), expected)


def learn_on_one_rank(logits_bytes, fault=None):
    hidden, weight, labels, mask = case()
    weight = weight[rows_of_this_rank()].clone()
    with mock.patch.object(fused, *FAULTS_OF_RANKS[fault]) if fault else nullcontext():
        found = learn(hidden, weight, labels, mask, dist.group.WORLD, logits_bytes)
    return error_on_one_rank(found, reference()), found[0].item()


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_ranks_share_the_vocabulary(run_ranks, num_ranks):
    results = run_ranks(num_ranks, learn_on_one_rank, 7 * ONE_TOKEN // num_ranks)
    assert max(error for error, _ in results) < 1e-13
    assert len({loss for _, loss in results}) == 1  # to the last bit


OVER_THE_VOCABULARY = fused.over_the_vocabulary
FAULTS_OF_RANKS = {
    "every rank takes itself for the first": ("rank_in", lambda group: 0),
    "its part of the vocabulary for all of it": (
        "over_the_vocabulary",
        lambda figures, group: OVER_THE_VOCABULARY(figures, None),
    ),
}


@pytest.mark.parametrize("fault", FAULTS_OF_RANKS)
def test_a_fault_between_ranks_is_found(run_ranks, fault):
    results = run_ranks(2, learn_on_one_rank, None, fault)
    assert max(error for error, _ in results) > 1e-2


class OneRowWrong(TorchRows):
    """Leaves the last row of every chunk without its share of the gradient."""

    def gradient(self, scores, figures, columns, log_sums, weights):
        super().gradient(scores, figures, columns, log_sums, weights)
        scores[-1] = 0


class LabelForgotten(TorchRows):
    """Takes nothing off at the label."""

    def gradient(self, scores, figures, columns, log_sums, weights):
        super().gradient(scores, figures, columns - VOCABULARY, log_sums, weights)


def forget_chunks(total, left, right):
    """Keeps the last chunk's product only."""
    total.copy_(left @ right)


@pytest.mark.parametrize(
    "name, replacement",
    [
        ("rows_for", lambda *_: OneRowWrong()),
        ("rows_for", lambda *_: LabelForgotten()),
        ("add_product", forget_chunks),
    ],
    ids=["row dropped", "label forgotten", "chunk dropped"],
)
def test_a_planted_fault_is_found(name, replacement):
    with mock.patch.object(fused, name, replacement):
        found = learn(*case(), logits_bytes=10 * ONE_TOKEN)
    assert largest_error(found, reference()) > 1e-2


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_in_lower_precision(device, dtype):
    """Inputs, logits and their gradient are rounded: a few units of the precision."""
    tensors = case(200, 300, dtype, device)
    found = learn(*tensors, logits_bytes=64 * 300 * 4)
    assert [one.dtype for one in found] == [torch.float32, dtype, dtype]
    assert largest_error(found, reference(200, 300)) < TOLERANCES[dtype]
    assert not found[1][~tensors[3]].any()


def test_the_weights_gradient_is_summed_in_float32():
    """Chunks of one token in bfloat16: a sum in bfloat16 would lose most of them."""
    one, many = (
        learn(*case(200, 300, torch.bfloat16), logits_bytes=size)[2] for size in (1 << 20, 1)
    )
    assert (one != many).float().mean() < 0.02  # all but roundings at the end


@pytest.mark.parametrize("tokens", [0, TOKENS])
@pytest.mark.parametrize("device", DEVICES)
def test_a_micro_batch_without_loss_tokens(device, tokens):
    hidden, weight, labels, mask = case(tokens, device=device)
    loss, dhidden, dweight = learn(hidden, weight, labels, torch.zeros_like(mask))
    assert loss == 0 and dhidden.shape == hidden.shape
    assert not dhidden.any() and not dweight.any()


@pytest.mark.parametrize("frozen", [0, 1])
def test_what_needs_no_gradient_gets_none(frozen):
    tensors = case()
    tensors[1 - frozen].requires_grad_()
    (linear_cross_entropy(*tensors, logits_bytes=ONE_TOKEN) * SCALE).backward()
    assert tensors[frozen].grad is None
    expected = reference()[2 - frozen]
    assert (tensors[1 - frozen].grad - expected).norm() < 1e-13 * expected.norm()


def test_without_gradients_only_the_loss_is_made():
    tensors = case()
    for one in tensors[:2]:
        one.requires_grad_()
    with torch.no_grad(), mock.patch.object(TorchRows, "gradient") as gradient:
        loss = linear_cross_entropy(*tensors)
    assert not gradient.called and not loss.requires_grad
    assert abs(loss * SCALE - reference()[0]) < 1e-13 * reference()[0]


def test_backward_runs_once_and_with_a_sum_of_gradients_for_a_loss_of_weight_1():
    hidden, weight, labels, mask = case()
    loss = linear_cross_entropy(hidden.requires_grad_(), weight, labels, mask)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="run forward again"):
        loss.backward()
    loss = linear_cross_entropy(hidden, weight, labels, mask, main_grad=torch.zeros_like(weight))
    with pytest.raises(RuntimeError, match="has weight 1"):
        (loss * SCALE).backward()


@pytest.mark.parametrize("wants_gradient", [True, False])
def test_the_weights_gradient_is_added_where_all_are_summed(wants_gradient):
    """Two micro-batches over something that is there; whoever waits for a gradient is called."""
    hidden, weight, labels, mask = case()
    start = torch.linspace(-1, 1, weight.numel(), dtype=torch.float64).view_as(weight)
    main_grad, calls = start.clone(), []
    weight.requires_grad_(wants_gradient)
    if wants_gradient:
        weight.register_post_accumulate_grad_hook(lambda one: calls.append(one.grad.data_ptr()))
    _, dhidden, dweight = reference()
    for micro_batch in range(2):
        leaf = hidden.clone().requires_grad_()
        loss = linear_cross_entropy(
            leaf, weight, labels, mask, logits_bytes=5 * ONE_TOKEN, main_grad=main_grad
        )
        torch.testing.assert_close(main_grad, start + (micro_batch + 1) * dweight / SCALE)
        weight.grad = None
        loss.backward()
        torch.testing.assert_close(leaf.grad, dhidden / SCALE)
    assert calls == [weight.data_ptr()] * 2 * wants_gradient
    with torch.no_grad():
        before = main_grad.clone()
        linear_cross_entropy(hidden, weight, labels, mask, main_grad=main_grad)
        assert torch.equal(main_grad, before)


def test_a_mask_of_another_shape_is_refused():
    hidden, weight, labels, mask = case()
    with pytest.raises(ValueError, match="expected one label and one mask entry a hidden state"):
        linear_cross_entropy(hidden, weight, labels, mask[None])


@pytest.mark.parametrize(
    "num_tokens, most, expected",
    [(0, 10, 1), (5, 10, 5), (100, 10, 10), (1000, 600, 512), (1000, 999, 512), (1000, 1000, 1000)],
)
def test_chunks_are_bounded_and_even(num_tokens, most, expected):
    assert chunk_tokens(num_tokens, 4, 4 * most + 3) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_tensor_of_tokens_times_vocabulary_is_made(dtype):
    tokens, vocabulary = 500, 400
    hidden, weight, labels, mask = case(tokens, vocabulary, dtype)
    with LargestTensor() as largest:
        learn(hidden, weight, labels, mask, logits_bytes=64 * vocabulary * dtype.itemsize)
    assert largest.elements == 64 * vocabulary
    with LargestTensor() as usual:
        token_sum_loss(hidden @ weight.t(), labels, mask)
    assert usual.elements >= tokens * vocabulary  # it would be seen


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("in_place", [True, False])
def test_where_gradients_are_summed_nothing_as_large_as_the_weights_is_made(dtype, in_place):
    tokens, vocabulary = 200, 400
    hidden, weight, *of_tokens = case(tokens, vocabulary, dtype)
    main_grad = torch.zeros_like(weight, dtype=torch.promote_types(dtype, torch.float32))
    how = {"logits_bytes": 4 * vocabulary * dtype.itemsize}
    how["main_grad"] = main_grad if in_place else None
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    with LargestTensor(weight, main_grad) as largest:
        linear_cross_entropy(*leaves, *of_tokens, **how).backward()
    assert (largest.elements < weight.numel()) == in_place
    assert main_grad.any() == in_place


def no_compiler(rows, logits, columns):
    raise SubprocessError("Python.h: No such file or directory")


@pytest.mark.parametrize(
    "spec, statistics, reason",
    [
        (None, None, "triton is not installed"),
        ("there", no_compiler, "triton cannot compile here .*Python.h"),
    ],
)
def test_without_triton_it_says_so_once(monkeypatch, spec, statistics, reason):
    kernels = SimpleNamespace(TritonRows=type("TritonRows", (), {"statistics": statistics}))
    monkeypatch.setitem(sys.modules, "megatron_hdp.runtime.loss.triton_cross_entropy", kernels)
    monkeypatch.setattr(fused.importlib.util, "find_spec", lambda name: spec)
    fused._triton_rows.cache_clear()
    with pytest.warns(UserWarning, match=reason) as warned:
        rows = [fused._triton_rows(torch.device("cpu")) for _ in range(2)]
    fused._triton_rows.cache_clear()
    assert len(warned) == 1 and all(isinstance(one, TorchRows) for one in rows)


def logits_case(dtype=torch.float64):
    hidden, weight, labels, mask = case()
    return (hidden @ weight.t()).to(dtype), labels.clamp(0), mask


def logits_reference():
    logits, labels, mask = logits_case()
    logits.requires_grad_()
    loss = (functional.cross_entropy(logits, labels, reduction="none") * mask).sum()
    loss.backward()
    return loss.detach(), logits.grad


def loss_on_one_rank():
    logits, labels, mask = logits_case()
    logits = logits[:, rows_of_this_rank()].clone().requires_grad_()
    loss = token_sum_loss(logits, labels, mask, dist.group.WORLD)
    loss.backward()
    return loss.detach(), logits.grad


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_the_loss_of_logits_equals_cross_entropy(run_ranks, num_ranks):
    results = run_ranks(num_ranks, loss_on_one_rank)
    loss, grad = logits_reference()
    torch.testing.assert_close(torch.cat([g for _, g in results], dim=1), grad)
    for found, _ in results:
        torch.testing.assert_close(found, loss)


def test_the_loss_of_logits_without_a_group_and_in_bfloat16():
    logits, labels, mask = logits_case(torch.bfloat16)
    logits.requires_grad_()
    loss = token_sum_loss(logits, labels, mask)
    loss.backward()
    expected, grad = logits_reference()
    assert loss.dtype == torch.float32
    assert abs(loss.item() - expected.item()) < 0.02 * expected.item()
    assert logits.grad.dtype == torch.bfloat16
    assert (logits.grad.double() - grad).abs().max() < 0.05
    assert not logits.grad[~mask].any()
