"""Which attention is chosen, with packages and a GPU that are faked."""

import sys
import types

import pytest
import torch
import torch.distributed as dist

from megatron_hdp.runtime.attention import selection as attention
from megatron_hdp.runtime.attention.selection import select_attention, try_out
from megatron_hdp.runtime.attention.transformer_engine import TransformerEngineAttention
from megatron_hdp.runtime.kernels.block import CpuFlashKernel
from megatron_hdp.runtime.kernels.segments import bucket
from megatron_hdp.runtime.ring.attention import RingAttention
from megatron_hdp.runtime.ring.layout import TokenLayout
from megatron_hdp.runtime.timeline import RING_WAIT
from tests.support.ring_cases import errors_of_part, gloo_comm

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


class Named:
    def __init__(self, name):
        self.name = name


class Loaders:
    """Fakes what loads; `missing` says which does not, and how."""

    def __init__(self, monkeypatch, **missing):
        self.tried = []
        for name in attention._LOADERS:
            error = missing.get(name.replace("-", "_"))
            monkeypatch.setitem(attention._LOADERS, name, self.loader(name, error))
        monkeypatch.setattr(attention, "try_out", lambda backend, *how: self.tried.append(backend))

    def loader(self, name, error):
        def load(device, dtype, head_dim, comm):
            if error is not None:
                raise error
            return Named(name)

        return load


def test_the_first_that_loads_is_taken(monkeypatch):
    loaders = Loaders(monkeypatch)
    selection = select_attention(GPU, torch.bfloat16, 128)
    assert str(selection) == "transformer-engine" and selection.refused == {}
    assert loaders.tried == [selection.backend]


def test_what_is_refused_is_said_with_its_reason(monkeypatch):
    Loaders(
        monkeypatch,
        transformer_engine=OSError("libcublas.so.13: cannot open shared\nobject file"),
        flash_attn=ModuleNotFoundError("No module named 'flash_attn'"),
    )
    assert str(select_attention(GPU, torch.bfloat16, 128)) == (
        "torch; not transformer-engine: OSError: libcublas.so.13: cannot open shared object file"
        "; not flash-attn: ModuleNotFoundError: No module named 'flash_attn'"
    )


def test_a_choice_that_cannot_be_had_is_an_error(monkeypatch):
    Loaders(monkeypatch, flash_attn=ImportError("undefined symbol: _ZN3c10"))
    assert select_attention(GPU, torch.bfloat16, 128, "torch").backend.name == "torch"
    with pytest.raises(ValueError) as error:
        select_attention(GPU, torch.bfloat16, 128, "flash-attn")
    for expected in (
        "no attention for bfloat16 on device 'cuda:0' with head dimension 128",
        "--hdp-attention flash-attn",
        "flash-attn: ImportError: undefined symbol: _ZN3c10",
        "install or repair it, or choose --hdp-attention auto",
    ):
        assert expected in str(error.value)


def test_where_nothing_serves_every_reason_is_given():
    with pytest.raises(ValueError) as error:
        select_attention(torch.device("meta"), torch.bfloat16, 128)
    for name in attention._LOADERS:
        assert f"{name}: found device 'meta'; it needs an NVIDIA GPU" in str(error.value)


def test_an_error_of_ours_is_not_taken_for_a_missing_package(monkeypatch):
    Loaders(monkeypatch, transformer_engine=TypeError("a defect"))
    with pytest.raises(TypeError, match="a defect"):
        select_attention(GPU, torch.bfloat16, 128)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_cpu_uses_the_kernel_of_torch(dtype):
    state = torch.get_rng_state()
    selection = select_attention(CPU, dtype, 16)
    assert selection.backend.name == "torch-sdpa-cpu"
    assert list(selection.refused) == ["transformer-engine", "flash-attn"]
    assert torch.equal(torch.get_rng_state(), state)  # trying it out draws none of the run's


