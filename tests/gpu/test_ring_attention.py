"""Every attention backend against float64 in bfloat16: alone, and in rings on one GPU.

The bodies also run on a CPU. Rings on a GPU are several ranks that share it: over NCCL where it can
be made to accept them, and over host memory.
"""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_hdp.runtime.attention.backend import RunShapes
from megatron_hdp.runtime.attention.selection import select_attention
from megatron_hdp.runtime.kernels import Block
from megatron_hdp.runtime.ring.comm import RingComm
from megatron_hdp.runtime.ring.layout import TokenLayout
from scripts.gpu import several_ranks
from tests.support import ranks
from tests.support.ring_cases import errors_of_part

HEAD_DIM = 64
TOLERANCE = 2e-2  # bfloat16 keeps 8 bits; TransformerEngine merges the blocks of a ring in it
CASES = [  # ring, tokens of a chunk of each ring sequence, tokens of local sequences
    ((0,), [], [300, 64, 1]),
    ((1, 0), [64, 100], []),
    ((2, 0, 1), [96, 8], [200, 33]),
    ((0, 2, 3, 1), [128, 16], [65]),
    ((3, 1, 2), [40], []),  # ranks of the ring before
]
on_gpu = pytest.mark.gpu
BACKENDS = [
    pytest.param("cpu", "torch", id="cpu"),
    *(
        pytest.param("cuda", name, id=name, marks=on_gpu)
        for name in ("transformer-engine", "flash-attn", "torch")
    ),
]


class StagedTransfer:
    """Copies to the device what arrived on the host."""

    works = ()  # it is waited for at once where more than so many bytes are under way

    def __init__(self, on_host, received):
        self.on_host, self.received = on_host, received

    def wait(self, is_idle=True):
        if self.on_host is not None:
            self.received.copy_(self.on_host.wait())
        self.on_host = None
        return self.received


class StagedComm(RingComm):
    """A `RingComm` over a gloo group for tensors of any device."""

    def trade(self, sent, to, received, of):
        room = torch.empty(received.shape, dtype=received.dtype)
        on_host = super().trade(sent.detach().cpu().contiguous(), to, room, of)
        return StagedTransfer(on_host, received)


def require(device, name, dtype=torch.bfloat16):
    """Skips the test where the backend cannot be had here."""
    try:
        select_attention(RunShapes(torch.device(device), dtype, HEAD_DIM), name)
    except ValueError as error:
        pytest.skip(f"{name} is not installed here: {error}")


def errors_of_cases(transport, device, name, cases, dtype=torch.bfloat16, **kind):
    """Body of a rank: relative errors of (out, dq, dk, dv) of every case; kind: window and sink."""
    if transport == "staged":
        if device == "cuda":
            torch.cuda.set_device(0)
        comm = StagedComm(dist.group.WORLD)
    else:
        comm = RingComm(several_ranks.new_group_of_all(device))
    windows = (kind["window"],) if kind else ()
    shapes = RunShapes(
        *(torch.device(device), dtype, HEAD_DIM),
        num_ranks=dist.get_world_size(),
        windows=windows,
        sink=bool(kind),
    )
    attend = select_attention(shapes, name, comm).backend
    how = {"dtype": dtype, "device": device, "head_dim": HEAD_DIM} | kind
    return [errors_of_part(attend, comm, *case, **how) for case in cases]


def errors_of_whole_sequences(device, name, dtype):
    attend = select_attention(RunShapes(torch.device(device), dtype, HEAD_DIM), name).backend
    how = {"dtype": dtype, "device": device, "head_dim": HEAD_DIM}
    return errors_of_part(attend, None, *CASES[0], **how)


def run_on(device, num_ranks, *call):
    """Runs a body on ranks: forked ones of a CPU, or new processes that share a GPU."""
    if device == "cpu":
        return ranks.run_ranks(num_ranks, *call)
    return several_ranks.run(num_ranks, *call, timeout_s=240)


def check(results):
    for rank, errors in enumerate(results):
        for case, of_case in zip(CASES, errors, strict=True):
            in_ring = rank in case[0]
            assert max(of_case) < TOLERANCE, f"rank {rank}, {case}: out, dq, dk, dv {of_case}"
            assert min(of_case) > 1e-5 or not in_ring, f"not computed in bfloat16: {of_case}"


@pytest.mark.parametrize(("device", "name"), BACKENDS)
def test_whole_sequences(device, name):
    require(device, name)
    errors = errors_of_whole_sequences(device, name, torch.bfloat16)
    assert min(errors) > 1e-5 and max(errors) < TOLERANCE, errors


