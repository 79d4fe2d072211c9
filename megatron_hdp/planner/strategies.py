"""The ``plan`` function: checks what the user gives, calls the C++ planner, adds the figures."""

import dataclasses
import difflib
import operator
import time

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron_hdp.planner import _core
from megatron_hdp.planner.cost_model import LLAMA_7B, CostModel
from megatron_hdp.planner.types import Plan

STRATEGIES = ("static", "naive", "dp-balance", "auto")

_RESOLVED = {"auto": "dp-balance"}


def plan(
    lengths: ArrayLike,
    *,
    ranks: int,
    tokens_per_rank: int,
    strategy: str = "auto",
    max_length: int | None = None,
    slice_multiple: int = 1,
    cost_model: CostModel | None = None,
    ranks_per_node: int | None = None,
) -> Plan:
    """Plans one global batch; a pure function of its arguments, ``summary["planning_ms"]`` apart.

    Args:
        lengths: Tokens of each sequence, at least 1 each.
        ranks: HDP ranks.
        tokens_per_rank: Capacity C: padded tokens that a rank can hold in one micro-batch.
        strategy: "static", "naive", "dp-balance" or "auto" (dp-balance).
        max_length: The context length, for which "static" chooses its fixed degree; the longest
            sequence if not given. No sequence may be longer.
        slice_multiple: Chunks are padded to a multiple of this.
        cost_model: LLaMA-7B at 400 TFLOP/s a rank if not given.
        ranks_per_node: Replaces the cost model's.

    Raises:
        ValueError: an argument is out of range or a sequence does not fit on all ranks.
    """
    started = time.perf_counter()
    array = _lengths(lengths)
    cost_model = LLAMA_7B if cost_model is None else cost_model
    if ranks_per_node is not None:
        per_node = _integer("ranks_per_node", ranks_per_node)
        cost_model = dataclasses.replace(cost_model, ranks_per_node=per_node)
    resolved = _resolve(strategy)
    num_ranks = _integer("ranks", ranks)
    capacity = _integer("tokens_per_rank", tokens_per_rank)
    multiple = _integer("slice_multiple", slice_multiple)
    longest = int(array.max()) if max_length is None else _integer("max_length", max_length)
    answer = _core.plan(
        array,
        strategy=resolved,
        num_ranks=num_ranks,
        tokens_per_rank=capacity,
        slice_multiple=multiple,
        max_length=longest,
        **dataclasses.asdict(cost_model),
    )
    makespan_s = answer["makespan_s"]
    return Plan(
        num_ranks=num_ranks,
        tokens_per_rank=capacity,
        strategy=resolved,
        slice_multiple=multiple,
        lengths=array,
        rank_offsets=answer["rank_offsets"],
        ranks=answer["ranks"],
        sequence_offsets=answer["sequence_offsets"],
        sequences=answer["sequences"],
        local_offsets=answer["local_offsets"],
        local_sequences=answer["local_sequences"],
        local_ranks=answer["local_ranks"],
        offload_ratios=np.zeros(len(answer["rank_offsets"]) - 1),
        summary={
            "makespan_s": makespan_s,
            "lower_bound_s": answer["lower_bound_s"],
            "efficiency": answer["total_compute_s"] / num_ranks / makespan_s if makespan_s else 1.0,
            "planning_ms": (time.perf_counter() - started) * 1e3,
            "ring_tokens": answer["ring_tokens"],
            "max_tokens_on_a_rank": answer["max_tokens_on_a_rank"],
        },
    )


def _lengths(values: ArrayLike) -> NDArray[np.int64]:
    array = np.asarray(values)
    if array.ndim != 1:
        raise ValueError(f"lengths has {array.ndim} dimensions; expected 1")
    if array.size == 0:
        raise ValueError("lengths is empty; expected at least one sequence")
    if array.dtype.kind not in "iu":
        raise ValueError(f"lengths has dtype {array.dtype}; expected integers that fit int64")
    greatest = array.max()
    if greatest > np.iinfo(np.int64).max:
        raise ValueError(f"lengths holds {greatest}; expected integers that fit int64")
    if array.min() < 1:
        sequence = int(np.argmax(array < 1))
        raise ValueError(
            f"sequence {sequence} of the batch has {array[sequence]} tokens; expected at least 1"
        )
    return array.astype(np.int64)


def _integer(name: str, value: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise ValueError(f"{name} is {value!r}; expected an integer") from None
    if not 1 <= number <= np.iinfo(np.int64).max:
        raise ValueError(f"{name} is {number:,}; expected at least 1 and at most 2^63 - 1")
    return number


def _resolve(strategy: str) -> str:
    if strategy in STRATEGIES:
        return _RESOLVED.get(strategy, strategy)
    nearest = difflib.get_close_matches(str(strategy), STRATEGIES, n=1, cutoff=0.0)[0]
    raise ValueError(
        f"strategy is {strategy!r}; expected one of {', '.join(STRATEGIES)} (nearest: {nearest})"
    )
