"""A rank's shard of the distributed optimizer as pieces of parameters by name, read and written.

Where a shard lies in Megatron's buffers depends on the number of ranks: the ends of buckets are
padded to it. What is read here names parameters and ranges in them, so that any number of ranks
can write it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_hdp.megatron import parallel
from megatron_hdp.megatron.finite import named_parameters
from megatron_hdp.megatron.optimizer.torch_adam import create_state, is_torch_adam
from megatron_hdp.runtime.copies import Layout, Piece, Snapshot

ROWS = ("param", "exp_avg", "exp_avg_sq")
"""Kinds of state: the main parameter, and Adam's two moments."""

_STEP = "step"


class _Owned(NamedTuple):
    """A range of a parameter that this rank's optimizer holds."""

    part: DistributedOptimizer
    parameter: torch.nn.Parameter
    piece: Piece


class OptimizerShard:
    """This rank's shard, of all optimizers of its parts of the model.

    Args:
        optimizer: as `build_optimizer` makes it.
        chunks: the parts of the model that it updates.

    Raises:
        ValueError: it is not Megatron's distributed optimizer with Adam in plain memory.
    """

    def __init__(
        self, optimizer: MegatronOptimizer, chunks: Sequence[DistributedDataParallel]
    ) -> None:
        self._parts = distributed_parts(optimizer)
        self._chunks = list(chunks)
        self._owned = list(self._ranges())
        self._stream: torch.cuda.Stream | None = None
        self._ready: torch.cuda.Event | None = None
        dtypes = {_main_dtype(parameter) for chunk in chunks for parameter in chunk.parameters()}
        if len(dtypes) > 1:
            raise ValueError(
                f"found main parameters of {' and '.join(sorted(map(str, dtypes)))}, expected one "
                "type: --hdp-optimizer-copies off"
            )
        (dtype,) = dtypes or {torch.float32}
        self.layout = Layout(ROWS, dtype, tuple(one.piece for one in self._owned))

    @property
    def facts(self) -> dict[str, Any]:
        """What belongs to a version besides the pieces: the number of Adam's steps."""
        return {_STEP: next((step for part in self._parts if (step := _step(part))), 0)}

    def mark(self) -> None:
        """Says that the state is that of the next `read`, once what was launched so far is done."""
        if self._is_on_gpu:
            self._ready = torch.cuda.Event()
            self._ready.record()

    def read(self, snapshot: Snapshot) -> None:
        """Copies the state that `mark` meant to host memory; returns when it is there.

        On a GPU a stream of its own copies, less urgent than all others.
        """
        with torch.no_grad():
            if self._is_on_gpu:
                self._read_beside(snapshot)
            else:
                self._copy(snapshot)

    def write(self, states: Mapping[Piece, torch.Tensor], facts: Mapping[str, Any]) -> None:
        """Sets the shard, and all ranks' weights from everybody's main parameters.

        Every rank of the parameters' group must call this.

        Args:
            states: ``[rows, count]`` for each piece of `layout`.
            facts: as those that were read.
        """
        for part in self._parts:
            _require_state(part)
        with torch.no_grad():
            for part, parameter, piece in self._owned:
                values = dict(zip(ROWS, states[piece], strict=True))
                step = torch.tensor(float(facts[_STEP]))
                part._set_main_param_and_optimizer_states(parameter, {**values, _STEP: step})
            for part in self._parts:
                _set_step(part, facts[_STEP])
                part._copy_main_params_to_model_params()
            for chunk in self._chunks:
                chunk.start_param_sync(force_sync=True)

    def _ranges(self) -> Iterator[_Owned]:
        names = {id(parameter): name for name, parameter in named_parameters(self._chunks)}
        at = 0
        for part in self._parts:
            for buffer_ranges in part.gbuf_ranges:
                ((_, bucket_ranges),) = buffer_ranges.items()
                for ranges in bucket_ranges:
                    for parameter, place in ranges["param_map"].items():
                        mine = place["param"]
                        name = _expert_place(parameter) + names[id(parameter)]
                        piece = Piece(name, mine.start, mine.end, at)
                        at += piece.size
                        yield _Owned(part, parameter, piece)

    @property
    def _is_on_gpu(self) -> bool:
        return any(one.parameter.is_cuda for one in self._owned[:1])

    def _read_beside(self, snapshot: Snapshot) -> None:
        device = self._owned[0].parameter.device
        with torch.cuda.device(device):
            if self._stream is None:
                least_urgent, _ = torch.cuda.Stream.priority_range()
                self._stream = torch.cuda.Stream(device, priority=least_urgent)
            with torch.cuda.stream(self._stream):
                if self._ready is not None:
                    self._ready.wait()
                self._copy(snapshot)
            self._stream.synchronize()

    def _copy(self, snapshot: Snapshot) -> None:
        for part, parameter, piece in self._owned:
            states = _states(part, parameter)
            for row, kind in zip(snapshot.values, ROWS, strict=True):
                target = row[piece.at : piece.at + piece.size]
                if kind in states:
                    target.copy_(states[kind].view(-1), non_blocking=True)
                else:  # Adam makes its moments in its first step
                    target.zero_()