@pytest.mark.parametrize(
    ("dtype", "head_dim", "name"),
    [
        (torch.bfloat16, 128, "torch-flash"),
        (torch.float16, 256, "torch-flash"),
        (torch.bfloat16, 60, "torch-matmul (exact, slow)"),
        (torch.float32, 128, "torch-matmul (exact, slow)"),
        (torch.float64, 128, "torch-matmul (exact, slow)"),
    ],
)
def test_torch_on_a_gpu_takes_flash_kernels_where_they_fit(monkeypatch, dtype, head_dim, name):
    monkeypatch.setattr(attention, "try_out", lambda *how: None)
    assert select_attention(GPU, dtype, head_dim, "torch").backend.name == name


@pytest.mark.parametrize("name", ["transformer-engine", "flash-attn"])
def test_a_dtype_is_refused_before_anything_is_loaded(name):
    with pytest.raises(ValueError, match=rf"{name}: found (torch\.)?float32; "):
        select_attention(GPU, torch.float32, 128, name)


class HalfTheGradient(CpuFlashKernel):
    """A planted fault of a kernel."""

    def backward(self, *arguments):
        dq, dk, dv = super().backward(*arguments)
        return dq, dk / 2, dv


def test_a_kernel_that_computes_wrongly_is_not_taken():
    try_out(RingAttention(CpuFlashKernel()), CPU, torch.bfloat16, 16)
    with pytest.raises(RuntimeError, match=r"computes dk with relative error 0\.5"):
        try_out(RingAttention(HalfTheGradient()), CPU, torch.bfloat16, 16)


class WrongWithEmptySegments(RingAttention):
    """A planted fault of a library that is given more segments than there are sequences."""

    def __call__(self, q, k, v, layout, comm, scale):
        out = super().__call__(q, k, v, layout, comm, scale)
        has_empty = bool((layout.local_segments.bucketed_offsets.diff() == 0).any())
        return out * float("nan") if has_empty else out


def test_the_trial_has_empty_segments():
    with pytest.raises(RuntimeError, match="computes out with relative error nan"):
        try_out(WrongWithEmptySegments(CpuFlashKernel()), CPU, torch.float64, 16)