@pytest.mark.parametrize(("device", "name"), BACKENDS)
def test_a_single_token(device, name):
    """What a rank runs for which the plan has nothing: it sees itself only."""
    require(device, name)
    device = torch.device(device)
    q, k, v, dout = (
        torch.randn(1, heads, HEAD_DIM).to(device, torch.bfloat16).requires_grad_()
        for heads in (4, 2, 2, 4)
    )
    attend = select_attention(RunShapes(device, q.dtype, HEAD_DIM), name).backend
    out = attend(q, k, v, TokenLayout((0,), 0, (), (1,), device), None, 0.3)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
    assert torch.allclose(out.float(), v.float().repeat_interleave(2, dim=1), rtol=1e-2, atol=1e-2)
    assert max(dq.abs().max(), dk.abs().max()) < 0.1
    expected = dout.float().unflatten(1, (2, 2)).sum(2)
    assert torch.allclose(dv.float(), expected, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_gpu)])
def test_float64_is_exact(device):
    errors = errors_of_whole_sequences(device, "torch", torch.float64)
    assert max(errors) < 1e-12, errors


@pytest.fixture(scope="module")
def nccl_refusal():
    """Why NCCL does not accept two ranks on one GPU; None where it does."""
    try:
        several_ranks.run(2, try_nccl, timeout_s=60)
    except RuntimeError as error:
        return str(error).strip().splitlines()[-1]
    return None


def try_nccl():
    comm = RingComm(several_ranks.new_group_of_all("cuda"))
    comm.pass_on(torch.zeros(8, device="cuda"), (0, 1), dist.get_rank()).wait()
    torch.cuda.synchronize()


@pytest.mark.parametrize(
    ("transport", "device", "name"),
    [
        *(  # rings of a CPU: tests/runtime/ring
            pytest.param(one, "cpu", "torch", id=f"cpu-{one}", marks=pytest.mark.slow)
            for one in ("native", "staged")
        ),
        *(
            pytest.param(transport, *one.values, id=f"{one.id}-{transport}", marks=on_gpu)
            for transport in ("native", "staged")
            for one in BACKENDS[1:]
        ),
    ],
)
def test_rings(request, transport, device, name):
    """Over gloo or NCCL, and over host memory."""
    require(device, name)
    refusal = None
    if device == "cuda" and transport == "native":
        refusal = request.getfixturevalue("nccl_refusal")
    if refusal is not None:
        pytest.skip(f"NCCL does not accept several ranks on one GPU: {refusal}")
    check(run_on(device, 4, errors_of_cases, transport, device, name, CASES))


def errors_with_a_fault(*call):
    def tails_see_heads_only(layout, queries, keys):
        segments = layout.half_segments
        return layout.tails, layout.heads, Block(segments, segments, causal=False)

    with mock.patch("megatron_hdp.runtime.ring.dense.block_at", tails_see_heads_only):
        return errors_of_cases(*call)


@pytest.mark.slow
def test_a_planted_fault_fails_the_check():
    with pytest.raises(AssertionError, match="out, dq, dk, dv"):
        check(run_on("cpu", 4, errors_with_a_fault, "native", "cpu", "torch", CASES))


def errors_in_windows(*call):
    """Body of a rank: within a chunk, and over several."""
    errors = [errors_of_cases(*call, window=window, has_sink=True) for window in (24, 150)]
    return [max(map(max, of_window)) for of_window in errors]


@pytest.mark.parametrize(
    ("device", "name"),
    [
        pytest.param("cpu", "torch", id="cpu", marks=pytest.mark.slow),  # tests/runtime/ring too
        *(one for one in BACKENDS[1:] if one.values[1] != "transformer-engine"),
    ],
)
def test_windows_and_sinks(device, name):
    """In rings over host memory, and alone."""
    require(device, name)
    for errors in run_on(device, 4, errors_in_windows, "staged", device, name, CASES):
        assert max(errors) < TOLERANCE


def fail_or_wait(failing):
    if dist.get_rank() == failing:
        raise ValueError("a planted fault")
    dist.barrier()


@pytest.mark.slow
def test_a_failure_of_new_processes_is_reported_at_once_with_its_rank():
    with pytest.raises(RuntimeError, match=r"(?s)rank 1 failed: .*a planted fault"):
        several_ranks.run(2, fail_or_wait, 1, timeout_s=120)
