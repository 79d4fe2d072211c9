"""Log-probabilities and entropies from hidden states against PyTorch's of all logits."""

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


def squared(found):
    """Of which every token's gradients are its own."""
    return found.square().sum()


def learn(hidden, weight, labels, group=None, **options):
    """(log-probabilities, d hidden, d weight)."""
    hidden.requires_grad_()
    weight.requires_grad_()
    found = linear_log_probs(hidden, weight, labels, group, **options)
    squared(found).backward()
    return found.detach(), hidden.grad, weight.grad


def reference(tokens=TOKENS, with_entropies=False):
    """The same, by definition."""
    hidden, weight, labels, _ = case(tokens)
    hidden.requires_grad_()
    weight.requires_grad_()
    all_of_them = (hidden @ weight.t()).log_softmax(-1)
    found = all_of_them.gather(1, labels.clamp(0)[:, None])[:, 0]
    if with_entropies:
        found = torch.stack((found, -(all_of_them.exp() * all_of_them).sum(-1)))
    squared(found).backward()
    return found.detach(), hidden.grad, weight.grad


def labelled(dtype=torch.float64):
    hidden, weight, labels, _ = case(dtype=dtype)
    return hidden, weight, labels.clamp(0)


BOTH = pytest.mark.parametrize("with_entropies", [False, True])


@BOTH
@pytest.mark.parametrize("tokens_a_chunk", [1, 5, 22, 23, 1000])
def test_equals_log_softmax_in_float64(tokens_a_chunk, with_entropies):
    how = {"logits_bytes": tokens_a_chunk * ONE_TOKEN, "with_entropies": with_entropies}
    with LargestTensor() as largest:
        found = learn(*labelled(), **how)
    assert largest_error(found, reference(with_entropies=with_entropies)) < 1e-13
    assert largest.elements < TOKENS * VOCABULARY or tokens_a_chunk >= TOKENS - 1


@BOTH
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.bfloat16, 0.03), (torch.float32, 3e-6), (torch.float64, 1e-13)],
)
def test_other_precisions_and_gradients_that_are_added_to_a_buffer(
    dtype, tolerance, with_entropies
):
    how, expected = {"with_entropies": with_entropies}, reference(with_entropies=with_entropies)
    found, wide = learn(*labelled(dtype), **how), torch.promote_types(dtype, torch.float32)
    assert [one.dtype for one in found] == [wide, dtype, dtype]
    assert largest_error(found, expected) < tolerance
    hidden, weight, labels = labelled(dtype)
    buffer = torch.ones_like(weight, dtype=wide)
    found, dhidden, _ = learn(hidden, weight, labels, main_grad=buffer, **how)
    assert largest_error((found, dhidden, buffer - 1), expected) < tolerance


def test_no_token_gives_zeros():
    hidden, weight, labels = (one[:0] if i != 1 else one for i, one in enumerate(labelled()))
    found, dhidden, dweight = learn(hidden, weight, labels)
    assert found.shape == (0,) and dhidden.shape == hidden.shape and not dweight.any()


def on_one_rank():
    errors = []
    for with_entropies in (False, True):
        hidden, weight, labels = labelled()
        mine, how = weight[rows_of_this_rank()].clone(), {"with_entropies": with_entropies}
        found = learn(hidden, mine, labels, dist.group.WORLD, **how)
        errors.append(error_on_one_rank(found, reference(with_entropies=with_entropies)))
    return max(errors)


def test_ranks_share_the_vocabulary(run_ranks):
    assert max(run_ranks(3, on_one_rank)) < 1e-13


def test_entropies_of_logits_that_are_far_apart():
    """Of one certain entry and of equal ones: nothing overflows, no 0 x infinity."""
    weight = torch.tensor([[3e4], [-3e4], [-3e4]])
    hidden, labels = torch.tensor([[1.0], [0.0]]), torch.tensor([0, 1])
    hidden.requires_grad_()
    found = linear_log_probs(hidden, weight, labels, with_entropies=True)
    expected = torch.tensor([[0.0, -1.0986123], [0.0, 1.0986123]])
    torch.testing.assert_close(found, expected)
    found.sum().backward()
    assert torch.isfinite(hidden.grad).all()


def test_shapes_that_do_not_belong_together_are_refused():
    hidden, weight, labels = labelled()
    with pytest.raises(ValueError, match="expected one label a hidden state"):
        linear_log_probs(hidden, weight, labels[1:])
