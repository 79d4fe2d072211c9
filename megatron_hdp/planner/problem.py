"""What the user asks of the planner, checked and handed to C++; refusals in the user's words."""

import dataclasses
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike

from megatron_hdp.arrays import Int64Array
from megatron_hdp.planner.cost_model import LLAMA_7B, CostModel
from megatron_hdp.planner.extension import _core
from megatron_hdp.planner.flat_plan import PlanError, frozen
from megatron_hdp.planner.pipeline import Pipeline

OFFLOAD = ("auto", "off")


@dataclass(frozen=True, eq=False)
class Problem:
    """The checked arguments of ``plan``; its docstring says what they are."""

    lengths: Int64Array
    num_ranks: int
    tokens_per_rank: int
    slice_multiple: int
    pipeline: Pipeline
    expert_parallel_size: int
    cost_model: CostModel
    core: Any
    """The same for the C++ planner."""

    @classmethod
    def of(
        cls,
        lengths: ArrayLike,
        *,
        ranks: int,
        tokens_per_rank: int,
        max_length: int | None = None,
        slice_multiple: int = 1,
        cost_model: CostModel | None = None,
        ranks_per_node: int | None = None,
        rank_speeds: Sequence[float] | None = None,
        pipeline_stages: int = 1,
        virtual_stages: int = 1,
        stage_weights: Sequence[float] | None = None,
        expert_parallel_size: int = 1,
        offload: str = "off",
        effort: int = 1,
    ) -> Self:
        """Checks the arguments of ``plan``; ValueError names the first wrong one."""
        array = _lengths(lengths)
        changes: dict[str, Any] = {}
        if ranks_per_node is not None:
            changes["ranks_per_node"] = _integer("ranks_per_node", ranks_per_node)
        if rank_speeds is not None:
            changes["rank_speeds"] = _list("rank_speeds", rank_speeds)
        if cost_model is not None and not isinstance(cost_model, CostModel):
            raise ValueError(f"cost_model is {cost_model!r}; expected a CostModel")
        cost_model = _changed(cost_model or LLAMA_7B, changes)
        if not isinstance(offload, str) or offload not in OFFLOAD:
            raise ValueError(f"offload is {offload!r}; expected one of {', '.join(OFFLOAD)}")
        num_ranks = _integer("ranks", ranks)
        capacity = _integer("tokens_per_rank", tokens_per_rank)
        multiple = _integer("slice_multiple", slice_multiple)
        stages = _integer("pipeline_stages", pipeline_stages)
        weights = [] if stage_weights is None else _list("stage_weights", stage_weights)
        pipeline = Pipeline(stages, _integer("virtual_stages", virtual_stages), tuple(weights))
        longest = int(array.max()) if max_length is None else _integer("max_length", max_length)
        table = cost_model.attention_table
        layers = cost_model.num_layers * stages
        coefficients = {
            field.name: getattr(cost_model, field.name)
            for field in dataclasses.fields(cost_model)
            if field.name not in ("attention_points", "rank_speeds", "halo_bytes")
        } | {
            "halo_s": cost_model.halo_s,
            "b": cost_model.linear_s_per_token,
            "block_s": 2 * layers * cost_model.block_s,
            "intra_node_hop_s": layers * cost_model.intra_node_hop_s,
            "inter_node_hop_s": layers * cost_model.inter_node_hop_s,
        }
        expert_ranks = _integer("expert_parallel_size", expert_parallel_size)
        core = _core.Problem(
            array,
            num_ranks=num_ranks,
            tokens_per_rank=capacity,
            slice_multiple=multiple,
            max_length=longest,
            pipeline_stages=stages,
            model_chunks=pipeline.chunks,
            row_weights=pipeline.row_weights,
            offload=offload == "auto",
            effort=_integer("effort", effort),
            expert_ranks=expert_ranks,
            attention_lengths=table.lengths,
            attention_seconds=table.seconds,
            rank_speeds=np.array(cost_model.rank_speeds, dtype=np.float64),
            **coefficients,
        )
        return cls(array, num_ranks, capacity, multiple, pipeline, expert_ranks, cost_model, core)


def _changed(cost_model: CostModel, changes: dict[str, Any]) -> CostModel:
    """The cost model itself where nothing changes: it need not be checked again."""
    others = {name: value for name, value in changes.items() if value != getattr(cost_model, name)}
    return dataclasses.replace(cost_model, **others) if others else cost_model


def _lengths(values: ArrayLike) -> Int64Array:
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
    return frozen(array, np.int64)


def _list(name: str, values: Any) -> list[Any]:
    if isinstance(values, np.ndarray) and values.ndim == 1:
        return list(values.tolist())
    if not isinstance(values, list | tuple):
        raise ValueError(f"{name} is {values!r}; expected a list of numbers")
    return list(values)


def _integer(name: str, value: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise ValueError(f"{name} is {value!r}; expected an integer") from None
    if isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}; expected an integer")
    if not 1 <= number <= np.iinfo(np.int64).max:
        raise ValueError(f"{name} is {number:,}; expected at least 1 and at most 2^63 - 1")
    return number


@contextmanager
def told_as(names: Mapping[str, str]) -> Iterator[None]:
    """Within the block, what the planner raises names the caller's flags.

    Args:
        names: by the planner's arguments, as its messages write them: ``tokens_per_rank``,
            ``max_length``, ``offload="auto"``.
    """
    try:
        yield
    except PlanError:
        raise
    except ValueError as error:
        if not names:
            raise
        arguments = "|".join(map(re.escape, names))
        message = re.sub(arguments, lambda found: names[found[0]], str(error))
        raise ValueError(message) from error
