"""Ring attention alone against full attention in float64, forward and backward."""

from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_hdp.runtime.kernels.block import CpuFlashKernel
from megatron_hdp.runtime.kernels.matmul import MatmulKernel
from megatron_hdp.runtime.kernels.padded import PaddedKernel
from megatron_hdp.runtime.ring import attention
from megatron_hdp.runtime.ring.attention import RingAttention
from megatron_hdp.runtime.ring.layout import TokenLayout
from tests.support.ring_cases import KV_HEADS, errors_of_part, gloo_comm

HEAD_DIM = 8


def attend_on_one_rank(
    ring, chunks, local_lengths, dtype=torch.float64, kernel=None, ranks_per_node=0, **how
):
    """Largest relative error of (out, dq, dk, dv) over this rank's tokens; (error, bytes sent)."""
    comm = gloo_comm(ranks_per_node=ranks_per_node)
    attend = RingAttention(kernel or CpuFlashKernel())
    errors = errors_of_part(
        attend, comm, ring, chunks, local_lengths, dtype, head_dim=HEAD_DIM, **how
    )
    return max(errors), comm.bytes_sent


@pytest.mark.smoke
@pytest.mark.parametrize(
    "degree, ranks_per_node", [(1, 0), (2, 0), (3, 0), (4, 0), (4, 2), (5, 0), (6, 2), (6, 3)]
)
def test_ring_equals_full_attention(run_ranks, degree, ranks_per_node):
    """With ranks per node it is double."""
    ring = list(range(degree))[::-1]  # ring order is not rank order
    how = {"chunks": [5, 1, 8], "local_lengths": [7, 1], "ranks_per_node": ranks_per_node}
    results = run_ranks(degree, attend_on_one_rank, ring, **how)
    assert max(error for error, _ in results) < 1e-13
    if degree > 1:
        kv_row_bytes = 2 * KV_HEADS * HEAD_DIM * 8
        expected = 3 * (degree - 1) * sum((10, 2, 16)) * kv_row_bytes
        assert [sent for _, sent in results] == [expected] * degree


def test_one_ring_sequence_and_a_rank_outside_the_ring(run_ranks):
    results = run_ranks(4, attend_on_one_rank, [3, 0, 2], chunks=[9], local_lengths=[])
    assert max(error for error, _ in results) < 1e-13


def attend_with_spoilt_buffers(ring, window):
    """Between forward and backward other micro-batches run, as in a pipeline, in these buffers."""
    comm, kernel = gloo_comm(), RingAttention(CpuFlashKernel())

    def attend(*args, **how):
        out = kernel(*args, **how)
        assert comm._buffers
        for buffer in comm._buffers.values():
            buffer.fill_(255)  # not a number
        return out

    return max(errors_of_part(attend, comm, ring, [5, 1, 8], [7], window=window))


@pytest.mark.parametrize("window", [None, 9])
def test_nothing_stays_in_a_buffer_between_forward_and_backward(run_ranks, window):
    assert max(run_ranks(3, attend_with_spoilt_buffers, [2, 0, 1], window)) < 1e-13


WINDOWS = [1, 2, 5, 9, 33, 1000]  # of chunks of 5, 1 and 8: within one, over many, over all


def attend_in_windows(ring, chunks, local_lengths, windows, has_sink):
    """Body of a rank: (error, bytes sent) for each of the windows."""
    comm, attend = gloo_comm(), RingAttention(CpuFlashKernel())
    how = {"head_dim": HEAD_DIM, "has_sink": has_sink}
    found = []
    for window in windows:
        comm.bytes_sent = 0
        errors = errors_of_part(attend, comm, ring, chunks, local_lengths, window=window, **how)
        found.append((max(errors), comm.bytes_sent))
    return found


def halo_bytes(index, degree, chunks, window):
    """Keys and values before both neighbours' chunks, twice, and gradients of those before ours."""
    head, tail, tokens = index, 2 * degree - 1 - index, 0
    for chunk in chunks:

        def before(place, chunk=chunk):
            return min(window - 1, place * chunk)

        if index + 1 < degree:
            tokens += 2 * before(head + 1) + before(tail)
        if index > 0:
            tokens += 2 * before(tail + 1) + before(head)
    return tokens * 2 * KV_HEADS * HEAD_DIM * 8


@pytest.mark.parametrize("degree", [1, 2, 3, 5])
def test_windows_equal_full_attention_in_them(run_ranks, degree):
    ring, chunks, has_sink = list(range(degree))[::-1], [5, 1, 8], degree % 2 == 1
    windows = WINDOWS if has_sink else WINDOWS[1:]  # one key alone has no gradient
    results = run_ranks(degree, attend_in_windows, ring, chunks, [7, 1, 40], windows, has_sink)
    for rank, found in enumerate(results):
        assert max(error for error, _ in found) < 1e-13, (rank, found)
        index = ring.index(rank)
        for window, (_, sent) in zip(windows, found, strict=True):
            if degree == 1:
                assert sent == 0
            elif window < 2 * degree * max(chunks):
                assert sent == halo_bytes(index, degree, chunks, window)


