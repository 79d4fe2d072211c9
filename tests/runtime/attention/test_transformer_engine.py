"""How TransformerEngine is called, and which of its kernels it is let choose, with a fake of it."""

import logging
import os
import sys
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch.distributed import distributed_c10d

from megatron_hdp.runtime.attention.backend import RunShapes
from megatron_hdp.runtime.attention.transformer_engine import TransformerEngineAttention
from megatron_hdp.runtime.attention.trial import try_out, try_out_ring
from megatron_hdp.runtime.kernels.block import CpuFlashKernel
from megatron_hdp.runtime.ring.attention import RingAttention
from megatron_hdp.runtime.ring.layout import TokenLayout
from megatron_hdp.runtime.timeline import RING_WAIT
from tests.support import fake_transformer_engine as fake
from tests.support.ring_cases import errors_of_part, gloo_comm

CPU = torch.device("cpu")
SHORT = RunShapes(CPU, torch.float32, 8)


def attend_by_transformer_engine(ring, chunks, local_lengths, num_layers, value_dim=None):
    """Body of a rank: largest error, bytes sent, whether waiting was noted, modules made."""
    fake.install()
    comm, attend = gloo_comm(), TransformerEngineAttention(CPU)
    assert attend.name == "transformer-engine 2.20.2"
    errors = [
        max(errors_of_part(attend, comm, ring, chunks, local_lengths, value_dim=value_dim))
        for _ in range(num_layers)
    ]
    waited = comm.timeline.totals_s[RING_WAIT] > 0
    return max(errors), comm.bytes_sent, waited, fake.DotProductAttention.made, len(fake.chosen)


@pytest.mark.parametrize(
    ("ring", "value_dim"), [((0,), None), ((1, 0), None), ((2, 0, 1), None), ((1, 0), 5)]
)
def test_it_is_called_as_it_wants_to_be(run_ranks, ring, value_dim):
    """Ring slices and local sequences, over a ring's light group; two modules for all layers.

    Layers that alternate between both kinds of calls choose kernels once each.
    """
    degree = len(ring)
    results = run_ranks(degree, attend_by_transformer_engine, ring, [3, 1], [7], 5, value_dim)
    kv_bytes = 2 * (8 + (value_dim or 8)) * 8 * sum((6, 2))
    kinds = 2 if degree > 1 else 1
    for error, sent, waited, made, chosen in results:
        assert error < 1e-13
        assert sent == 5 * 3 * (degree - 1) * kv_bytes
        assert waited == (degree > 1)
        assert made == chosen == kinds


def deterministic_kernels_get_no_empty_segments():
    """Their memory grows with the number of segments, and TransformerEngine refuses too many."""
    torch.use_deterministic_algorithms(True)
    fake.install()
    assert max(errors_of_part(TransformerEngineAttention(CPU), None, (0,), [], [7, 3, 5])) < 1e-13


def one_token(load, *library):
    """Body of a rank: is one token right whose parts lie in one tensor, as in a model's layer?"""
    load(*library)
    attend, layout = TransformerEngineAttention(CPU), TokenLayout((0,), 0, (), (1,), CPU)
    heads, head_dim = 2, 16
    projected = torch.randn(1, 1, 1, (heads + 2) * head_dim).half().requires_grad_()
    q, k, v = projected.split([heads * head_dim, head_dim, head_dim], dim=3)
    q, k = q.reshape(1, 1, heads, head_dim) * 2, k.contiguous() * 2  # positions make new tensors
    out = attend(q.squeeze(1), k.squeeze(1), v.squeeze(1), layout, None, 1.0)
    out.sum().backward()
    of_v = projected.grad[..., -head_dim:]
    return torch.equal(out, v[0].expand(1, heads, head_dim)) and bool((of_v == heads).all())


def test_one_token_with_one_head_of_keys(run_ranks):
    assert run_ranks(1, one_token, fake.install) == [True]