class FakeDotProductAttention(torch.nn.Module):
    """TransformerEngine's module by its interface, over our own ring on the CPU.

    Its ring uses the group that it is given as TransformerEngine does: it sends and receives by
    the functions of torch.distributed.
    """

    made = 0

    def __init__(self, num_heads, head_dim, num_gqa_groups, **how):
        super().__init__()
        type(self).made += 1
        assert how.pop("qkv_format") == "thd" and how.pop("attn_mask_type") == "padding_causal"
        assert how.pop("attention_dropout") == 0.0
        self.shapes = (num_heads, num_gqa_groups, head_dim)
        self.scale = how.pop("softmax_scale")
        assert not how
        self.group = self.members = None
        self.deterministic = torch.are_deterministic_algorithms_enabled()

    def set_context_parallel_group(self, group, members, stream, kind):
        assert isinstance(group, dist.ProcessGroup) and kind == "p2p" and stream == "a stream"
        self.group, self.members = group, members

    def forward(self, q, k, v, *, cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv, **how):
        assert (q.shape[1], k.shape[1], q.shape[2]) == self.shapes
        assert not any(x.storage_offset() and x.is_contiguous() for x in (q, k, v))
        assert cu_seqlens_q is cu_seqlens_kv and cu_seqlens_q.dtype == torch.int32
        assert not how.pop("pad_between_seqs")
        counts = tuple(cu_seqlens_q.diff().tolist())
        lengths = tuple(n for n in counts if n)
        assert counts[: len(lengths)] == lengths
        assert len(counts) == (len(lengths) if self.deterministic else bucket(len(lengths)))
        assert max_seqlen_q == max_seqlen_kv >= max(lengths) and max_seqlen_q % 64 == 0
        kernel = RingAttention(CpuFlashKernel())
        if self.group is None:
            assert not how
            layout = TokenLayout((0,), 0, (), lengths)
            return kernel(q, k, v, layout, None, self.scale).flatten(1)
        assert how.pop("cu_seqlens_q_padded") is how.pop("cu_seqlens_kv_padded") is cu_seqlens_q
        assert not how
        size, place = dist.get_world_size(self.group), dist.get_rank(self.group)
        assert all(n % (2 * size) == 0 for n in lengths)
        layout = TokenLayout(tuple(range(size)), place, tuple(n // size for n in lengths), ())
        comm = OverGroup(self.group, self.members)
        return kernel(q, k, v, layout, comm, self.scale).flatten(1)


class OverGroup:
    """Passes tensors on by isend and irecv over a group, with job's ranks."""

    def __init__(self, group, members):
        self.group, self.members = group, members

    def pass_on(self, tensor, ring, index, into):
        received = into
        following, previous = self.members[(index + 1) % len(ring)], self.members[index - 1]
        works = [
            dist.isend(tensor, following, self.group),
            dist.irecv(received, previous, self.group),
        ]

        class Both:
            def wait(self):
                for work in works:
                    work.wait()
                return received

        return Both()


def fake_transformer_engine(version="2.20.2"):
    package = types.ModuleType("transformer_engine")
    package.__version__ = version
    package.pytorch = types.ModuleType("transformer_engine.pytorch")
    package.pytorch.DotProductAttention = FakeDotProductAttention
    sys.modules["transformer_engine"] = package
    sys.modules["transformer_engine.pytorch"] = package.pytorch
    torch.cuda.Stream = lambda device: "a stream"


def attend_by_transformer_engine(ring, chunks, local_lengths, num_layers):
    """Body of a rank: largest error, bytes sent, whether waiting was noted, modules made."""
    fake_transformer_engine()
    comm, attend = gloo_comm(), TransformerEngineAttention(CPU)
    assert attend.name == "transformer-engine 2.20.2"
    errors = [
        max(errors_of_part(attend, comm, ring, chunks, local_lengths)) for _ in range(num_layers)
    ]
    waited = comm.timeline.totals_s[RING_WAIT] > 0
    return max(errors), comm.bytes_sent, waited, FakeDotProductAttention.made


@pytest.mark.parametrize("ring", [(0,), (1, 0), (2, 0, 1)])
def test_transformer_engine_is_called_as_it_wants_to_be(run_ranks, ring):
    """Ring slices and local sequences, over a ring's light group; two modules for all layers."""
    degree = len(ring)
    results = run_ranks(degree, attend_by_transformer_engine, ring, [3, 1], [7], num_layers=2)
    assert max(error for error, *_ in results) < 1e-13
    kv_bytes = 2 * 2 * 8 * 8 * sum((6, 2))
    for _, sent, waited, made in results:
        assert sent == (2 * 3 * (degree - 1) * kv_bytes if degree > 1 else 0)
        assert waited == (degree > 1)
        assert made == (2 if degree > 1 else 1)


def deterministic_transformer_engine():
    fake_transformer_engine()
    torch.use_deterministic_algorithms(True)
    attend = TransformerEngineAttention(CPU)
    return max(errors_of_part(attend, None, (0,), [], [7, 3, 5]))


def test_deterministic_kernels_get_no_empty_segments(run_ranks):
    """Their memory grows with the number of segments, and TransformerEngine refuses too many."""
    assert run_ranks(1, deterministic_transformer_engine)[0] < 1e-13


def old_transformer_engine():
    fake_transformer_engine("2.9.0")
    with pytest.raises(ValueError, match=r"found TransformerEngine 2\.9\.0, expected 2\.20\.2"):
        TransformerEngineAttention(CPU)


def test_an_old_transformer_engine_is_refused(run_ranks):
    run_ranks(1, old_transformer_engine)
