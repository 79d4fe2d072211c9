"""The plan as JSON, version 1: the form for people and tools."""

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import orjson

from megatron_hdp.arrays import AnyArray, Int64Array
from megatron_hdp.planner.flat_plan import FlatPlan

VERSION = 1

PLAN_KEYS = {
    "version": "Of this format: 1.",
    "num_ranks": "HDP ranks.",
    "tokens_per_rank": "Capacity C: tokens that a rank holds in one micro-batch.",
    "strategy": "What made the plan.",
    "slice_multiple": "A chunk of a sequence is padded to a multiple of this; 1 if left out.",
    "linear_tokens": "Says where parts of micro-batches are cut: what a token takes besides "
    "attention, in keys that it could see instead; left out where all run whole.",
    "recomputed_share": "Of its activations what a recomputed micro-batch holds at its fullest, 0 "
    "to 1; left out where none is.",
    "sequence_lengths": "Tokens of each sequence of the global batch; a sequence's number is its "
    "place here, from 0.",
    "micro_batches": "All micro-batches in one global launch order.",
    "summary": "Figures for people; may be left out, and the fingerprint leaves it out.",
}
"""What the keys of a plan mean."""

MICRO_BATCH_KEYS = {
    "ranks": "HDP ranks in ring order.",
    "sequences": "Numbers of the sequences that are sharded over all of these ranks.",
    "local": "Whole sequences on one member: their numbers, by its rank; may be left out.",
    "offload_ratio": "Share of the activations that goes to host memory, 0 to 1.",
    "position": "Its place in the lists of all its ranks, from 0, in plans for experts across HDP "
    "ranks: places without a micro-batch are padding. Left out: it is the next one of each rank.",
    "parts": "Parts in which it runs, cut so that they take equal time. Left out: it runs whole.",
    "streams": "true: it is a stream. Its parts have equal tokens, keep keys and values alone "
    "(the last ones on the host: offload_ratio is their share) and are computed again in backward. "
    "Left out: it is none.",
    "recompute": "true: it keeps the inputs of layers alone, and is computed again in backward, "
    "layer by layer. Left out: it is not.",
}
"""What the keys of a micro-batch mean."""

SUMMARY_KEYS = {
    "makespan_s": "Seconds until the last rank is done, by the cost model, if micro-batches run "
    "whole; so are the figures below.",
    "lower_bound_s": "No plan takes less: total compute over all ranks' speed, or the longest "
    "sequence's own time.",
    "efficiency": "Total compute / ranks / makespan.",
    "planning_ms": "What planning took.",
    "ring_tokens": "Tokens that cross from one rank to the next in the forward pass, in all.",
    "max_tokens_on_a_rank": "Padded tokens of the fullest rank in its fullest micro-batch.",
}
"""What the figures of a summary mean."""

LOCKSTEP_KEYS = {
    "num_positions": "Places in the longest list of a rank.",
    "padding_share": "Share of the places in all ranks' lists that hold no micro-batch.",
}
"""What a summary says besides where HDP ranks share experts; times are those of lockstep then."""

_OPTIONAL = {"slice_multiple", "linear_tokens", "summary", "local", "position", "parts"}
_OPTIONAL |= {"streams", "recompute", "recomputed_share"}


def to_json(plan: FlatPlan) -> bytes:
    """One line a plan's scalar, one micro-batch after the other in launch order."""
    data: dict[str, Any] = {
        "version": VERSION,
        "num_ranks": plan.num_ranks,
        "tokens_per_rank": plan.tokens_per_rank,
        "strategy": plan.strategy,
    }
    if plan.slice_multiple != 1:
        data["slice_multiple"] = plan.slice_multiple
    if plan.num_parts is not None:
        data["linear_tokens"] = plan.linear_tokens
    if plan.recomputed is not None:
        data["recomputed_share"] = plan.recomputed_share
    data["sequence_lengths"] = plan.lengths.tolist()
    data["micro_batches"] = [_micro_batch_to_json(plan, m) for m in range(plan.num_micro_batches)]
    data["summary"] = dict(plan.summary)
    return orjson.dumps(data)


def _micro_batch_to_json(plan: FlatPlan, m: int) -> dict[str, Any]:
    micro_batch = plan.micro_batch(m)
    data: dict[str, Any] = {"ranks": micro_batch.ranks, "sequences": micro_batch.sequences}
    if micro_batch.local:
        data["local"] = {str(rank): ids for rank, ids in micro_batch.local.items()}
    data["offload_ratio"] = micro_batch.offload_ratio
    if plan.positions is not None:
        data["position"] = int(plan.positions[m])
    if plan.num_parts is not None and plan.num_parts[m] > 1:
        data["parts"] = int(plan.num_parts[m])
    if plan.streams is not None and plan.streams[m]:
        data["streams"] = True
    if plan.recomputed is not None and plan.recomputed[m]:
        data["recompute"] = True
    return data


def fields_from_json(text: bytes | str) -> dict[str, Any]:
    """The fields of the ``Plan`` that ``to_json`` wrote.

    Raises:
        ValueError: not JSON, another version, a key missing, unknown or of a wrong type.
    """
    try:
        data = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"plan: not JSON: {error}") from error
    _check_object("plan", data)
    if data.get("version") != VERSION:
        raise ValueError(
            f"plan: version is {data.get('version')!r}; expected {VERSION}: make the plan again "
            "with this release"
        )
    _check_keys("plan", data, PLAN_KEYS)
    return {
        "num_ranks": _positive("num_ranks", data["num_ranks"]),
        "tokens_per_rank": _positive("tokens_per_rank", data["tokens_per_rank"]),
        "slice_multiple": _positive("slice_multiple", data.get("slice_multiple", 1)),
        "strategy": _string("strategy", data["strategy"]),
        "lengths": _integers("sequence_lengths", data["sequence_lengths"]),
        "linear_tokens": _number("linear_tokens", data.get("linear_tokens", 0.0)),
        "recomputed_share": _number("recomputed_share", data.get("recomputed_share", 1.0)),
        "summary": _summary(data.get("summary", {})),
        **_micro_batches(data["micro_batches"]),
    }


