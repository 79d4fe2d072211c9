"""Block kernels against each other and float64, those of GPUs by shapes; lengths of segments."""

import math
import sys
import types
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_hdp.planner import LLAMA_7B, chunk_tokens, plan
from megatron_hdp.runtime.kernels import matmul
from megatron_hdp.runtime.kernels.block import CpuFlashKernel
from megatron_hdp.runtime.kernels.flash import FlashAttnKernel, TorchFlashKernel, refusal
from megatron_hdp.runtime.kernels.matmul import MatmulKernel
from megatron_hdp.runtime.kernels.segments import Block, Forward, Segments, bucket, longest_class
from tests.support.ring_cases import relative_error

CPU = torch.device("cpu")
SCALE = 0.25
CASES = {  # queries, keys, causal, window
    "causal": ((5, 1, 40), (5, 1, 40), True, None),
    "rectangular": ((6, 3), (2, 9), False, None),
    "window": ((5, 1, 40), (5, 1, 40), True, 7),
    "halo": ((5, 90, 3), (9, 96, 3), True, 7),
    "alone": ((5, 3), (5, 4), True, 1),
}


def block(case, dtype=torch.float64):
    """Tensors of a block's forward, how it attends, and the gradient of its output."""
    q_lengths, k_lengths, causal, window = CASES[case]
    random = torch.Generator().manual_seed(1)
    tokens = [(sum(q_lengths), 4), (sum(k_lengths), 2), (sum(k_lengths), 2), (sum(q_lengths), 4)]
    q, k, v, dout = (
        torch.randn(*shape, 16, generator=random, dtype=torch.float64) for shape in tokens
    )
    segments = [Segments.of(lengths, CPU) for lengths in (q_lengths, k_lengths)]
    return [x.to(dtype) for x in (q, k, v)], Block(*segments, causal, window), dout.to(dtype)


def results_of(kernel, case, dtype=torch.float64):
    """(out, lse, dq, dk, dv) of a block."""
    inputs, how, dout = block(case, dtype)
    out, lse = kernel.forward(*inputs, how, SCALE)
    return [out, lse, *kernel.backward(dout, Forward(*inputs, out, lse), how, SCALE)]


def by_definition(case):
    """The same, segment by segment, with a mask of all queries and keys."""
    inputs, how, dout = block(case)
    inputs = [x.requires_grad_() for x in inputs]
    q, k, v = inputs[0], *(x.repeat_interleave(2, 1) for x in inputs[1:])
    by_query, by_key = how.q_segments.lengths, how.k_segments.lengths
    outs, lses = [], []
    for q_s, k_s, v_s in zip(q.split(by_query), k.split(by_key), v.split(by_key), strict=True):
        scores = torch.einsum("qhd,khd->hqk", q_s, k_s) * SCALE
        if how.causal:
            behind = torch.arange(len(k_s)) - torch.arange(len(q_s))[:, None]
            behind = behind - (len(k_s) - len(q_s))
            scores = scores.masked_fill(behind > 0, -torch.inf)
            if how.window is not None:
                scores = scores.masked_fill(behind <= -how.window, -torch.inf)
        outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v_s))
        lses.append(scores.logsumexp(-1).t())
    out = torch.cat(outs)
    found = [out, torch.cat(lses), *torch.autograd.grad(out, inputs, dout)]
    return [x.detach() for x in found]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kernel", [MatmulKernel(), CpuFlashKernel()], ids=lambda one: one.name)
def test_kernels_of_a_cpu_are_exact(kernel, case):
    for found, expected in zip(results_of(kernel, case), by_definition(case), strict=True):
        assert found.dtype == expected.dtype and found.shape == expected.shape
        assert (found - expected).norm() < 1e-13 * max(1, expected.norm())


def test_a_window_one_too_wide_is_seen():
    class Wide(MatmulKernel):
        def forward(self, q, k, v, block, scale):
            return super().forward(q, k, v, replace(block, window=block.window + 1), scale)

    errors = map(relative_error, results_of(Wide(), "window"), by_definition("window"))
    assert min(errors) > 1e-2


@pytest.mark.parametrize("window", [None, 8])
def test_work_with_a_window_grows_with_the_tokens(monkeypatch, window):
    """Scores of a long sequence: all pairs, or of each query a few windows."""
    seen, tokens = [], 4096
    chunks = matmul._chunks

    def count(*how):
        for rows, keys, scores in chunks(*how):
            seen.append(scores.numel())
            yield rows, keys, scores

    monkeypatch.setattr(matmul, "_chunks", count)
    x, segments = torch.zeros(tokens, 1, 2), Segments.of((tokens,), CPU)
    MatmulKernel().forward(x, x, x, Block(segments, segments, True, window), 1.0)
    assert sum(seen) >= tokens**2 / 2 if window is None else sum(seen) <= tokens * (64 + window)


@pytest.mark.parametrize("case", ["causal", "halo"])
def test_the_plain_kernel_in_chunks_gives_the_same(monkeypatch, case):
    whole = results_of(MatmulKernel(), case)
    monkeypatch.setattr(matmul, "_MAX_SCORES", 4 * 40 * 7)  # 7 queries at a time, of 40
    for found, expected in zip(results_of(MatmulKernel(), case), whole, strict=True):
        assert relative_error(found, expected) < 1e-14