def _states(part: DistributedOptimizer, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
    """As Megatron gives it, but for an Adam that has not stepped: asking would leave a mark."""
    group, order = part.model_param_group_index_map[parameter]
    main = part.optimizer.param_groups[group]["params"][order]
    if not part.optimizer.state.get(main):
        return {"param": main}
    found: dict[str, torch.Tensor] = part._get_main_param_and_optimizer_states(parameter)
    return found


def distributed_parts(optimizer: MegatronOptimizer) -> list[DistributedOptimizer]:
    """The distributed optimizers of which `optimizer` consists.

    Raises:
        ValueError: it is none, or one whose shards cannot be copied as they are.
    """
    parts = list(getattr(optimizer, "chained_optimizers", [optimizer]))
    for part in parts:
        if not isinstance(part, DistributedOptimizer):
            raise ValueError(
                f"found a {type(part).__name__}, expected the distributed optimizer, whose shards "
                "are copied: pass --use-distributed-optimizer or --hdp-optimizer-copies off"
            )
        for flag in ("use_precision_aware_optimizer", "optimizer_cpu_offload"):
            if getattr(part.config, flag, False):
                raise ValueError(
                    f"--hdp-optimizer-copies on cannot copy what --{flag.replace('_', '-')} keeps "
                    "outside Megatron's main parameters: leave one of them out"
                )
        if part.config.optimizer != "adam":
            raise ValueError(
                f"found --optimizer {part.config.optimizer}, expected adam: "
                "--hdp-optimizer-copies off"
            )
    return [part for part in parts if not part.is_stub_optimizer]


def _main_dtype(parameter: torch.nn.Parameter) -> torch.dtype:
    return torch.promote_types(parameter.dtype, torch.float32)


def _expert_place(parameter: torch.nn.Parameter) -> str:
    """Tells experts apart that have one name on the ranks between which they are spread."""
    if not parallel.is_spread_expert(parameter):
        return ""
    part = parallel_state.get_expert_tensor_parallel_rank()
    return f"experts {parallel_state.get_expert_model_parallel_rank()}, part {part}: "


def _step(part: DistributedOptimizer) -> int:
    """How often Adam has updated the shard; some Adams count by group, torch's by parameter."""
    adam = part.optimizer
    counts = [group[_STEP] for group in adam.param_groups if _STEP in group]
    counts += [state[_STEP] for state in adam.state.values() if _STEP in state]
    return int(next(iter(counts), 0))


def _set_step(part: DistributedOptimizer, step: int) -> None:
    """For Adams that count by group; torch's has its count among the states."""
    if not is_torch_adam(part.optimizer):
        for group in part.optimizer.param_groups:
            group[_STEP] = step


def _require_state(part: DistributedOptimizer) -> None:
    """Makes the moments of an Adam that has not stepped; they are overwritten."""
    if is_torch_adam(part.optimizer):
        create_state(part.optimizer)
    elif not part.optimizer.state:
        part._init_optimizer_states_with_dummy_values()