def an_old_one_attends_to_whole_sequences():
    """And is asked for kernels by the parameters that it has."""
    fake.install("2.9.0")
    attend = TransformerEngineAttention(CPU)
    assert not attend.takes_rings
    assert max(errors_of_part(attend, None, (0,), [], [7, 2])) < 1e-13
    shapes = replace(SHORT, longest=2048, tokens_per_rank=4096)
    assert attend.check(shapes) == ("local by cuDNN",)
    assert "no rings by it, which before 2.20.2" in attend.check(replace(shapes, num_ranks=2))[1]
    assert fake.chosen[-1].max_seqlen_q == 2048
    ring = TokenLayout((0, 1), 0, (4,), ())
    with pytest.raises(AssertionError, match="with_float32_rings"):
        attend(*torch.zeros(3, 4, 1, 8), ring, None, 1.0)


def unfused_kernels_are_never_taken():
    """Whatever the variables say, which nobody sets: other threads may read them meanwhile."""
    fake.install()
    variables = {"NVTE_FLASH_ATTN": "0", "NVTE_FUSED_ATTN": "0", "NVTE_UNFUSED_ATTN": "1"}
    os.environ.update(variables)  # as megatron-core does when it makes a model
    attend = TransformerEngineAttention(CPU)
    with mock.patch("os.putenv") as put, mock.patch("os.unsetenv") as unset:
        why = "found no kernel .* cuDNN's: Disabling FusedAttention due to NVTE_FUSED_ATTN=0$"
        with pytest.raises(ValueError, match=why):
            try_out(attend, SHORT)
        assert not put.called and not unset.called
    assert fake.get_attention_backend(fake.chosen[-1])[4], "others may choose them"
    own = sys.modules["transformer_engine.pytorch.attention.dot_product_attention"]
    assert own.utils.get_attention_backend is fake.get_attention_backend
    logger = logging.getLogger("DotProductAttention")
    assert fake.AttentionLogging._log_level == logger.level == logging.WARNING
    assert not logger.filters
    del own.utils.AttentionLogging  # as another version may have it
    with pytest.raises(ValueError, match="NVTE_DEBUG_LEVEL=2 make it say why"):
        try_out(attend, SHORT)


def choices_of_others_are_neither_used_nor_changed():
    """With the same parameters."""
    fake.install()
    attend = TransformerEngineAttention(CPU)
    try_out(attend, SHORT)
    same = fake.chosen[-1]
    theirs = dict.fromkeys(fake._attention_backends, False) | {
        "attention_params": same,
        "use_unfused_attention": True,
    }
    fake._attention_backends.update(theirs)
    try_out(TransformerEngineAttention(CPU), SHORT)
    assert fake._attention_backends == theirs and len(fake.chosen) == 2


def one_with_another_memory_is_used_and_said():
    fake.install()
    from transformer_engine.pytorch.attention import dot_product_attention

    del dot_product_attention._attention_backends
    attend = TransformerEngineAttention(CPU)
    try_out(attend, SHORT)
    (note,) = attend.check(SHORT)
    assert note.startswith("it chooses kernels anew in every call: found NoneType as its memory")


def one_with_other_functions_is_used_and_said():
    fake.install()
    from transformer_engine.pytorch.attention import dot_product_attention

    known = iter([fake.get_attention_backend])  # as the library itself calls it
    dot_product_attention.utils.get_attention_backend = lambda *args: next(known, int)(*args)
    attend = TransformerEngineAttention(CPU)
    try_out(attend, SHORT)
    taken, note = attend.check(SHORT)
    assert taken == "local by cuDNN" and "not asked about the largest micro-batches" in note


BODIES = (
    deterministic_kernels_get_no_empty_segments,
    an_old_one_attends_to_whole_sequences,
    unfused_kernels_are_never_taken,
    choices_of_others_are_neither_used_nor_changed,
    one_with_another_memory_is_used_and_said,
    one_with_other_functions_is_used_and_said,
)


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_on_one_rank(run_ranks, body):
    run_ranks(1, body)