def test_the_plain_kernel_computes_low_precision_in_float32():
    found, exact = (results_of(MatmulKernel(), "causal", d) for d in (torch.bfloat16, torch.double))
    assert found[0].dtype == torch.bfloat16 and found[1].dtype == torch.float32
    assert max(relative_error(f.double(), e) for f, e in zip(found, exact, strict=True)) < 1e-2


def fake(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device="cuda")


def fake_segments(lengths):
    offsets = fake(len(lengths) + 1, dtype=torch.int32)
    return Segments(lengths, offsets, offsets, max(lengths))


def test_torch_flash_kernel_by_shapes():
    """Strides as they come: v may be a view of fused projections."""
    kernel = TorchFlashKernel()
    with FakeTensorMode():
        q = fake(24, 4, 64)
        of_fused = torch.empty_strided((24, 2, 64), (2 * 192, 192, 1), dtype=q.dtype, device="cuda")
        for k, v, k_lengths, how in (
            (fake(24, 2, 64), of_fused, (16, 8), {"causal": False}),
            (fake(12, 2, 64), fake(12, 2, 64), (8, 4), {"causal": False}),
            (fake(24, 2, 64), of_fused, (16, 8), {"causal": True, "window": 5}),
        ):
            how = Block(fake_segments((16, 8)), fake_segments(k_lengths), **how)
            out, lse = kernel.forward(q, k, v, how, 0.1)
            assert out.shape == q.shape and out.dtype == q.dtype
            assert lse.shape == (24, 4) and lse.dtype == torch.float32
            assert lse.stride() == (1, 24)  # backward reads [heads, t] without a copy
            dq, dk, dv = kernel.backward(out, Forward(q, k, v, out, lse), how, 0.1)
            assert (dq.shape, dk.shape, dv.shape) == (q.shape, k.shape, v.shape)


class FakeFlashAttn(types.ModuleType):
    """The package flash-attn with its functions' signatures (2.7 to 2.8), over the CPU kernel."""

    def __init__(self, version):
        super().__init__("flash_attn")
        self.__version__ = version
        self.flash_attn_interface = self
        self.max_lengths = []

    def _flash_attn_varlen_forward(self, q, k, v, *lengths, dropout_p, softmax_scale, **how):
        assert dropout_p == 0.0
        self.max_lengths.append(lengths[2:])
        out, lse = CpuFlashKernel().forward(q, k, v, _block(*lengths, **how), softmax_scale)
        return out, lse.t().contiguous(), None, None

    def _flash_attn_varlen_backward(
        self, dout, q, k, v, out, softmax_lse, dq, dk, dv, *lengths, softmax_scale, **how
    ):
        assert softmax_lse.is_contiguous() and softmax_lse.shape == (q.shape[1], q.shape[0])
        rest = {name: how.pop(name) for name in ("dropout_p", "softcap", "alibi_slopes")}
        assert rest == {"dropout_p": 0.0, "softcap": 0.0, "alibi_slopes": None}
        assert how.pop("deterministic") == torch.are_deterministic_algorithms_enabled()
        of = Forward(q, k, v, out, softmax_lse.t())
        grads = CpuFlashKernel().backward(dout, of, _block(*lengths, **how), softmax_scale)
        for into, grad in zip((dq, dk, dv), grads, strict=True):
            into.copy_(grad)


def _block(q_offsets, k_offsets, _q, _k, *, causal, window_size_left=-1, window_size_right=-1):
    """Windows are keys before and behind a query's own; -1 is no limit."""
    sides = window_size_left, window_size_right
    assert sides == (-1, -1) or (sides[0] >= 0 and sides[1] == 0)
    lengths = [tuple(n for n in one.diff().tolist() if n) for one in (q_offsets, k_offsets)]
    window = None if sides[0] < 0 else sides[0] + 1
    return Block(*(Segments.of(one, CPU) for one in lengths), causal, window)  # none of empty ones


@pytest.fixture
def flash_attn(monkeypatch):
    def install(version):
        package = FakeFlashAttn(version)
        monkeypatch.setitem(sys.modules, "flash_attn", package)
        return package

    return install


@pytest.mark.parametrize("case", CASES)
def test_flash_attn_is_called_as_it_wants_to_be(flash_attn, case):
    package = flash_attn("2.8.3")
    kernel = FlashAttnKernel()
    assert kernel.name == "flash-attn 2.8.3"
    found = results_of(kernel, case)
    q_lengths, k_lengths, *_ = CASES[case]
    assert package.max_lengths == [(max(q_lengths), max(k_lengths))]
    for one, expected in zip(found, results_of(CpuFlashKernel(), case), strict=True):
        assert torch.equal(one, expected)


def test_an_old_flash_attn_is_refused(flash_attn):
    flash_attn("2.6.3")
    with pytest.raises(ValueError, match=r"found flash-attn 2\.6\.3, expected 2\.7 or newer"):
        FlashAttnKernel()


