"""Which attention is chosen, with packages and a GPU that are faked; several in one run."""

from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
from torch.nn.attention import _registry

from megatron_hdp.runtime.attention import AttentionByLatent, RunShapes, with_latent_ring
from megatron_hdp.runtime.attention import selection as attention
from megatron_hdp.runtime.attention.selection import Selection, select_attention, try_out
from megatron_hdp.runtime.attention.several import with_float32_rings, with_own_ring
from megatron_hdp.runtime.attention.transformer_engine import TransformerEngineAttention
from megatron_hdp.runtime.kernels import CpuFlashKernel, PaddedKernel
from megatron_hdp.runtime.ring import RingAttention, TokenLayout

ON_CPU = RunShapes(torch.device("cpu"), torch.bfloat16, 16)
ON_GPU = RunShapes(torch.device("cuda", 0), torch.bfloat16, 128)


class Named:
    """A backend that says who attends, and to what."""

    def __init__(self, name):
        self.name = name

    def __call__(self, q, k, v, layout, comm, scale, *, window=None, sink=None):
        return self.name, window, sink


OLDER = {
    choice: tuple(name for name in names if name not in attention._NEWER)
    for choice, names in attention._SEVERAL.items()
}


class Loaders:
    """Fakes what loads; `missing` says which does not, and how. Newer flash kernels: if told."""

    def __init__(self, monkeypatch, newer=(), **missing):
        self.tried = []
        names = {name: (*newer, *choices) for name, choices in OLDER.items()}
        monkeypatch.setattr(attention, "_SEVERAL", names)
        for name in attention._LOADERS:
            error = missing.get(name.replace("-", "_").replace(" ", "_"))
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
    for name in OLDER["auto"]:
        assert f"{name}: found device 'meta'; it needs an NVIDIA GPU" in str(error.value)


def test_an_error_of_ours_is_not_taken_for_a_missing_package(monkeypatch):
    Loaders(monkeypatch, transformer_engine=NameError("a defect"))
    with pytest.raises(NameError, match="a defect"):
        select_attention(ON_GPU)


@pytest.mark.parametrize("error", [TypeError("unexpected keyword argument 'x'"), KeyError("x")])
def test_a_package_with_other_arguments_is_not_taken(monkeypatch, error):
    Loaders(monkeypatch)
    tried = []

    def try_out(backend, shapes):
        tried.append(backend.name)
        if backend.name == "transformer-engine":
            raise error

    monkeypatch.setattr(attention, "try_out", try_out)
    selection = select_attention(ON_GPU)
    assert selection.backend.name == "flash-attn" and tried == ["transformer-engine", "flash-attn"]
    assert type(error).__name__ in selection.refused["transformer-engine"]


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


class Flash:
    """What PyTorch's registry holds of a newer package: notes when it is put in and taken out."""

    def __init__(self, events, name):
        self._events, self._name = events, name
        events.append(f"{name} in")

    def remove(self):
        self._events.append(f"{self._name} out")


@pytest.mark.parametrize(
    ("installed", "fails", "taken", "expected"),
    [
        (("FA3", "FA4"), (), "torch-flash FA3", ["FA3 in", "tried"]),
        (("FA4",), (), "torch-flash FA4", ["FA4 in", "tried"]),
        (("FA3",), ("FA3",), "torch-flash", ["FA3 in", "tried", "FA3 out", "tried"]),
        ((), (), "torch-flash", ["tried"]),
    ],
)
def test_the_newest_flash_kernels_that_compute_rightly_serve_our_ring(
    monkeypatch, installed, fails, taken, expected
):
    events = []

    def register(name):
        if name not in installed:
            raise ModuleNotFoundError(f"No module named '{name}'")
        return Flash(events, name)

    def try_out(backend, shapes):
        if not events or events[-1] != "tried":
            events.append("tried")
        if backend.name.split()[-1] in fails:
            raise RuntimeError("differs by 3 %")

    known = {name: partial(register, name) for name in ("FA3", "FA4")}
    monkeypatch.setattr(_registry, "_FLASH_ATTENTION_IMPLS", known)
    monkeypatch.setattr(_registry, "_FLASH_ATTENTION_ACTIVE", None)
    monkeypatch.setattr(attention, "try_out", try_out)
    selection = select_attention(replace(ON_GPU, value_dim=64), "torch")
    assert isinstance(selection.backend.kernel, PaddedKernel)  # when it is tried, too
    assert selection.backend.name == taken and events == expected
    assert len(selection.refused) == {"FA3": 0, "FA4": 1}.get(taken.split()[-1], 2)
    select_attention(ON_CPU, "torch")
    assert events == expected  # a CPU is not asked


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


OF_LATENTS = RunShapes(torch.device("cpu"), torch.float64, 16, heads=4, kv_heads=4, value_dim=8)
RING, ALONE = TokenLayout((0, 1), 0, (8,), (3,)), TokenLayout((0,), 0, (), (3,))
OURS = Selection(RingAttention(CpuFlashKernel()), {"transformer-engine": "not here"})


def by_degree(least_degree, choice="auto"):
    return with_float32_rings(select_attention(ON_GPU, choice), least_degree, ON_GPU)