def _micro_batches(items: Any) -> dict[str, Any]:
    if not isinstance(items, list):
        raise ValueError(f"plan: micro_batches is {_kind(items)}; expected a list")
    rings, sharded, local_ranks, local_sequences, ratios = [], [], [], [], []
    for m, item in enumerate(items):
        where = f"micro_batches[{m}]"
        _check_object(where, item)
        _check_keys(where, item, MICRO_BATCH_KEYS)
        rings.append(_integers(f"{where}.ranks", item["ranks"], np.int32))
        sharded.append(_integers(f"{where}.sequences", item["sequences"]))
        pairs = _local_pairs(f"{where}.local", item.get("local", {}))
        local_ranks.append([rank for rank, _ in pairs])
        local_sequences.append([sequence for _, sequence in pairs])
        ratios.append(_number(f"{where}.offload_ratio", item["offload_ratio"]))
    return {
        "rank_offsets": _offsets(rings),
        "ranks": _concatenated(rings, np.int32),
        "sequence_offsets": _offsets(sharded),
        "sequences": _concatenated(sharded),
        "local_offsets": _offsets(local_ranks),
        "local_ranks": list(itertools.chain.from_iterable(local_ranks)),
        "local_sequences": list(itertools.chain.from_iterable(local_sequences)),
        "offload_ratios": ratios,
        "positions": _positions(items),
        "num_parts": _num_parts(items),
        "streams": _switches(items, "streams"),
        "recomputed": _switches(items, "recompute"),
    }


def _positions(items: list[Any]) -> list[int] | None:
    given = ["position" in item for item in items]
    if not any(given):
        return None
    if not all(given):
        raise ValueError(
            f"plan: micro_batches[{given.index(False)}] lacks the key 'position', which "
            f"micro_batches[{given.index(True)}] has: all of them have it, or none"
        )
    for m, item in enumerate(items):
        if type(item["position"]) is not int or not 0 <= item["position"] < 2**62:
            raise ValueError(
                f"plan: micro_batches[{m}].position is {item['position']!r}; expected an integer "
                ">= 0"
            )
    return [item["position"] for item in items]


def _num_parts(items: list[Any]) -> list[int] | None:
    if not any("parts" in item for item in items):
        return None
    where = "micro_batches[{}].parts"
    return [_positive(where.format(m), item.get("parts", 1)) for m, item in enumerate(items)]


def _switches(items: list[Any], name: str) -> list[bool]:
    found = [item.get(name, False) for item in items]
    for m, one in enumerate(found):
        if type(one) is not bool:
            raise ValueError(f"plan: micro_batches[{m}].{name} is {one!r}; expected true or false")
    return found


def _local_pairs(where: str, local: Any) -> list[tuple[int, int]]:
    """(rank, sequence) of every local sequence, ascending by rank."""
    _check_object(where, local)
    by_rank = {}
    for key, ids in local.items():
        if not (key.isascii() and key.isdigit() and int(key) < 2**31):
            raise ValueError(f"plan: {where} has the key {key!r}; expected a rank")
        by_rank[int(key)] = _integers(f"{where}[{key!r}]", ids).tolist()
    return [(rank, sequence) for rank in sorted(by_rank) for sequence in by_rank[rank]]


def _offsets(parts: Iterable[Any]) -> Int64Array:
    return np.cumsum([0, *map(len, parts)], dtype=np.int64)


def _concatenated(parts: list[AnyArray], dtype: type[np.generic] = np.int64) -> AnyArray:
    return np.concatenate(parts) if parts else np.array([], dtype)


def _integers(name: str, values: Any, dtype: type[np.signedinteger[Any]] = np.int64) -> AnyArray:
    if isinstance(values, list) and all(type(value) is int for value in values):
        limits = np.iinfo(dtype)
        if all(limits.min <= value <= limits.max for value in values):
            return np.array(values, dtype)
    raise ValueError(f"plan: {name} is {_kind(values)}; expected a list of integers")


def _positive(name: str, value: Any) -> int:
    if type(value) is not int or not 1 <= value < 2**62:
        raise ValueError(f"plan: {name} is {value!r}; expected an integer >= 1")
    return value


def _number(name: str, value: Any) -> float:
    if type(value) not in (int, float):
        raise ValueError(f"plan: {name} is {value!r}; expected a number")
    return float(value)


def _string(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"plan: {name} is {value!r}; expected a string")
    return value


def _summary(value: Any) -> dict[str, float]:
    _check_object("summary", value)
    return {key: _number(f"summary.{key}", number) for key, number in value.items()}


def _check_object(where: str, value: Any) -> None:
    if not isinstance(value, dict):
        raise ValueError(f"plan: {where} is {_kind(value)}; expected an object")


def _check_keys(where: str, data: dict[str, Any], known: Mapping[str, str]) -> None:
    missing = sorted(known.keys() - _OPTIONAL - data.keys())
    if missing:
        raise ValueError(f"plan: {where} lacks the key {missing[0]!r}")
    unknown = sorted(data.keys() - known.keys())
    if unknown:
        expected = ", ".join(sorted(known))
        raise ValueError(f"plan: {where} has the unknown key {unknown[0]!r}; expected {expected}")


def _kind(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}... ({type(value).__name__})"
