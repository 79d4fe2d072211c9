"""Which attention is chosen, with packages and a GPU that are faked."""

from dataclasses import replace

import pytest
import torch

from megatron_hdp.runtime.attention import selection as attention
from megatron_hdp.runtime.attention.backend import RunShapes
from megatron_hdp.runtime.attention.selection import select_attention, try_out
from megatron_hdp.runtime.kernels import CpuFlashKernel, PaddedKernel
from megatron_hdp.runtime.ring.attention import RingAttention

ON_CPU = RunShapes(torch.device("cpu"), torch.bfloat16, 16)
ON_GPU = RunShapes(torch.device("cuda", 0), torch.bfloat16, 128)


class Named:
    """A backend that says who attends, and to what."""

    def __init__(self, name):
        self.name = name

    def __call__(self, q, k, v, layout, comm, scale, *, window=None, sink=None):
        return self.name, window, sink


class Loaders:
    """Fakes what loads; `missing` says which does not, and how."""

    def __init__(self, monkeypatch, **missing):
        self.tried = []
        for name in attention._LOADERS:
            error = missing.get(name.replace("-", "_"))
            monkeypatch.setitem(attention._LOADERS, name, self.loader(name, error))
        monkeypatch.setattr(attention, "try_out", lambda backend, *how: self.tried.append(backend))

    def loader(self, name, error):
        def load(shapes, comm):
            if error is not None:
                raise error
            return Named(name)

        return load


def test_the_first_that_loads_is_taken(monkeypatch):
    loaders = Loaders(monkeypatch)
    selection = select_attention(ON_GPU)
    assert str(selection) == "transformer-engine" and selection.refused == {}
    assert loaders.tried == [selection.backend]


def test_what_is_refused_is_said_with_its_reason(monkeypatch):
    Loaders(
        monkeypatch,
        transformer_engine=OSError("libcublas.so.13: cannot open shared\nobject file"),
        flash_attn=ModuleNotFoundError("No module named 'flash_attn'"),
    )
    assert str(select_attention(ON_GPU)) == (
        "torch; not transformer-engine: OSError: libcublas.so.13: cannot open shared object file"
        "; not flash-attn: ModuleNotFoundError: No module named 'flash_attn'"
    )


def test_a_choice_that_cannot_be_had_is_an_error(monkeypatch):
    Loaders(monkeypatch, flash_attn=ImportError("undefined symbol: _ZN3c10"))
    assert select_attention(ON_GPU, "torch").backend.name == "torch"
    with pytest.raises(ValueError) as error:
        select_attention(ON_GPU, "flash-attn")
    for expected in (
        "no attention for bfloat16 on device 'cuda:0' with head dimension 128",
        "--hdp-attention flash-attn",
        "flash-attn: ImportError: undefined symbol: _ZN3c10",
        "install or repair it, or choose --hdp-attention auto",
    ):
        assert expected in str(error.value)


def test_where_nothing_serves_every_reason_is_given():
    with pytest.raises(ValueError) as error:
        select_attention(replace(ON_GPU, device=torch.device("meta")))
    for name in attention._LOADERS:
        assert f"{name}: found device 'meta'; it needs an NVIDIA GPU" in str(error.value)


def test_an_error_of_ours_is_not_taken_for_a_missing_package(monkeypatch):
    Loaders(monkeypatch, transformer_engine=TypeError("a defect"))
    with pytest.raises(TypeError, match="a defect"):
        select_attention(ON_GPU)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_cpu_uses_the_kernel_of_torch(dtype):
    state = torch.get_rng_state()
    selection = select_attention(replace(ON_CPU, dtype=dtype))
    assert selection.backend.name == "torch-sdpa-cpu"
    assert list(selection.refused) == ["transformer-engine", "flash-attn"]
    assert torch.equal(torch.get_rng_state(), state)  # trying it out draws none of the run's


@pytest.mark.parametrize(
    ("dtype", "head_dim", "value_dim", "name"),
    [
        (torch.bfloat16, 128, None, "torch-flash"),
        (torch.float16, 256, None, "torch-flash"),
        (torch.bfloat16, 60, None, "torch-matmul (exact, slow)"),
        (torch.bfloat16, 128, 260, "torch-matmul (exact, slow)"),
        (torch.float32, 128, None, "torch-matmul (exact, slow)"),
        (torch.float64, 128, None, "torch-matmul (exact, slow)"),
    ],
)
def test_torch_on_a_gpu_takes_flash_kernels_where_they_fit(
    monkeypatch, dtype, head_dim, value_dim, name
):
    monkeypatch.setattr(attention, "try_out", lambda *how: None)
    shapes = RunShapes(ON_GPU.device, dtype, head_dim, value_dim=value_dim)
    assert select_attention(shapes, "torch").backend.name == name


def test_values_of_another_size_are_tried_and_padded_in_our_own_ring():
    selection = select_attention(replace(ON_CPU, dtype=torch.float64, value_dim=8))
    assert selection.backend.name == "torch-sdpa-cpu"
    assert isinstance(selection.backend.kernel, PaddedKernel)


@pytest.mark.parametrize("name", ["transformer-engine", "flash-attn"])
def test_a_dtype_is_refused_before_anything_is_loaded(name):
    with pytest.raises(ValueError, match=rf"{name}: found (torch\.)?float32; "):
        select_attention(replace(ON_GPU, dtype=torch.float32), name)


class HalfTheGradient(CpuFlashKernel):
    """A planted fault of a kernel."""

    def backward(self, *given):
        dq, dk, dv = super().backward(*given)
        return dq, dk / 2, dv


def test_a_kernel_that_computes_wrongly_is_not_taken():
    try_out(RingAttention(CpuFlashKernel()), ON_CPU)
    with pytest.raises(RuntimeError, match=r"computes dk with relative error 0\.5"):
        try_out(RingAttention(HalfTheGradient()), ON_CPU)


class AlignedAtTheBeginning(CpuFlashKernel):
    """A planted fault: the first query of a segment sees the first key, whatever comes before."""

    def forward(self, q, k, v, block, scale):
        if block.window is None or block.q_segments.lengths == block.k_segments.lengths:
            return super().forward(q, k, v, block, scale)
        rows = [torch.arange(n) for n in block.q_segments.lengths]
        firsts = block.k_segments.offsets[:-1].tolist()
        rows = torch.cat([row + first for row, first in zip(rows, firsts, strict=True)])
        same = replace(block, k_segments=block.q_segments)
        return super().forward(q, k[rows], v[rows], same, scale)


def test_the_trial_has_windows_and_a_halo():
    shapes = replace(ON_CPU, windows=(9,))
    wrong = RingAttention(AlignedAtTheBeginning())
    try_out(RingAttention(CpuFlashKernel()), shapes)
    try_out(wrong, ON_CPU)  # not without windows
    with pytest.raises(RuntimeError, match=r"computes out .* tokens in a window, with a halo"):
        try_out(wrong, shapes)


class WrongWithEmptySegments(RingAttention):
    """A planted fault of a library that is given more segments than there are sequences."""

    def __call__(self, q, k, v, layout, comm, scale, *, window=None, sink=None):
        out = super().__call__(q, k, v, layout, comm, scale, window=window, sink=sink)
        has_empty = bool((layout.local_segments.bucketed_offsets.diff() == 0).any())
        return out * float("nan") if has_empty else out


def test_the_trial_has_empty_segments():
    with pytest.raises(RuntimeError, match="computes out with relative error nan"):
        try_out(WrongWithEmptySegments(CpuFlashKernel()), replace(ON_CPU, dtype=torch.float64))