@pytest.mark.parametrize("choice", ["auto", "transformer-engine"])
def test_long_rings_go_to_the_first_of_the_others_and_both_are_tried(monkeypatch, choice):
    loaders = Loaders(monkeypatch, flash_attn=ImportError("no such file"))
    selection = by_degree(3, choice)
    assert str(selection) == (
        "transformer-engine, rings of 3 ranks and more by torch"
        "; not flash-attn: ImportError: no such file"
    )
    assert [one.name for one in loaders.tried] == ["transformer-engine", "torch"]

    def attends(*ring, slices=(4,)):
        layout = TokenLayout(ring, 0, slices, (2,))
        return selection.backend(None, None, None, layout, None, 1.0)[0]

    assert attends(0, slices=()) == attends(0, 1, 2, slices=()) == "transformer-engine"
    assert attends(0, 1) == "transformer-engine"
    assert attends(0, 1, 2) == attends(3, 2, 1, 0) == "torch"


@pytest.mark.parametrize(
    ("takes_rings", "num_ranks", "rings"),
    [(False, 8, ", rings of 2 ranks and more by torch"), (False, 1, ""), (True, 8, "")],
)
def test_rings_go_to_the_first_of_the_others_where_transformer_engine_is_old(
    monkeypatch, takes_rings, num_ranks, rings
):
    Loaders(monkeypatch, flash_attn=ImportError("no such file"))
    old = mock.create_autospec(TransformerEngineAttention, instance=True)
    old.name, old.takes_rings = "transformer-engine 2.9.0", takes_rings
    shapes = replace(ON_GPU, num_ranks=num_ranks)
    selection = with_float32_rings(Selection(old, {}), None, shapes)
    assert selection.backend.name == old.name + rings


def test_where_no_kernel_serves_our_ring_the_run_does_not_begin(monkeypatch):
    Loaders(monkeypatch, flash_attn=ImportError("no file"), torch=RuntimeError("no kernel image"))
    with pytest.raises(ValueError) as error:
        by_degree(2)
    for expected in (
        "--hdp-attention flash-attn or torch",
        "flash-attn: ImportError: no file",
        "torch: RuntimeError: no kernel image",
    ):
        assert expected in str(error.value)


def by_layer(**kinds):
    shapes = replace(ON_GPU, **kinds)
    return with_own_ring(select_attention(shapes), shapes)


@pytest.mark.parametrize("kinds", [{"sink": True}, {"windows": (8,)}])
def test_layers_with_a_window_or_a_sink_go_to_our_ring(monkeypatch, kinds):
    Loaders(monkeypatch)
    selection = by_layer(**kinds)
    assert str(selection) == "transformer-engine, layers with a window or a sink by flash-attn"
    assert selection.backend(0, 0, 0, 0, 0, 1.0) == ("transformer-engine", None, None)
    assert selection.backend(0, 0, 0, 0, 0, 1.0, sink=7) == ("flash-attn", None, 7)
    assert selection.backend(0, 0, 0, 0, 0, 1.0, window=8) == ("flash-attn", 8, None)


def test_where_no_layer_is_plain_our_ring_serves_all(monkeypatch):
    Loaders(monkeypatch)
    assert str(by_layer(windows=(8,), plain_layers=False)) == (
        "flash-attn; not transformer-engine: every layer has a window or a sink, and its rings "
        "know neither"
    )


def test_without_such_rings_and_layers_and_for_our_own_ring_nothing_changes(monkeypatch):
    loaders = Loaders(monkeypatch)
    assert by_degree(None).backend.name == str(by_layer()) == "transformer-engine"
    assert with_float32_rings(OURS, 2, ON_GPU) is OURS
    assert with_own_ring(OURS, replace(ON_GPU, sink=True)) is OURS
    assert {one.name for one in loaders.tried} == {"transformer-engine"}


def by_latent(choice, selection=None):
    return with_latent_ring(selection or select_attention(OF_LATENTS), choice, OF_LATENTS).backend


def test_the_latent_travels_in_rings_alone():
    attend = by_latent("latent")
    assert ", rings of latents" in attend.name
    assert attend.latent_travels(RING) and not attend.latent_travels(ALONE)
    attend.decide_by(lambda _: False, lambda _: 1.0)
    assert attend.latent_travels(RING) and attend.made_heads(RING, 4) == 0  # it was asked for
    assert not isinstance(by_latent("kv"), AttentionByLatent)


def test_the_cost_model_decides_where_it_is_asked():
    attend = by_latent("auto")
    assert ", rings of either" in attend.name
    assert not attend.latent_travels(RING)
    shares = iter([0.0, 0.49, 0.5, 1.0])
    attend.decide_by(lambda layout: layout.degree == 2, lambda layout: next(shares))
    assert attend.latent_travels(RING)
    assert [attend.made_heads(RING, 4) for _ in range(4)] == [0, 1, 2, 3]
    assert attend.made_heads(ALONE, 4) == 0


def test_a_library_with_a_ring_of_its_own_gets_ours_beside_it(monkeypatch):
    Loaders(monkeypatch)
    whole = select_attention(ON_GPU)
    monkeypatch.undo()
    attend = by_latent("latent", whole)
    assert attend.name == "transformer-engine, rings of latents by torch-sdpa-cpu"
    assert isinstance(attend.latent_ring.kernel, PaddedKernel)
    assert attend(1, 2, 3, ALONE, None, 1.0) == ("transformer-engine", None, None)
