"""The Triton kernels of the fused loss against the plain ones: interpreted, compiled, on a GPU."""

import importlib.util
import re
import subprocess

import pytest
import torch

from megatron_hdp.runtime.loss.fused_cross_entropy import TorchRows
from tests.support.processes import run_python

ROWS = 5
TOLERANCES = {torch.bfloat16: 0.01, torch.float16: 0.002, torch.float32: 1e-5}

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs triton: pip install triton"
)


def rows_case(width, dtype, device):
    """Logits of which one row is large, columns before, in and behind, and weights."""
    generator = torch.Generator().manual_seed(width)
    logits = torch.randn(ROWS, width, generator=generator) * 4
    logits[1] += 80
    columns = torch.tensor([0, width - 1, -1, width, -(2**40)])
    weights = torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0])
    return logits.to(device, dtype), columns.to(device), weights.to(device)


def run(rows, logits, columns, weights):
    """(figures, gradient) of `rows`, the vocabulary being whole."""
    scores, figures = rows.statistics(logits, columns)
    log_sums = figures[0] + figures[1].log()
    rows.gradient(scores, figures, columns, log_sums, weights)
    return figures, scores


def compare(width, dtype, device, rows=None):
    """The kernels give what the plain version gives in float32."""
    from megatron_hdp.runtime.loss.triton_cross_entropy import TritonRows

    logits, columns, weights = rows_case(width, dtype, device)
    expected = run(TorchRows(), logits.to(torch.float32, copy=True), columns, weights)
    figures, gradient = run(rows or TritonRows(), logits, columns, weights)
    assert gradient.data_ptr() == logits.data_ptr() and gradient.dtype == dtype
    torch.testing.assert_close(figures, expected[0], rtol=1e-5, atol=1e-5)
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(gradient.float(), expected[1], rtol=tolerance, atol=1e-6)


def compare_all(device):
    """Vocabularies below, at and above a block of columns, in every precision."""
    for dtype in TOLERANCES:
        for width in (7, 4096, 4097, 10_000):
            compare(width, dtype, device)


def compare_fault():
    """A version that takes nothing off at the label does not pass."""
    from megatron_hdp.runtime.loss.triton_cross_entropy import TritonRows

    class LabelForgotten(TritonRows):
        def gradient(self, scores, figures, columns, log_sums, weights):
            super().gradient(scores, figures, columns - 10_000, log_sums, weights)

    with pytest.raises(AssertionError, match="not close"):
        compare(4097, torch.float32, "cpu", LabelForgotten())


@pytest.mark.parametrize(
    "call", ["compare_all('cpu')", pytest.param("compare_fault()", marks=pytest.mark.slow)]
)
def test_kernels_in_the_interpreter(call):
    """In a process of its own: Triton decides on import whether to interpret."""
    code = f"from tests.runtime.loss.test_triton_cross_entropy import *; {call}"
    done = run_python("-c", code, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr


class Compiled:
    """Stands for a kernel: a launch compiles it, as for its arguments, for a GPU not here."""

    def __init__(self, kernel, architecture, files):
        self._kernel, self._architecture, self._files = kernel, architecture, files

    def __getitem__(self, grid):
        return self._compile

    def _compile(self, *args, num_warps, **constants):
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource
        from triton.runtime.jit import mangle_type

        kinds = {name: "constexpr" for name in constants}
        kinds |= dict(zip(self._kernel.arg_names, map(mangle_type, args), strict=False))
        tensors = [index for index, arg in enumerate(args) if isinstance(arg, torch.Tensor)]
        aligned = {(index,): [["tt.divisibility", 16]] for index in tensors}
        source = ASTSource(self._kernel, kinds, constants, aligned)
        target = GPUTarget("cuda", self._architecture, 32)
        self._files.append(triton.compile(source, target, {"num_warps": num_warps}).asm)


def compile_both(monkeypatch, tmp_path, dtype, width, architecture):
    """What the compiler makes of both kernels when the loss calls them, and bytes of their stacks.

    A stack holds what does not fit into registers.
    """
    from triton import knobs

    from megatron_hdp.runtime.loss import triton_cross_entropy as kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    files, cubin = [], tmp_path / "kernel.cubin"
    for name in ("_statistics", "_gradient"):
        kernel = Compiled(getattr(kernels, name), architecture, files)
        monkeypatch.setattr(kernels, name, kernel)
    columns = torch.zeros(1, dtype=torch.int64)
    run(kernels.TritonRows(), torch.zeros(1, width, dtype=dtype), columns, torch.ones(1))
    stacks = []
    for one in files:
        cubin.write_bytes(one["cubin"])
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", cubin]
        told = subprocess.run(command, capture_output=True, text=True, check=True)
        stacks += map(int, re.findall(r"STACK:(\d+)", told.stdout))
    return files, stacks


@pytest.mark.parametrize("architecture", [80, 90, 100])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_kernels_compile_without_a_gpu(monkeypatch, tmp_path, dtype, architecture):
    """To machine code, by the assembler in Triton's wheel; 16 bytes at a time, all in registers."""
    files, stacks = compile_both(monkeypatch, tmp_path, dtype, 151_936, architecture)
    assert stacks == [0, 0]
    for one in files:
        assert f".target sm_{architecture}" in one["ptx"]
        assert re.search(r"ld\.global\S*\.v4\.b32", one["ptx"])


@pytest.mark.slow
def test_a_kernel_that_needs_too_many_registers_is_found(monkeypatch, tmp_path):
    from megatron_hdp.runtime.loss import triton_cross_entropy as kernels

    monkeypatch.setattr(kernels, "_BLOCK", 2**16)
    _, stacks = compile_both(monkeypatch, tmp_path, torch.bfloat16, 151_936, 90)
    assert any(stacks)


@pytest.mark.gpu
def test_kernels_on_a_gpu():
    compare_all("cuda")


@pytest.mark.gpu
def test_more_logits_than_32_bits_count():
    from megatron_hdp.runtime.loss.triton_cross_entropy import TritonRows

    width = 2**17
    num_rows = 2**31 // width + 8
    logits = torch.zeros(num_rows, width, dtype=torch.bfloat16, device="cuda")
    logits[-1] = torch.arange(width, device="cuda") % 7
    columns = torch.full((num_rows,), width - 1, device="cuda")
    weights = torch.ones(num_rows, device="cuda")
    last = run(TorchRows(), logits[-1:].float(), columns[-1:], weights[-1:])
    figures, gradient = run(TritonRows(), logits, columns, weights)
    torch.testing.assert_close(figures[:, -1:], last[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient[-1:].float(), last[1], rtol=0.01, atol=1e-7)
