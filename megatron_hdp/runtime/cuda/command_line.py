"""What a run of Megatron-LM's script will be, from its arguments, before Megatron is imported."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from megatron_hdp.runtime.cuda.device import compute_capability
from megatron_hdp.runtime.cuda.run import Run


def run_of(arguments: Sequence[str]) -> Run:
    """The run that these arguments of Megatron-LM's script begin.

    Abbreviations are understood: what Megatron's parser takes for one of these flags is one.
    """
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--hybrid-data-parallel", action="store_true")
    parser.add_argument("--tensor-model-parallel-size", default="1")
    parser.add_argument("--use-nccl-ub", action="store_true")
    found, _ = parser.parse_known_args(arguments)
    if not found.hybrid_data_parallel:
        return Run(capability=None, hybrid_data_parallel=False)  # off means off
    return Run(
        capability=compute_capability(),
        hybrid_data_parallel=True,
        tensor_parallel=found.tensor_model_parallel_size != "1",
        registers_buffers=found.use_nccl_ub,
    )
