"""What the user asks of the planner, checked and handed to C++; refusals in the user's words."""

import dataclasses
import math
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Required, Self, TypedDict, Unpack

import numpy as np
from numpy.typing import ArrayLike

from megatron_hdp.arrays import Int64Array
from megatron_hdp.planner.cost_model import LLAMA_7B, CostModel
from megatron_hdp.planner.extension import _core
from megatron_hdp.planner.flat_plan import PlanError, frozen
from megatron_hdp.planner.parts import AUTO, auto_parts, linear_tokens
from megatron_hdp.planner.pipeline import Pipeline

OFFLOAD = ("auto", "off")
_OF_COSTS = (
    *("a", "linear_s_per_token", "g", "kv_bytes_per_token", "attention_b", "merge_b", "b_experts"),
    *("intra_node_bytes_per_s", "inter_node_bytes_per_s", "ranks_per_node", "num_layers"),
    *("activation_bytes_per_token", "host_bytes_per_s", "window_tokens", "window_share", "halo_s"),
    *("query_ratio", "input_share", "double_rings", "projection_b", "sum_ratio"),
    "made_bytes_per_token",
)
"""What C++ knows of a cost model by the same names; it refuses others."""
_INTEGERS = (
    *("ranks", "tokens_per_rank", "slice_multiple", "effort"),
    *("expert_parallel_size", "sequence_parts"),
)


class Arguments(TypedDict, total=False):
    """The arguments of ``plan``, which says what they are; others than `Problem` has."""

    ranks: Required[int]
    tokens_per_rank: Required[int]
    max_length: int | None
    slice_multiple: int
    cost_model: CostModel | None
    ranks_per_node: int | None
    rank_speeds: Sequence[float] | None
    pipeline_stages: int
    virtual_stages: int
    stage_weights: Sequence[float] | None
    expert_parallel_size: int
    sequence_parts: int | str
    offload: str
    host_memory_bytes: float | None
    streams: bool
    recompute: str
    effort: int


