"""The benchmarks of a GPU run on the CPU, small; rows of the loss's agree, what fails says so."""

import os
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from tests.support.processes import run_script
from tests.support.scripts import script_module

SCRIPTS = Path(__file__).parents[3] / "scripts" / "gpu"


ALL = sorted(path.stem for path in SCRIPTS.glob("bench_*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_a_small_run(name):
    if name == "bench_checkout" and "MEGATRON_LM_PATH" not in os.environ:
        pytest.skip("set MEGATRON_LM_PATH to a Megatron-LM checkout")
    done = run_script(SCRIPTS / f"{name}.py", "--device", "cpu", "--small")
    assert done.returncode == 0, done.stderr
    assert "CPU, 1 thread(s)" in done.stdout
    rows = [line.split("|") for line in done.stdout.splitlines() if line.startswith("|")]
    assert len(rows) > 2
    assert len({len(row) for row in rows[:3]}) == 1
    assert "out of memory" not in done.stdout


@pytest.mark.parametrize("name", ALL)
def test_without_a_gpu_it_says_so(name):
    done = run_script(SCRIPTS / f"{name}.py", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2
    assert "found no NVIDIA GPU: give --device cpu --small" in done.stderr


@pytest.fixture(scope="module")
def bench():
    with script_module("gpu/bench_loss.py") as module:
        yield module


def test_rows_agree_and_the_fused_one_takes_less_memory(bench, monkeypatch):
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: None)
    case = bench.make_case((512, 16_384, 16), "cpu")  # 32 MiB of logits in two chunks
    with ExitStack() as stack:
        rows = bench.make_rows("cpu", stack)
    bench.measure(rows, case, bench.Budget(60), 1)
    lines = {line[0]: line[1:] for line in bench.cells(rows, int(case.mask.sum()))}
    bound, ours, logits = list(lines)[:3]
    assert (bound, ours) == (bench.BOUND, bench.FUSED)
    assert lines[ours][-2:] == lines[logits][-2:] and float(lines[ours][-2]) > 5
    assert float(lines[ours][3]) < 0.6 * float(lines[logits][3])  # GiB
    assert lines[bench.MEGATRON][0] == "megatron-core is not installed"
    assert lines[ours][2] == "-"


def tiny_case(bench):
    return bench.Case(*(torch.ones(2, 2, requires_grad=True) for _ in range(2)), None, None)


def test_a_row_that_fails_says_so(bench):
    def out_of_memory(case):
        raise torch.OutOfMemoryError("17 GiB")

    def broken(case):
        raise RuntimeError("no such\nkernel")

    calls = iter((lambda case: (case.hidden @ case.weight).sum(), out_of_memory))
    rows = [bench.Row(bench.BOUND, lambda case: (case.hidden @ case.weight).sum())]
    rows += [bench.Row("big", out_of_memory), bench.Row("broken", broken)]
    rows += [bench.Row(bench.FUSION, broken), bench.Row(bench.MEGATRON, None, problem="not there")]
    rows.append(bench.Row("late", lambda case: next(calls)(case)))
    bench.measure(rows, tiny_case(bench), bench.Budget(0), 1)
    lines = {line[0]: line[1:] for line in bench.cells(rows, 2)}
    assert lines["big"][0] == "out of memory"
    assert lines["broken"][0] == "RuntimeError: no such kernel"
    assert lines[bench.FUSION][0] == "no time left to compile it"
    assert lines[bench.MEGATRON][0] == "not there" and lines[bench.BOUND][2] == "-"
    assert lines["late"][0] == "out of memory"
    assert rows[1].peak_bytes is rows[-1].peak_bytes is None, "of what they got before they failed"


def test_a_failure_of_ours_is_an_error(bench):
    def broken(case):
        raise RuntimeError("ours is broken")

    with pytest.raises(RuntimeError, match="ours is broken"):
        bench.measure([bench.Row(bench.FUSED, broken)], tiny_case(bench), bench.Budget(0), 1)
