"""A chart as plain values, for a picture and for a page alike."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

KINDS = ("bars", "stacked", "lines")
COLOURS = (  # ColorBrewer's Set2 and Dark2, light ones first
    *("#66c2a5", "#fc8d62", "#8da0cb", "#e78ac3", "#a6d854", "#ffd92f", "#e5c494", "#b3b3b3"),
    *("#1b9e77", "#d95f02", "#7570b3", "#e7298a", "#66a61e", "#e6ab02", "#a6761d", "#666666"),
)


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Series over one axis."""

    kind: str
    """``bars`` side by side, areas ``stacked`` upon each other, or ``lines``."""
    title: str
    x_label: str
    y_label: str
    x: Sequence[str] | Sequence[float]
    """Names of bars, else places; they rise."""
    series: Mapping[str, Sequence[float]]
    """Values by name, one a place."""
    marks: Sequence[float] = ()
    """Places where something begins."""
    log: bool = False
    """Whether the values' axis is logarithmic."""

    def __post_init__(self) -> None:
        assert self.kind in KINDS, self.kind
        assert all(len(values) == len(self.x) for values in self.series.values()), self.title


def colour_of(i: int) -> str:
    """Return the colour of a chart's series."""
    return COLOURS[i % len(COLOURS)]