@dataclass(frozen=True, eq=False, kw_only=True)
class Problem:
    """One global batch and the ranks to plan it for; its fields are arguments of ``plan``.

    Raises:
        ValueError: names the first field that is out of range.
    """

    lengths: Int64Array
    ranks: int
    tokens_per_rank: int
    max_length: int | None = None
    slice_multiple: int = 1
    cost_model: CostModel = LLAMA_7B
    """With the ranks' speeds."""
    pipeline: Pipeline = field(default_factory=Pipeline)
    """That each HDP rank is."""
    expert_parallel_size: int = 1
    sequence_parts: int = 1
    offload: str = "off"
    host_memory_bytes: float | None = None
    streams: bool = False
    recompute: str = "off"
    effort: int = 1

    @classmethod
    def of(cls, lengths: ArrayLike, **arguments: Unpack[Arguments]) -> Self:
        """The problem that the arguments of ``plan`` describe."""
        given: dict[str, Any] = dict(arguments)
        model = _with_ranks(
            given.pop("cost_model", None),
            given.pop("ranks_per_node", None),
            given.pop("rank_speeds", None),
        )
        stages = _integer("pipeline_stages", given.pop("pipeline_stages", 1))
        chunks = _integer("virtual_stages", given.pop("virtual_stages", 1))
        weights = given.pop("stage_weights", None)
        listed = [] if weights is None else _list("stage_weights", weights)
        pipeline = Pipeline(stages, chunks, tuple(listed))
        if given.get("sequence_parts") == AUTO:
            given["sequence_parts"] = auto_parts(stages)
        return cls(lengths=np.asarray(lengths), cost_model=model, pipeline=pipeline, **given)

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", _lengths(self.lengths))
        if not isinstance(self.cost_model, CostModel):
            raise ValueError(f"cost_model is {self.cost_model!r}; expected a CostModel")
        for name in ("offload", "recompute"):
            found = getattr(self, name)
            if not isinstance(found, str) or found not in OFFLOAD:
                raise ValueError(f"{name} is {found!r}; expected one of {', '.join(OFFLOAD)}")
        _bytes("host_memory_bytes", self.host_memory_bytes)
        for name in _INTEGERS:
            object.__setattr__(self, name, _integer(name, getattr(self, name)))
        _check_parts(self.sequence_parts, self.pipeline)
        if type(self.streams) is not bool:
            raise ValueError(f"streams is {self.streams!r}; expected True or False")
        if self.streams and self.pipeline.stages > 1 and not self.cost_model.input_share:
            raise ValueError(
                f"streams with {self.pipeline.stages} pipeline stages and a cost model whose "
                "input_share is 0; expected the part of a layer's activations that its input is, "
                "which stages keep of every part: add it to the cost model"
            )
        if self.recompute == "auto" and self.expert_parallel_size > 1:
            raise ValueError(
                f"recompute is 'auto' with expert_parallel_size {self.expert_parallel_size}; "
                "expected 'off': ranks that share experts compute every layer together"
            )
        if self.recompute == "auto" and not self.cost_model.input_share:
            raise ValueError(
                "recompute is 'auto' with a cost model whose input_share is 0; expected the part "
                "of a layer's activations that its input is: add it to the cost model"
            )
        if self.max_length is not None:
            object.__setattr__(self, "max_length", _integer("max_length", self.max_length))

    @cached_property
    def linear_tokens(self) -> float:
        """Where parts of micro-batches are cut."""
        return linear_tokens(int(self.lengths.max()), self.cost_model)

    @cached_property
    def core(self) -> _core.Problem:
        """The same for the C++ planner."""
        cost = self.cost_model
        table = cost.attention_table
        layers = cost.num_layers * self.pipeline.stages
        return _core.Problem(
            lengths=self.lengths,
            num_ranks=self.ranks,
            tokens_per_rank=self.tokens_per_rank,
            slice_multiple=self.slice_multiple,
            max_length=self.max_length or int(self.lengths.max()),
            pipeline_stages=self.pipeline.stages,
            model_chunks=self.pipeline.chunks,
            row_weights=self.pipeline.row_weights,
            offload=self.offload == "auto",
            host_memory_bytes=_bytes("host_memory_bytes", self.host_memory_bytes),
            streams=self.streams,
            recompute=self.recompute == "auto",
            effort=self.effort,
            sequence_parts=self.sequence_parts,
            linear_tokens=self.linear_tokens,
            expert_ranks=self.expert_parallel_size,
            rank_speeds=np.array(cost.rank_speeds, dtype=np.float64),
            cost_model={
                **{name: getattr(cost, name) for name in _OF_COSTS},
                "attention_lengths": table.lengths,
                "attention_seconds": table.seconds,
                "block_all_layers_s": 2 * layers * cost.block_s,
                "intra_node_hop_all_layers_s": layers * cost.intra_node_hop_s,
                "inter_node_hop_all_layers_s": layers * cost.inter_node_hop_s,
            },
        )


def _check_parts(sequence_parts: int, pipeline: Pipeline) -> None:
    if sequence_parts < 1:
        raise ValueError(f"sequence_parts is {sequence_parts}; expected at least 1")
    if sequence_parts > 1 and pipeline.stages == 1:
        raise ValueError(
            f"sequence_parts is {sequence_parts} with {pipeline.stages} pipeline stages; expected "
            "1, or several stages"
        )


def _with_ranks(
    cost_model: CostModel | None, ranks_per_node: int | None, rank_speeds: Sequence[float] | None
) -> CostModel:
    """The cost model, LLaMA-7B's if none is given, with what is said of its ranks instead."""
    changes: dict[str, Any] = {}
    if ranks_per_node is not None:
        changes["ranks_per_node"] = _integer("ranks_per_node", ranks_per_node)
    if rank_speeds is not None:
        changes["rank_speeds"] = _list("rank_speeds", rank_speeds)
    if cost_model is None:
        cost_model = LLAMA_7B
    elif not isinstance(cost_model, CostModel):
        raise ValueError(f"cost_model is {cost_model!r}; expected a CostModel")
    # where nothing changes it need not be checked again
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


def _bytes(name: str, value: float | None) -> float:
    """Infinitely many for None."""
    most = math.inf if value is None else value
    if isinstance(most, bool) or not isinstance(most, int | float) or not most >= 0:
        raise ValueError(f"{name} is {most!r}; expected a number of bytes")
    return float(most)


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