def test_what_flash_kernels_do_not_take():
    assert refusal(torch.bfloat16, 128) is None
    assert "found float32" in refusal(torch.float32, 128)
    assert "found head dimension 60" in refusal(torch.float16, 60)
    assert "found head dimension 264" in refusal(torch.float16, 264)


TOKENS_PER_RANK, SLICE_MULTIPLE = 8192, 8


def test_offsets_are_where_segments_begin_and_end():
    segments = Segments.of((3, 1, 5), CPU)
    assert segments.offsets.tolist() == [0, 3, 4, 9]
    assert segments.offsets.dtype == torch.int32
    assert segments.longest == 5
    assert Segments.of((), CPU).offsets.tolist() == [0]


def test_empty_segments_follow_in_the_same_tensor():
    segments = Segments.of((3, 1, 5), CPU)
    assert segments.bucketed_offsets.tolist() == [0, 3, 4, 9, 9, 9, 9, 9, 9]
    assert segments.bucketed_offsets.data_ptr() == segments.offsets.data_ptr()
    assert Segments.of((7,), CPU).bucketed_offsets.tolist() == [0, 7]
    assert Segments.of((), CPU).bucketed_offsets.tolist() == [0]


def test_buckets():
    assert [bucket(n) for n in (0, 1, 2, 8, 9, 16, 17, 300, 512)] == [
        *(0, 1, 8, 8, 16, 16, 32, 512, 512)
    ]


def tokens_in_plan(num_tokens):
    """What TransformerEngine builds a cuDNN plan for instead of the number of tokens."""
    if num_tokens > 32768:
        return -(-num_tokens // 32768) * 32768
    return max(1024, 1 << math.ceil(math.log2(num_tokens)))


def forward_plans(made, count, bound=lambda longest: 0):
    """What tells cuDNN's forward plans of TransformerEngine apart in one step's calls.

    From cuDNN 9.24 on: the mask, the number of sequences as it is, and rounded tokens of queries
    and of keys. They stand for the longest length as well in 2.20.0.dev0; the headers of 2.20.2
    leave open whether it counts besides. What is the same in a whole run (heads,
    head dimension, scale, data type) is left out. A ring calls it with all keys, and with half of
    the queries or of the keys.
    """
    found = set()
    for m in range(made.num_micro_batches):
        one = made.micro_batch(m)
        degree, wholes = len(one.ranks), dict(one.local)
        if degree == 1:
            wholes[one.ranks[0]] = (*wholes.get(one.ranks[0], ()), *one.sequences)
        elif one.sequences:
            held = 2 * padded_tokens(made, one.sequences, degree)
            number, whole, half = count(len(one.sequences)), *map(tokens_in_plan, (held, held // 2))
            longest = bound(max(int(made.lengths[i]) for i in one.sequences)) // degree
            found |= {
                ("causal", number, whole, whole, longest),
                ("all", number, whole, half, longest),
                ("all", number, half, whole, longest),
            }
        for sequences in filter(None, wholes.values()):
            tokens = tokens_in_plan(padded_tokens(made, sequences, 1))
            longest = bound(max(int(made.lengths[i]) for i in sequences))
            found.add(("causal", count(len(sequences)), tokens, tokens, longest))
    return found


def padded_tokens(made, sequences, degree):
    """Tokens of a chunk of each of them."""
    return sum(chunk_tokens(int(made.lengths[i]), degree, SLICE_MULTIPLE) for i in sequences)


def random_plans(number):
    """Plans of a long-tailed lot of lengths for 8 to 64 ranks; packs of 1 to several hundred."""
    random = np.random.default_rng(0)
    for _ in range(number):
        ranks, mean = int(random.choice([8, 16, 32, 64])), np.exp(random.uniform(2.5, 9))
        longest = min(ranks * TOKENS_PER_RANK // 2, 2**17)
        size = int(random.uniform(0.2, 3) * ranks * TOKENS_PER_RANK / mean / 3)
        drawn = random.lognormal(np.log(mean), random.uniform(0.5, 2), min(max(size, 1), 20_000))
        yield plan(
            drawn.clip(1, longest).astype(int).tolist(),
            ranks=ranks,
            tokens_per_rank=TOKENS_PER_RANK,
            slice_multiple=SLICE_MULTIPLE,
            cost_model=LLAMA_7B,
        )


@pytest.mark.slow
def test_few_plans_are_built_in_a_run():
    """Planted: the number of sequences as it is, and the longest length to a multiple of 64."""
    found, planted = set(), set()
    by_longest, planted_longest = set(), set()
    for number, made in enumerate(random_plans(1000)):
        found |= forward_plans(made, bucket)
        planted |= forward_plans(made, int)
        if number < 300:
            by_longest |= forward_plans(made, bucket, longest_class)
            planted_longest |= forward_plans(made, bucket, lambda longest: -(-longest // 64) * 64)
    assert max(number for _, number, *_ in planted) > 300
    assert len({key[:2] for key in found}) <= 12
    assert len(found) <= 40
    assert len({key[:2] for key in planted}) > 200 and len(planted) > 500
    assert len(by_longest) <= 250 and len(planted_longest) > 2000
