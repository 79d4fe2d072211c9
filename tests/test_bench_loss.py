"""The benchmark of the loss runs on a CPU; its table says what was measured and what was not."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[1] / "scripts" / "gpu" / "bench_loss.py"


@pytest.fixture(scope="module")
def bench():
    spec = importlib.util.spec_from_file_location("bench_loss", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def cells_of(text):
    lines = [line for line in text.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: row[1:] for row in rows[2:]}


def test_a_run_from_the_command_line():
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--small", "--seconds", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "2,048 tokens x 8,192 entries x 64 hidden, float32" in done.stdout
    rows = cells_of(done.stdout)
    measured = [name for name, cells in rows.items() if "runs)" in cells[0]]
    assert measured[:2] == ["the three matrix products alone", "fused (ours)"]
    assert "Megatron, vocab_parallel_cross_entropy" in measured
    losses = {tuple(rows[name][-2:]) for name in measured[1:]}
    assert len(losses) == 1 and float(losses.pop()[0]) > 5  # the same loss and gradient
    ours, logits = (float(rows[name][3]) for name in measured[1:3])
    assert ours < 0.5 * logits  # GiB
    assert rows["Liger-Kernel"][0] == "needs a GPU"


def test_a_row_that_fails_says_so(bench):
    def out_of_memory(case):
        raise torch.OutOfMemoryError("17 GiB")

    def broken(case):
        raise RuntimeError("no such\nkernel")

    case = bench.Case(*(torch.ones(2, 2, requires_grad=True) for _ in range(2)), None, None)
    rows = [bench.Row("bound", lambda case: (case.hidden @ case.weight).sum())]
    rows += [bench.Row("big", out_of_memory), bench.Row("broken", broken)]
    bench.measure(rows, case, 0)
    rows[0].name = bench.BOUND
    text = bench.table([*rows, bench.Row(bench.MEGATRON, None, problem="not there")], 2)
    cells = cells_of(text)
    assert cells["big"][0] == "out of memory"
    assert cells["broken"][0] == "RuntimeError: no such kernel"
    assert cells[bench.MEGATRON][0] == "not there" and cells[bench.BOUND][2] == "-"


def test_a_failure_of_ours_is_an_error(bench):
    def broken(case):
        raise RuntimeError("ours is broken")

    case = bench.Case(*(torch.ones(2, 2, requires_grad=True) for _ in range(2)), None, None)
    with pytest.raises(RuntimeError, match="ours is broken"):
        bench.measure([bench.Row(bench.FUSED, broken)], case, 0)
