"""The token-sum loss against PyTorch's cross entropy, vocabulary whole and shared."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as functional

from megatron_hdp.runtime.loss.token_sum import token_sum_loss
from tests.runtime.loss.test_fused_cross_entropy import case as of_hidden
from tests.runtime.loss.test_fused_cross_entropy import rows_of_this_rank


def case(dtype=torch.float64):
    hidden, weight, labels, mask = of_hidden()
    return (hidden @ weight.t()).to(dtype), labels.clamp(0), mask


def reference():
    logits, labels, mask = case()
    logits.requires_grad_()
    loss = (functional.cross_entropy(logits, labels, reduction="none") * mask).sum()
    loss.backward()
    return loss.detach(), logits.grad


def loss_on_one_rank():
    logits, labels, mask = case()
    logits = logits[:, rows_of_this_rank()].clone().requires_grad_()
    loss = token_sum_loss(logits, labels, mask, dist.group.WORLD)
    loss.backward()
    return loss.detach(), logits.grad


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_equals_cross_entropy(run_ranks, num_ranks):
    results = run_ranks(num_ranks, loss_on_one_rank)
    loss, grad = reference()
    torch.testing.assert_close(torch.cat([g for _, g in results], dim=1), grad)
    for found, _ in results:
        torch.testing.assert_close(found, loss)


def test_without_a_group_and_in_bfloat16():
    logits, labels, mask = case(torch.bfloat16)
    logits.requires_grad_()
    loss = token_sum_loss(logits, labels, mask)
    loss.backward()
    expected, grad = reference()
    assert loss.dtype == torch.float32
    assert abs(loss.item() - expected.item()) < 0.02 * expected.item()
    assert logits.grad.dtype == torch.bfloat16
    assert (logits.grad.double() - grad).abs().max() < 0.05
    assert not logits.grad[~mask].any()
