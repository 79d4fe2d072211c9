"""Before ranks communicate they wait for each other, and compare what must be equal.

A rank that prepares its data for an hour holds all others up. In a collective they would give up on
it after minutes; in `meet` they wait as long as it lives. The heartbeats find out if it is dead.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections import defaultdict
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron_hdp.runtime.host_to_device import numbers_to_device
from megatron_hdp.runtime.timeline import MEETING, Timeline

_LOOK_S = 0.05
_MOST_S = 1.0  # between looks, once it takes long
_numbers = itertools.count()


class DisagreementError(RuntimeError):
    """Ranks of one job hold different values of something that must be the same on all of them."""


def fingerprint(*parts: object) -> int:
    """64 bits over `parts` (bytes, or anything by its repr), the same in every process."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        data = part if isinstance(part, bytes) else repr(part).encode()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return int.from_bytes(digest.digest(), "little")


def require_agreement(facts: Mapping[str, int], device: torch.device) -> None:
    """Returns if every rank of the job gave equal facts; costs one all-reduce of a few words.

    Args:
        facts: name -> unsigned 64-bit value; the same names in the same order on every rank.
        device: where the backend wants its tensors.

    Raises:
        DisagreementError: on every rank, naming each fact that differs and who holds which value.
    """
    signed = [_signed(value) for value in facts.values()]
    values = numbers_to_device(signed, torch.int64, device)
    extremes = torch.stack((values, ~values))  # max(~x) = ~min(x)
    dist.all_reduce(extremes, dist.ReduceOp.MAX)
    if torch.equal(extremes[0], ~extremes[1]):
        return
    rows = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, values)
    table = torch.stack(rows).cpu()
    lines = [
        f"  {name}: {_who(table[:, column])}"
        for column, name in enumerate(facts)
        if len(table[:, column].unique()) > 1
    ]
    raise DisagreementError(
        "ranks disagree on what to run; the job stops before it would hang:\n"
        + "\n".join(lines)
        + "\nexpected one value each: start every rank with the same data, flags, cost model and "
        "version of megatron_hdp"
    )


def restart_meetings() -> None:
    """Counts anew: the ranks of a job are others, or have another store."""
    global _numbers
    _numbers = itertools.count()


def meet(timeline: Timeline) -> None:
    """Returns once every rank of the job has called it as often as this one.

    Args:
        timeline: where the wait is noted.
    """
    if dist.get_world_size() == 1:
        return
    store = distributed_c10d._get_default_store()
    key = f"megatron_hdp/meeting/{next(_numbers)}"
    num_here, pause_s = store.add(key, 1), _LOOK_S
    with timeline.noted(MEETING):
        while num_here < dist.get_world_size():
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _MOST_S)
            num_here = store.add(key, 0)


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def _who(column: torch.Tensor) -> str:
    ranks_of = defaultdict(list)
    for rank, value in enumerate(column.tolist()):
        ranks_of[value].append(rank)
    groups = sorted(ranks_of.items(), key=lambda item: -len(item[1]))
    return "; ".join(f"{value % 2**64:#018x} on {_shown(ranks)}" for value, ranks in groups[:4]) + (
        "; ..." if len(groups) > 4 else ""
    )


def _shown(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}"
