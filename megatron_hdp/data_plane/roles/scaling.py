"""How many loaders a source has: more while it is behind, fewer while they are idle.

The number never changes which sequences form a step or their tokens: any loader can read any row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron_hdp.data.spec import LoadersSpec

_BUSY, _IDLE = 0.8, 0.2  # shares of the time that a loader works
_PATIENCE = 3  # looks in a row that say the same


@dataclass(frozen=True)
class Seen:
    """One source, between two looks."""

    busy_share: float
    """Mean share of the time that its loaders worked."""
    is_behind: bool
    """Whether a step waited for it: nothing of it lay ready when it was asked for."""
    memory_mb: float
    """Of its largest loader; of one that sources share, an equal part."""


@dataclass
class Scaling:
    """Decides the number of loaders of each source of a node's plane."""

    spec: LoadersSpec
    num_nodes: int = 1
    wanted: dict[str, int] = field(default_factory=dict)
    """By source."""
    _trend: dict[str, int] = field(default_factory=dict)

    def look(self, seen: Mapping[str, Seen]) -> dict[str, int]:
        """Return how many loaders each source should have from now on.

        One more where a source was behind, or its loaders were busy all the time, in some looks in
        a row; one less where they were idle. All of them keep within ``min``, ``max`` and the
        memory of their nodes, of which a loader of unknown size takes nothing yet.
        """
        spec = self.spec
        for source, one in seen.items():
            wanted = self.wanted.setdefault(source, spec.min)
            trend = self._trend.get(source, 0)
            if one.is_behind or one.busy_share > _BUSY:
                trend = max(trend, 0) + (2 if one.is_behind else 1)
            elif one.busy_share < _IDLE:
                trend = min(trend, 0) - 1
            else:
                trend = 0
            if trend >= _PATIENCE and wanted < spec.max and self._has_room(seen, source):
                self.wanted[source], trend = wanted + 1, 0
            elif trend <= -_PATIENCE and wanted > spec.min:
                self.wanted[source], trend = wanted - 1, 0
            self._trend[source] = trend
        return dict(self.wanted)

    def _has_room(self, seen: Mapping[str, Seen], source: str) -> bool:
        used_mb = sum(one.memory_mb * self.wanted.get(name, 1) for name, one in seen.items())
        return used_mb + seen[source].memory_mb <= self.spec.memory_mb * self.num_nodes
