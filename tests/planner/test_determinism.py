"""One problem has one plan: in any process, in any number of threads, whatever else runs."""

import ctypes
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from megatron_hdp.data.presets import preset_lengths
from megatron_hdp.planner import plan
from megatron_hdp.planner.extension import _core
from megatron_hdp.planner.problem import Problem
from tests.planner.problems import EXECUTED_STRATEGIES, fixed_problems
from tests.support.processes import run_python

STRATEGIES = (*EXECUTED_STRATEGIES, "dynamic-cp")


def fingerprints() -> list[int]:
    return [
        problem.plan(strategy).fingerprint()
        for problem in fixed_problems()
        for strategy in STRATEGIES
    ]


@pytest.mark.parametrize(
    ("hash_seed", "num_threads"), [pytest.param("1", "1", marks=pytest.mark.slow), ("2", "4")]
)
def test_other_processes_make_the_same_plans(hash_seed: str, num_threads: str) -> None:
    code = "from tests.planner.test_determinism import fingerprints; print(*fingerprints())"
    result = run_python("-c", code, PYTHONHASHSEED=hash_seed, OMP_NUM_THREADS=num_threads)
    assert list(map(int, result.stdout.split())) == fingerprints()


def pipeline_fingerprints() -> list[int]:
    """Of problems that take the whole budget of the search, which has threads of its own."""
    ranks, capacity = 512, 8192
    return [
        plan(
            preset_lengths(preset, num_tokens=4 * ranks * capacity, max_length=2**20, seed=2),
            ranks=ranks,
            tokens_per_rank=capacity,
            pipeline_stages=stages,
            virtual_stages=virtual_stages,
        ).fingerprint()
        for preset in ("byted",)
        for stages, virtual_stages in ((4, 1), (8, 3))
    ]


@pytest.mark.parametrize(
    "make", [pytest.param(fingerprints, marks=pytest.mark.slow), pipeline_fingerprints]
)
def test_threads_make_the_same_plans(make: Callable[[], list[int]]) -> None:
    alone = make()
    assert len(set(alone)) > len(alone) // 4  # the list tells plans apart
    with ThreadPoolExecutor(4) as pool:
        together = [pool.submit(make) for _ in range(4)]
    assert [future.result() for future in together] == [alone] * 4


def lets_other_threads_run(call: Callable[[], object]) -> bool:
    """Whether this thread gets the interpreter's lock before `call` returns in another one."""
    about_to_call = threading.Event()
    returned = threading.Event()

    def run() -> None:
        about_to_call.set()
        call()
        returned.set()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(60)  # nobody is made to give the lock up: `call` has to offer it
    thread = threading.Thread(target=run)
    try:
        thread.start()
        about_to_call.wait()
        return not returned.is_set()
    finally:
        thread.join()
        sys.setswitchinterval(interval)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_planning_lets_other_threads_run(strategy: str) -> None:
    lengths = np.random.default_rng(0).integers(1, 4000, size=200_000)
    problem = Problem.of(lengths, ranks=512, tokens_per_rank=8192).core
    assert lets_other_threads_run(lambda: _core.plan(problem, strategy))


def test_a_call_that_keeps_the_lock_is_seen() -> None:
    keeps_the_lock = ctypes.PyDLL(None).usleep
    assert not lets_other_threads_run(lambda: keeps_the_lock(20_000))
