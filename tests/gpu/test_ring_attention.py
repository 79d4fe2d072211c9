"""Every attention backend against float64 in bfloat16: alone, and in rings on one GPU.

The bodies also run on a CPU. Rings on a GPU are several ranks that share it: over NCCL where it can
be made to accept them, and over host memory.
"""

import pytest
import torch
import torch.distributed as dist

from megatron_hdp.runtime.attention import select_attention
from megatron_hdp.runtime.ring_comm import RingComm
from scripts.gpu.several_ranks import new_group_of_all
from tests import ranks
from tests.gpu.staged_comm import StagedComm
from tests.ring_cases import errors_of_part

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


def require(device, name, dtype=torch.bfloat16):
    """Skips the test where the backend cannot be had here."""
    try:
        select_attention(torch.device(device), dtype, HEAD_DIM, name)
    except ValueError as error:
        pytest.skip(f"{name} is not to be had here: {error}")


def errors_of_cases(transport, device, name, cases, dtype=torch.bfloat16):
    """Body of a rank: relative errors of (out, dq, dk, dv) of every case; bytes that were sent."""
    if transport == "staged":
        if device == "cuda":
            torch.cuda.set_device(0)
        comm = StagedComm(dist.group.WORLD)
    else:
        comm = RingComm(new_group_of_all(device))
    attend = select_attention(torch.device(device), dtype, HEAD_DIM, name, comm).backend
    errors = [
        errors_of_part(attend, comm, *case, dtype=dtype, device=device, head_dim=HEAD_DIM)
        for case in cases
    ]
    return errors, comm.bytes_sent


def check(results):
    for rank, (errors, _) in enumerate(results):
        for case, of_case in zip(CASES, errors, strict=True):
            in_ring = rank in case[0]
            assert max(of_case) < TOLERANCE, f"rank {rank}, {case}: out, dq, dk, dv {of_case}"
            assert min(of_case) > 1e-5 or not in_ring, f"not computed in bfloat16: {of_case}"


@pytest.mark.parametrize(("device", "name"), BACKENDS)
def test_whole_sequences(run_ranks, device, name):
    require(device, name)
    ((errors, _),) = run_ranks(1, errors_of_cases, "native", device, name, CASES[:1])
    assert 1e-5 < max(errors[0]) < TOLERANCE, errors


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_gpu)])
def test_float64_is_exact(run_ranks, device):
    ((errors, _),) = run_ranks(
        1, errors_of_cases, "native", device, "torch", CASES[:1], torch.float64
    )
    assert max(errors[0]) < 1e-12, errors


@pytest.fixture(scope="module")
def nccl_refusal():
    """Why NCCL does not accept two ranks on one GPU; None where it does."""
    try:
        ranks.run_ranks(2, try_nccl, timeout_s=90)
    except ranks.RankError as error:
        return str(error).strip().splitlines()[-1]
    return None


def try_nccl():
    comm = RingComm(new_group_of_all("cuda"))
    comm.pass_on(torch.zeros(8, device="cuda"), (0, 1), dist.get_rank()).wait()
    torch.cuda.synchronize()


@pytest.mark.parametrize("transport", ["native", "staged"])
def test_rings_on_a_cpu(run_ranks, transport):
    check(run_ranks(4, errors_of_cases, transport, "cpu", "torch", CASES))


@on_gpu
@pytest.mark.parametrize(("device", "name"), BACKENDS[1:])
def test_rings_over_nccl(run_ranks, nccl_refusal, device, name):
    require(device, name)
    if nccl_refusal is not None:
        pytest.skip(f"NCCL does not accept several ranks on one GPU: {nccl_refusal}")
    check(run_ranks(4, errors_of_cases, "native", device, name, CASES, timeout_s=180))


@on_gpu
@pytest.mark.parametrize(("device", "name"), BACKENDS[1:])
def test_rings_over_host_memory(run_ranks, device, name):
    require(device, name)
    check(run_ranks(4, errors_of_cases, "staged", device, name, CASES, timeout_s=180))
