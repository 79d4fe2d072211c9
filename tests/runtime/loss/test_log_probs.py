"""Log-probabilities from hidden states against PyTorch's of all logits, chunks of all sizes."""

import pytest
import torch
import torch.distributed as dist

from megatron_hdp.runtime.loss import linear_log_probs
from tests.runtime.loss.test_fused_cross_entropy import (
    ONE_TOKEN,
    TOKENS,
    VOCABULARY,
    case,
    error_on_one_rank,
    largest_error,
    rows_of_this_rank,
)
from tests.support.largest_tensor import LargestTensor


def squared(log_probs):
    """Of which every token's gradient is its own."""
    return log_probs.square().sum()


def learn(hidden, weight, labels, group=None, **options):
    """(log-probabilities, d hidden, d weight)."""
    hidden.requires_grad_()
    weight.requires_grad_()
    found = linear_log_probs(hidden, weight, labels, group, **options)
    squared(found).backward()
    return found.detach(), hidden.grad, weight.grad


def reference(tokens=TOKENS):
    """The same, by definition."""
    hidden, weight, labels, _ = case(tokens)
    hidden.requires_grad_()
    weight.requires_grad_()
    found = (hidden @ weight.t()).log_softmax(-1).gather(1, labels.clamp(0)[:, None])[:, 0]
    squared(found).backward()
    return found.detach(), hidden.grad, weight.grad


def labelled(dtype=torch.float64):
    hidden, weight, labels, _ = case(dtype=dtype)
    return hidden, weight, labels.clamp(0)


@pytest.mark.parametrize("tokens_a_chunk", [1, 5, 22, 23, 1000])
def test_equals_log_softmax_in_float64(tokens_a_chunk):
    with LargestTensor() as largest:
        found = learn(*labelled(), logits_bytes=tokens_a_chunk * ONE_TOKEN)
    assert largest_error(found, reference()) < 1e-13
    assert largest.elements < TOKENS * VOCABULARY or tokens_a_chunk >= TOKENS - 1


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.bfloat16, 0.03), (torch.float32, 3e-6), (torch.float64, 1e-13)],
)
def test_other_precisions_and_gradients_that_are_added_to_a_buffer(dtype, tolerance):
    found, wide = learn(*labelled(dtype)), torch.promote_types(dtype, torch.float32)
    assert [one.dtype for one in found] == [wide, dtype, dtype]
    assert largest_error(found, reference()) < tolerance
    hidden, weight, labels = labelled(dtype)
    buffer = torch.ones_like(weight, dtype=wide)
    found, dhidden, _ = learn(hidden, weight, labels, main_grad=buffer)
    assert largest_error((found, dhidden, buffer - 1), reference()) < tolerance


def test_no_token_gives_zeros():
    hidden, weight, labels = (one[:0] if i != 1 else one for i, one in enumerate(labelled()))
    found, dhidden, dweight = learn(hidden, weight, labels)
    assert found.shape == (0,) and dhidden.shape == hidden.shape and not dweight.any()


def on_one_rank():
    hidden, weight, labels = labelled()
    found = learn(hidden, weight[rows_of_this_rank()].clone(), labels, dist.group.WORLD)
    return error_on_one_rank(found, reference())


def test_ranks_share_the_vocabulary(run_ranks):
    assert max(run_ranks(3, on_one_rank)) < 1e-13


def test_shapes_that_do_not_belong_together_are_refused():
    hidden, weight, labels = labelled()
    with pytest.raises(ValueError, match="expected one label a hidden state"):
        linear_log_probs(hidden, weight, labels[1:])
