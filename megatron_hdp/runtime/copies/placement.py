"""Who keeps whose copy, and which version can be put together again when ranks are lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

Versions = Sequence[Sequence[object]]
"""What a process holds whole: ``[version, members, owners]`` of each set of shards, as JSON gives
it. ``members`` are those among whom the state was spread, ``owners`` whose shards of it are here.
"""


@dataclass(frozen=True)
class Chosen:
    """A version of the state that can be put together again."""

    version: int
    members: tuple[int, ...]
    """Among whom it was spread."""


def neighbours(hosts: Sequence[str], domains: Sequence[int] | None = None) -> tuple[int, ...]:
    """The rank that keeps each rank's copy; every rank keeps one.

    It is on another host, and in another domain, for as many ranks as possible: ranks that leave
    together stand together in a line, and each one's neighbour is further on in it by as many as
    the largest such group has.

    Args:
        hosts: each rank's.
        domains: what leaves as a whole besides a host, each rank's; default: each rank alone. Where
            not both can differ, the domain does.
    """
    num_ranks = len(hosts)
    choices: list[list[Hashable]] = [list(hosts)]
    if domains is not None:
        choices = [_joined(hosts, domains), list(domains), list(hosts)]
    units = next((one for one in choices if 2 * _largest(one) <= num_ranks), choices[-1])
    sizes = Counter(units)
    first = {unit: units.index(unit) for unit in sizes}
    line = sorted(range(num_ranks), key=lambda rank: (-sizes[units[rank]], first[units[rank]]))
    jump = _largest(units) % num_ranks or 1
    keepers = [0] * num_ranks
    for place, rank in enumerate(line):
        keepers[rank] = line[(place + jump) % num_ranks]
    return tuple(keepers)


def exposed(hosts: Sequence[str], keepers: Sequence[int]) -> tuple[int, ...]:
    """The ranks whose copy is lost with their own host."""
    return tuple(rank for rank, keeper in enumerate(keepers) if hosts[rank] == hosts[keeper])


def choose_version(by_uid: Mapping[int, Versions]) -> Chosen | None:
    """The newest state of which a survivor holds each shard; None: it is lost for good.

    Args:
        by_uid: what each survivor holds.
    """
    whole = _whole(by_uid)
    return whole[-1] if whole else None


def choose_common(places: Sequence[Mapping[int, Versions]]) -> list[Chosen] | None:
    """The same for states that belong together, as those of pipeline stages do: of one version.

    Args:
        places: for each of them what its survivors hold.
    """
    found = [{one.version: one for one in _whole(by_uid)} for by_uid in places]
    common = set.intersection(*(set(one) for one in found)) if found else set()
    if not common:
        return None
    return [one[max(common)] for one in found]


def _whole(by_uid: Mapping[int, Versions]) -> list[Chosen]:
    """Those that survivors hold all shards of, the best last.

    Of one version that several epochs have, the best is that whose rarest shard has most holders:
    another death must not lose what is left of one that had died before.
    """
    owners: dict[Chosen, Counter[object]] = {}
    for held in by_uid.values():
        for version, members, here in held:
            key = Chosen(int(version), tuple(members))  # type: ignore[call-overload, arg-type]
            owners.setdefault(key, Counter()).update(here)  # type: ignore[call-overload]

    def worth(one: Chosen) -> tuple[object, ...]:
        here = owners[one]
        return one.version, min(here.values()), here.total() / len(one.members), one.members

    return sorted((one for one, here in owners.items() if set(here) >= set(one.members)), key=worth)


def _largest(units: Sequence[Hashable]) -> int:
    return max(Counter(units).values())


def _joined(hosts: Sequence[str], domains: Sequence[int]) -> list[Hashable]:
    """A name for each rank: the same for those that a chain of hosts and domains connects."""
    names = list(range(len(hosts)))
    while True:
        least: dict[Hashable, int] = {}
        for name, host, domain in zip(names, hosts, domains, strict=True):
            for key in (("host", host), ("domain", domain)):
                least[key] = min(name, least.get(key, name))
        joined = [
            min(least["host", host], least["domain", domain])
            for host, domain in zip(hosts, domains, strict=True)
        ]
        if joined == names:
            return list(names)
        names = joined
