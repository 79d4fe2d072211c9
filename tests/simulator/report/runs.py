"""Runs small enough to report on in a moment."""

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_hdp.planner import LLAMA_7B
from megatron_hdp.planner.memory import Job
from megatron_hdp.planner.shape import MODELS
from megatron_hdp.simulator.execution import Disturbance, Machine, Run, Setting, simulate
from megatron_hdp.simulator.report import Subject
from tests.simulator.execution.test_run import batches

SHAPE = dataclasses.replace(MODELS["llama-7b"].shape, vocab_size=32000)
JOB = Job(shape=SHAPE, num_gpus=16, tokens_per_rank=4096)
SUBJECT = Subject(config="small.yaml", data="preset:byted", gpu_memory_bytes=80e9)


def flops_of(lengths: NDArray[np.int64]) -> float:
    return 6 * 7e9 * float(lengths.sum())


def setting_of(**changes: Any) -> Setting:
    fields: dict[str, Any] = {
        "ranks": 16,
        "tokens_per_rank": 4096,
        "cost_model": LLAMA_7B,
        "num_gpus": 16,
        "max_length": 65536,
        "machine": Machine(
            gradient_bytes=(13e9,), parameter_bytes=(6e9,), optimizer_s=0.01, loading_s=0.1
        ),
        "job": JOB,
        "flops_of": flops_of,
        "disturbance": Disturbance(noise=0.05, slow={3: 0.5}, seed=7),
    }
    return Setting(**(fields | changes))


def run_of(*strategies: str, steps: int = 2, **changes: Any) -> Run:
    setting = setting_of(**changes)
    lengths = batches(steps, setting.ranks, setting.tokens_per_rank)
    return simulate(setting, lengths, strategies or ("naive", "auto"), seed=3)


def run_without_a_mesh(**changes: Any) -> Run:
    """No power of two of 24 ranks holds the longest sequence: dynamic-cp has no plan."""
    ranks: dict[str, Any] = {"ranks": 24, "max_length": 24 * 4096, "disturbance": Disturbance()}
    setting = setting_of(**ranks, **changes)
    return simulate(setting, [np.array([24 * 4096, 5])], ["dynamic-cp", "auto"])
