"""What a profiler saw stands on the right lane, with the right share of it hidden by compute."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

SCRIPTS = Path(__file__).parents[3] / "scripts" / "gpu"
sys.path.append(str(SCRIPTS))
four_lanes = importlib.import_module("four_lanes")


def event(name, category, start, length):
    """A bar of torch.profiler's; times in microseconds."""
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": length}


KERNEL, COPY = "kernel", "gpu_memcpy"
EVENTS = [  # whose every overlap is known
    {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}},
    {"ph": "i", "cat": "kernel", "name": "an instant", "ts": 0},
    event("aten::mm", "cpu_op", 0, 500),
    event("cudaLaunchKernel", "cuda_runtime", 0, 5),
    event("sm90_xmma_gemm_bf16", KERNEL, 1000, 4000),
    event("flash_fwd_kernel", KERNEL, 5000, 2000),
    event("Memset (Device)", "gpu_memset", 7000, 100),
    event("Memcpy DtoD (Device -> Device)", COPY, 7100, 900),
    event("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", KERNEL, 2000, 1000),
    event("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", KERNEL, 7500, 1500),
    event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", KERNEL, 9000, 2000),
    event("Memcpy DtoH (Device -> Pinned)", COPY, 3000, 1000),
    event("Memcpy HtoD (Pinned -> Device)", COPY, 8000, 500),
]


def step_of(tmp_path, events):
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    return four_lanes.read(path)


def test_every_event_stands_on_its_lane(tmp_path):
    step = step_of(tmp_path, EVENTS)
    spans = {kind: found.tolist() for kind, found in step.spans.items()}
    assert spans == {
        "compute": [[0, 4], [4, 6], [6, 6.1], [6.1, 7]],
        "ring": [[1, 2], [6.5, 8]],
        "to the host": [[2, 3]],
        "from the host": [[7, 7.5]],
        "gradient sync": [[8, 10]],
    }
    assert step.milliseconds == 10


def test_what_is_hidden(tmp_path):
    step = step_of(tmp_path, EVENTS)
    assert (step.busy_ms("ring"), step.hidden_ms("ring")) == (2.5, 1.5)
    assert (step.busy_ms("to the host"), step.hidden_ms("to the host")) == (1.0, 1.0)
    assert (step.busy_ms("from the host"), step.hidden_ms("from the host")) == (0.5, 0.0)
    assert four_lanes.figures(step) == (
        "10.0 ms, compute 7.0 ms, ring 2.5 ms (60% hidden), to the host 1.0 ms (100% hidden), "
        "from the host 0.5 ms (0% hidden)"
    )


def test_kernels_that_run_at_once_count_once():
    spans = np.array([[0.0, 2.0], [1.0, 3.0], [3.0, 4.0], [6.0, 7.0]])
    assert four_lanes.merged(spans).tolist() == [[0, 4], [6, 7]]
    assert four_lanes.merged(spans[:0]).shape == (0, 2)


def test_operators_stand_for_kernels_where_there_is_no_gpu(tmp_path):
    events = [
        event("aten::mm", "cpu_op", 0, 1000),
        event("gloo:recv", "user_annotation", 200, 300),
        event("c10d::allreduce_", "cpu_op", 1000, 400),
        event("a note of somebody's", "user_annotation", 0, 9000),
    ]
    spans = step_of(tmp_path, events).spans
    assert [len(spans[kind]) for kind in ("compute", "ring", "gradient sync")] == [1, 1, 1]


@pytest.mark.parametrize("events", [[], [event("cudaLaunchKernel", "cuda_runtime", 0, 5)]])
def test_a_trace_without_work_is_refused(tmp_path, events):
    with pytest.raises(ValueError, match="was the step profiled"):
        step_of(tmp_path, events)


def test_a_picture_of_a_trace_that_is_there(tmp_path):
    step_of(tmp_path, EVENTS)
    done = trace_step(tmp_path, "--trace", tmp_path / "trace.json")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
    assert done.stdout.startswith("10.0 ms, compute 7.0 ms")


@pytest.mark.parametrize(
    "device",
    [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)],
)
def test_a_step_is_recorded_and_drawn(tmp_path, device):
    done = trace_step(tmp_path, "--small", "--device", device)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "step.png").exists()
    if device == "cuda":
        assert " to the host 0.0 ms," not in done.stdout, "nothing was offloaded"


@pytest.mark.parametrize(("limit_s", "told"), [(60, "rank 1 of 2 failed: the port"), (0, "rank 0")])
def test_a_rank_that_fails_is_told_though_another_waits(tmp_path, monkeypatch, limit_s, told):
    module = importlib.import_module("trace_step")
    code = "import os, sys, time; sys.exit('the port') if os.environ['RANK'] == '1' else 0"
    (tmp_path / "rank.py").write_text(f"{code}; time.sleep(60)")
    monkeypatch.setattr(module, "__file__", str(tmp_path / "rank.py"))
    monkeypatch.setitem(module.LIMIT_S, "cpu", limit_s)
    assert module.record(tmp_path / "trace.json", "cpu", True, 2).startswith(told)


def trace_step(tmp_path, *options):
    command = [sys.executable, SCRIPTS / "trace_step.py", tmp_path / "step.png", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=180)