def checked(shapes, deterministic, with_flash_attn=False, variables=None):
    """Body of a rank: what is said of kernels, or why there is none."""
    fake.install()
    fake.flash_attn_is_installed = with_flash_attn
    os.environ.update(variables or {})
    torch.use_deterministic_algorithms(deterministic)
    attend, comm = TransformerEngineAttention(CPU), gloo_comm()
    try_out(attend, shapes)
    try_out_ring(attend, comm, shapes)
    groups = len(distributed_c10d._world.pg_names)
    try:
        return attend.check(shapes)
    except ValueError as error:
        return str(error)
    finally:
        assert len(distributed_c10d._world.pg_names) == groups - 1, "the trial's is still known"


ONE_GROUP = replace(SHORT, kv_heads=1)
LONG = replace(ONE_GROUP, longest=65_536, tokens_per_rank=8192, num_ranks=8)


def test_kernels_for_the_largest_micro_batches_are_asked_for(run_ranks):
    """Deterministic ones want too much memory, of which it would only speak in mid-step."""
    said = run_ranks(2, checked, LONG, False)
    assert said == [("local by cuDNN, ring by cuDNN",)] * 2
    for said in run_ranks(2, checked, LONG, True):
        assert said.startswith(
            "found no deterministic kernel of it for 2,732 sequences of up to 5,461 tokens with 4 "
            "heads, expected one for every micro-batch that a plan may hold"
        )
        assert said.endswith("install flash-attn or allow algorithms that are not deterministic")
    few = replace(LONG, longest=8192, tokens_per_rank=1024)
    for said in run_ranks(2, checked, few, True):
        assert "2,732 sequences of up to 5,461 tokens in a ring of 8 with 4 heads" in said
    roomy = replace(LONG, longest=256, num_ranks=2)  # a rank's capacity holds many of the longest
    assert run_ranks(2, checked, roomy, False) == [("local by cuDNN, ring by cuDNN",)] * 2
    small = replace(LONG, longest=256, tokens_per_rank=128, num_ranks=2)
    assert run_ranks(2, checked, small, True) == [("local by cuDNN, ring by cuDNN",)] * 2


def test_what_flash_attn_costs_in_rings_is_said(run_ranks):
    local, waits = run_ranks(2, checked, LONG, True, True, {"NVTE_FUSED_ATTN": "0"})[0]
    assert local == "local by flash-attn, ring by flash-attn"
    assert waits.startswith("each layer's backward waits three times for the GPU in every ring")


class HalfTheGradient(CpuFlashKernel):
    """A planted fault of a kernel, in blocks of a ring only."""

    def backward(self, dout, of, block, scale):
        dq, dk, dv = super().backward(dout, of, block, scale)
        return dq, dk if block.causal else dk / 2, dv


class Forgetful(CpuFlashKernel):
    """A planted fault: blocks of other members count for nothing."""

    def forward(self, q, k, v, block, scale):
        out, lse = super().forward(q, k, v, block, scale)
        return out, lse if block.causal else lse - 50


def tried_ring(kernel, wrong):
    """Body of a rank: what is wrong with a ring of its own; None is nothing."""
    comm, attend = gloo_comm(), RingAttention(kernel())
    shapes = replace(ONE_GROUP, dtype=torch.float64)
    if wrong is None:
        try_out_ring(attend, comm, shapes)
        return
    with pytest.raises(RuntimeError, match=rf"computes {wrong} with relative error .* ring of two"):
        try_out_ring(attend, comm, shapes)


@pytest.mark.parametrize(
    ("kernel", "wrong"), [(CpuFlashKernel, None), (HalfTheGradient, "dk"), (Forgetful, "out")]
)
def test_a_rank_tries_a_ring_by_itself(run_ranks, kernel, wrong):
    run_ranks(2, tried_ring, kernel, wrong)
