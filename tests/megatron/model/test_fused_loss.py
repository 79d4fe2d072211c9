"""The fused loss in Megatron's model: same loss, gradients and weights as with logits."""

from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from megatron_hdp.megatron import parallel
from megatron_hdp.megatron.model import building, fused_loss
from megatron_hdp.megatron.parallel import compute_device
from megatron_hdp.runtime.loss.token_sum import token_sum_loss
from tests.gradient_equivalence.cases import FUSED_LENGTHS as LENGTHS
from tests.gradient_equivalence.settings import TIED
from tests.support.gradients import VOCABULARY, tiny_arguments, write_corpus
from tests.support.largest_tensor import LargestTensor

OTHERS = dict.fromkeys(
    ("input_ids", "position_ids", "rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin")
)
FEW_TOKENS = ("megatron_hdp.runtime.loss.fused_cross_entropy.LOGITS_BYTES", {"cpu": 4 * 320 * 2})


def both_models(arguments, function):
    """The function's result for the model with the fused loss and the stock one, weights equal."""
    parallel.initialise(arguments)
    results = []
    for one in (arguments, replace(arguments, hdp_fused_loss=False)):
        parallel.set_seeds(arguments.seed)
        gpt = building.build_gpt(one, VOCABULARY)
        results.append(function(gpt))
    parallel.finish()
    return results


def plain_inputs(gpt):
    """Hidden states for the last layer, made from an input that a stage would receive."""
    inner = gpt.module.module if hasattr(gpt.module, "module") else gpt.module
    tokens = torch.arange(40, device=compute_device()) % 7 * 11
    hidden = inner.embedding(tokens[None], tokens[None])
    return inner, hidden, tokens[None].roll(-1), (tokens != 33)[None]


def loss_and_gradients(gpt):
    """Loss (float64) and gradients by hidden states and output weights of the model's last step."""
    inner, hidden, labels, mask = plain_inputs(gpt)
    hidden = (hidden * 20).detach().requires_grad_()
    if isinstance(inner, fused_loss.FusedLossModel):
        loss = inner._postprocess(hidden_states=hidden, labels=labels, loss_mask=mask, **OTHERS)
    else:
        logits = inner._postprocess(hidden_states=hidden, labels=None, **OTHERS)
        loss = token_sum_loss(logits, labels, mask)
    tied = inner.share_embeddings_and_output_weights
    weight = inner.shared_embedding_or_output_weight() if tied else inner.output_layer.weight
    return [one.double() for one in (loss, *torch.autograd.grad(loss, (hidden, weight)))], loss


def gradient_in_the_buffer(arguments):
    """Of two micro-batches: DDP's sum for the output weights, and the largest tensor's elements.

    Of the fused loss with the buffer, of the same without it, and the weights' elements.
    """
    parallel.initialise(arguments)
    parallel.set_seeds(arguments.seed)
    gpt = building.build_gpt(arguments, VOCABULARY)
    inner, hidden, labels, mask = plain_inputs(gpt)
    hidden = (hidden * 20).detach().requires_grad_()
    weight = inner.output_layer.weight
    kept, found = (weight, weight.main_grad), []
    for is_whole_loss in (True, False):
        weight.main_grad.zero_()
        weight.grad_added_to_main_grad = False
        with mock.patch(*FEW_TOKENS), gpt.no_sync(), LargestTensor(*kept) as largest:
            for _ in range(2):
                params = SimpleNamespace(is_whole_loss=is_whole_loss)
                loss = inner._postprocess(
                    hidden_states=hidden,
                    labels=labels,
                    loss_mask=mask,
                    packed_seq_params=params,
                    **OTHERS,
                )
                loss.backward()
        assert weight.grad is None  # DDP was called
        found += [weight.main_grad.double(), largest.elements]
    return [*found, weight.numel()]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("dtype", ["fp64", "float32", "bf16"])
def test_the_gradient_goes_into_ddps_buffer(run_ranks, tmp_path, dtype, overlap):
    prefix = write_corpus(tmp_path, LENGTHS)
    precision = {"fp64": dtype == "fp64", "bf16": dtype == "bf16"}
    arguments = tiny_arguments(prefix, overlap_grad_reduce=overlap, **precision)
    found = run_ranks(1, gradient_in_the_buffer, arguments)[0]
    in_buffer, largest, usual, largest_usual, elements = found
    assert largest < elements <= largest_usual
    tolerance = {"fp64": 1e-14, "float32": 1e-6, "bf16": 0.01}[dtype]
    assert in_buffer.any() and (in_buffer - usual).norm() <= tolerance * usual.norm()


def compare_in_bfloat16(arguments):
    (fused, fused_loss_), (stock, _) = both_models(arguments, loss_and_gradients)
    assert fused_loss_.dtype == torch.float32 and fused_loss_.dim() == 0
    return [((a - b).norm() / b.norm()).item() for a, b in zip(fused, stock, strict=True)]


@pytest.mark.parametrize("tied", [False, True])
def test_in_bfloat16(run_ranks, tmp_path, tied):
    prefix = write_corpus(tmp_path, LENGTHS)
    overrides = {"fp64": False, "bf16": True} | (TIED if tied else {})
    loss, *gradients = run_ranks(1, compare_in_bfloat16, tiny_arguments(prefix, **overrides))[0]
    assert loss < 1e-6 and max(gradients) < 0.01


def logits_and_names(gpt):
    """What the output layer gives without labels, and the names of all weights."""
    inner, hidden, _, _ = plain_inputs(gpt)
    tied = inner.share_embeddings_and_output_weights
    weight = inner.shared_embedding_or_output_weight() if tied else None
    logits, _ = inner.output_layer(hidden, weight=weight)
    return logits.detach(), sorted(gpt.state_dict()), sorted(inner.sharded_state_dict())


def compare_without_labels(arguments):
    (fused, *fused_names), (stock, *stock_names) = both_models(arguments, logits_and_names)
    return torch.equal(fused, stock), fused_names == stock_names


@pytest.mark.parametrize("tied", [False, True])
def test_without_labels_it_is_megatrons_layer(run_ranks, tmp_path, tied):
    arguments = tiny_arguments(write_corpus(tmp_path, LENGTHS), **(TIED if tied else {}))
    assert run_ranks(1, compare_without_labels, arguments)[0] == (True, True)


def refused(arguments):
    """What building the model says of an option of its output, or if another layer is there."""
    parallel.initialise(arguments)
    words = []
    config = building.transformer_config(arguments)
    config.defer_embedding_wgrad_compute = True
    with mock.patch.object(building, "transformer_config", lambda _: config):
        words.append(_error_of(lambda: building.build_gpt(arguments, VOCABULARY)))
    words.append(_error_of(lambda: fused_loss.FusedLossOutputLayer.like(torch.nn.Linear(2, 2))))
    return words


def _error_of(function):
    with pytest.raises(ValueError) as raised:
        function()
    return str(raised.value)


def test_what_it_does_not_know_is_refused(run_ranks, tmp_path):
    prefix = write_corpus(tmp_path, LENGTHS)
    first, second = run_ranks(1, refused, tiny_arguments(prefix))[0]
    assert (
        "does not support defer_embedding_wgrad_compute = True" in first
        and "--no-hdp-fused-loss" in first
    )
    assert "ColumnParallelLinear without bias" in second and "Linear(in_features=2" in second
