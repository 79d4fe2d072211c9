"""A rank's step in one flat buffer: a header that says where each array lies, then the arrays.

The buffer begins with a prefix of 16 bytes, which holds the header's length, and the header, a JSON
object. Arrays follow at multiples of 64 bytes, so reading makes views of the buffer and copies
nothing. Fields are taken from the dataclasses: a new one travels without a change here.
"""

from __future__ import annotations

import json
import struct
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, TypeVar

import numpy as np
import orjson

from megatron_hdp.arrays import AnyArray
from megatron_hdp.data.mixture import Position, Step
from megatron_hdp.data.steps import (
    LostSource,
    PlannedStep,
    RankMicroBatch,
    RankShare,
    RankStep,
    StepTotals,
)
from megatron_hdp.planner import Plan

ALIGNMENT_BYTES = 64
_MAGIC = b"HDPSTEP1"
_PREFIX = struct.Struct("<8sQ")
_TYPES = ("<i8", "<f8", "|b1", "|u1")

Record = TypeVar("Record", RankShare, RankMicroBatch, Step)


@dataclass(frozen=True)
class Packed:
    """A step that is ready to be written."""

    header: bytes
    arrays: tuple[tuple[int, AnyArray], ...] = field(repr=False)
    """Each one with the byte of the data at which it begins."""
    num_bytes: int
    """Of the buffer that it needs."""

    def write_into(self, buffer: memoryview) -> None:
        """Write prefix, header and arrays into a buffer of at least `num_bytes` bytes."""
        _require_bytes(buffer, self.num_bytes)
        begin = _PREFIX.size
        _PREFIX.pack_into(buffer, 0, _MAGIC, len(self.header))
        buffer[begin : begin + len(self.header)] = self.header
        data = _data_start(self.header)
        for offset, array in self.arrays:
            _view(buffer, array.dtype.str, len(array), data + offset)[:] = array


def pack(step: RankStep) -> Packed:
    """Return how a rank's step lies in a buffer; arrays are not copied before they are written."""
    arrays = _Arrays()
    record = {
        "totals": step.totals.to_record(),
        "share": _record_of(step.share, arrays),
        "micro_batches": [_record_of(one, arrays) for one in step.micro_batches],
        "lost": [asdict(one) for one in step.lost],
        "planned": None if step.planned is None else _record_of_planned(step.planned, arrays),
    }
    # orjson would write NaN and infinity as null
    header = json.dumps(record, allow_nan=False, separators=(",", ":")).encode()
    return Packed(header, tuple(arrays.placed), _data_start(header) + arrays.num_bytes)


def unpack(buffer: memoryview) -> RankStep:
    """Return the step that `Packed.write_into` wrote; its arrays are views of the buffer.

    They can be written if the buffer can, and keep it alive.

    Raises:
        ValueError: the buffer holds no step, or ends before an array does.
    """
    header = _header_of(buffer)
    data = _data_start(header)
    record = orjson.loads(header)
    return RankStep(
        StepTotals.from_record(record["totals"]),
        _from_record(RankShare, record["share"], buffer, data),
        tuple(_from_record(RankMicroBatch, one, buffer, data) for one in record["micro_batches"]),
        tuple(LostSource(**{**one, "ids": tuple(one["ids"])}) for one in record["lost"]),
        record["planned"] and _planned(record["planned"], buffer, data),
    )


def _header_of(buffer: memoryview) -> bytes:
    _require_bytes(buffer, _PREFIX.size)
    magic, length = _PREFIX.unpack_from(buffer)
    if magic != _MAGIC:
        raise ValueError(
            f"found {magic!r} at the beginning of a step, expected {_MAGIC!r}: the segment "
            "is not a step, or another release wrote it; run one release on all of the node"
        )
    _require_bytes(buffer, _PREFIX.size + length)
    return bytes(buffer[_PREFIX.size : _PREFIX.size + length])


class _Arrays:
    """Arrays and the aligned places that they were given, one behind another."""

    def __init__(self) -> None:
        self.placed: list[tuple[int, AnyArray]] = []
        self.num_bytes = 0

    def place(self, array: AnyArray) -> dict[str, Any]:
        """Give an array the next place; return what finds it again."""
        assert array.dtype.str in _TYPES and array.ndim == 1, (array.dtype, array.shape)
        offset = _aligned(self.num_bytes)
        self.placed.append((offset, array))
        self.num_bytes = offset + array.nbytes
        return {"type": array.dtype.str, "count": len(array), "at": offset}


def _record_of_planned(one: PlannedStep, arrays: _Arrays) -> dict[str, Any]:
    step = replace(one.step, before=None, after=None)  # type: ignore[arg-type]
    return {
        "step": _record_of(step, arrays),
        "borders": [one.step.before.to_record(), one.step.after.to_record()],
        "plan": arrays.place(np.frombuffer(one.plan.to_json(), dtype=np.uint8)),
        "failure": one.failure,
    }


def _planned(record: dict[str, Any], buffer: memoryview, data: int) -> PlannedStep:
    before, after = map(Position.from_record, record["borders"])
    step = _from_record(Step, record["step"], buffer, data)
    text = record["plan"]
    plan = Plan.from_json(_view(buffer, text["type"], text["count"], data + text["at"]).tobytes())
    return PlannedStep(replace(step, before=before, after=after), plan, record["failure"])


def _record_of(one: RankShare | RankMicroBatch | Step, arrays: _Arrays) -> dict[str, Any]:
    record = {item.name: getattr(one, item.name) for item in fields(one)}
    for name, value in record.items():
        if isinstance(value, np.ndarray):
            record[name] = arrays.place(value)
    return record


def _from_record(
    kind: type[Record], record: dict[str, Any], buffer: memoryview, data: int
) -> Record:
    values: dict[str, Any] = {}
    for name, value in record.items():
        if isinstance(value, dict):
            values[name] = _view(buffer, value["type"], value["count"], data + value["at"])
        else:
            values[name] = tuple(value) if isinstance(value, list) else value
    return kind(**values)


def _view(buffer: memoryview, type_name: str, count: int, offset: int) -> AnyArray:
    if type_name not in _TYPES or min(count, offset) < 0:
        raise ValueError(
            f"found an array of {count} {type_name!r} at byte {offset}, expected one of {_TYPES}: "
            "the header is damaged, or another release wrote it"
        )
    dtype = np.dtype(type_name)
    _require_bytes(buffer, offset + count * dtype.itemsize)
    return np.ndarray((count,), dtype, buffer, offset)


def _require_bytes(buffer: memoryview, num_bytes: int) -> None:
    if buffer.nbytes < num_bytes:
        raise ValueError(
            f"found a buffer of {buffer.nbytes:,} bytes, expected at least {num_bytes:,} for the "
            "step in it: it is cut short, or belongs to another header"
        )


def _data_start(header: bytes) -> int:
    return _aligned(_PREFIX.size + len(header))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