@pytest.mark.parametrize(
    "how", [{"has_sink": True}, {"kernel": MatmulKernel()}], ids=["sink", "plain kernel"]
)
@pytest.mark.parametrize("degree", [1, 2, 3])
def test_with_a_sink_and_by_the_plain_kernel(run_ranks, degree, how):
    ring = list(range(degree))
    results = run_ranks(degree, attend_on_one_rank, ring, [5, 1, 8], [7, 1], **how)
    assert max(error for error, _ in results) < 1e-13


def attend_with_half_the_gradient_of_the_sink():
    right = attention.gradient_of_sink
    with mock.patch.object(attention, "gradient_of_sink", lambda *how: right(*how) / 2):
        return attend_on_one_rank([0], [], [7, 3], has_sink=True)


def test_a_wrong_gradient_of_the_sink_is_seen(run_ranks):
    ((error, _),) = run_ranks(1, attend_with_half_the_gradient_of_the_sink)
    assert error == pytest.approx(0.5)


@pytest.mark.parametrize("has_sink", [False, True])
def test_bfloat16_stays_near_float64(run_ranks, has_sink):
    how = {"dtype": torch.bfloat16, "has_sink": has_sink}
    results = run_ranks(3, attend_on_one_rank, [0, 1, 2], [16], [9], **how)
    assert 1e-4 < max(error for error, _ in results) < 2e-2


@pytest.mark.parametrize("value_dim", [5, 11])
def test_values_of_another_size_travel_as_they_are(run_ranks, value_dim):
    how = {"kernel": PaddedKernel(CpuFlashKernel()), "value_dim": value_dim}
    for error, sent in run_ranks(2, attend_on_one_rank, [1, 0], [5, 1, 8], [7, 1], **how):
        assert error < 1e-13
        assert sent == 3 * sum((10, 2, 16)) * KV_HEADS * (HEAD_DIM + value_dim) * 8


class KernelThatForgetsTheMergedLse(CpuFlashKernel):
    """A planted fault: each block's backward uses its own log-sum-exp."""

    def backward(self, dout, of, *how):
        out, lse = self.forward(*of[:3], *how)
        return super().backward(dout, of._replace(out=out, lse=lse), *how)


def test_a_planted_fault_is_seen(run_ranks):
    kernel = KernelThatForgetsTheMergedLse()
    results = run_ranks(2, attend_on_one_rank, [0, 1], [4], [], kernel=kernel)
    assert max(error for error, _ in results) > 1e-3


def test_layout_refuses_odd_slices_and_rings_of_one():
    with pytest.raises(ValueError, match="each must be even"):
        TokenLayout((0, 1), 0, (3,), ())
    with pytest.raises(ValueError, match="ring of 1 rank"):
        TokenLayout((0,), 0, (4,), ())


def test_tokens_must_match_the_layout():
    layout = TokenLayout((0,), 0, (), (4,))
    x = torch.zeros(3, 1, 8)
    with pytest.raises(ValueError, match="3 tokens were given, the layout has 4"):
        RingAttention(CpuFlashKernel())(x, x, x, layout, None, 1.0)


SLICES = (4, 2, 6)


class Operations(TorchDispatchMode):
    """Names of operations, in order: of the host, and those that a device is given."""

    def __init__(self):
        super().__init__()
        self.on_host, self.on_device = [], []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        is_device = isinstance(result, torch.Tensor) and result.device.type == "meta"
        if not function.is_view:
            (self.on_device if is_device else self.on_host).append(function.__name__)
        return result


def layout(device="cpu", slices=SLICES):
    return TokenLayout((0, 1), 0, slices, (7, 3), torch.device(device))


def test_what_is_launched_for_a_layout():
    """Nothing until it is read; offsets are sent in one copy each, heads and tails in one."""
    with Operations() as operations:
        made = layout("meta", SLICES * 50)
        assert not operations.on_host and not operations.on_device
        assert made.whole_segments.longest == 12 and made.local_segments.longest == 7
    assert operations.on_device == ["_to_copy.default"] * 2
    with Operations() as operations:
        assert made.heads.shape == made.tails.shape == (300,)
    assert operations.on_device == ["_to_copy.default"] and len(operations.on_host) <= 3


def test_heads_and_tails_are_the_halves_of_each_slice():
    made = layout()
    assert made.heads.tolist() == [0, 1, 4, 6, 7, 8]
    assert made.tails.tolist() == [2, 3, 5, 9, 10, 11]
    assert (layout(slices=(8,)).heads, layout(slices=(8,)).tails) == (slice(0, 4), slice(4, 8))
