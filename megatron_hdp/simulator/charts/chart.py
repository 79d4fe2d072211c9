"""A chart as plain values, for a picture and for a page alike."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

KINDS = ("bars", "stacked", "lines", "stairs", "piles")
UNITS = ("", "s", "bytes", "share")
COLOURS = (  # ColorBrewer's Set2 and Dark2, light ones first
    *("#66c2a5", "#fc8d62", "#8da0cb", "#e78ac3", "#a6d854", "#ffd92f", "#e5c494", "#b3b3b3"),
    *("#1b9e77", "#d95f02", "#7570b3", "#e7298a", "#66a61e", "#e6ab02", "#a6761d", "#666666"),
)


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Series over one axis."""

    kind: str
    """``bars`` side by side, areas ``stacked`` upon each other, ``lines``, ``stairs`` that keep a
    value until the next place, or ``piles``: lying bars, made of all series."""
    title: str
    x_label: str
    y_label: str
    x: Sequence[str] | Sequence[float] = ()
    """Names of bars and piles, else places; they rise."""
    series: Mapping[str, Sequence[float | None]]
    """Values by name, one a place; None: there is none."""
    own_x: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Places of series that do not have those of ``x``."""
    marks: Sequence[float] = ()
    """Places where something begins."""
    limits: Mapping[str, float] = field(default_factory=dict)
    """Values to compare with, by name."""
    log: bool = False
    """Whether the values' axis is logarithmic."""
    colours: Sequence[str] = ()
    """Of the series; by default those of `colour_of`."""
    x_unit: str = ""
    """Of places: "s", or none."""
    unit: str = ""
    """Of values: "s", "bytes", "share" or none."""
    x_end: float | None = None
    """Where the axis of places ends; by default at the last one."""
    note: str = ""
    """A line below the title."""

    def __post_init__(self) -> None:
        assert self.kind in KINDS, self.kind
        assert self.unit in UNITS and self.x_unit in UNITS, (self.x_unit, self.unit)
        for name, values in self.series.items():
            assert len(values) == len(self.own_x.get(name, self.x)), (self.title, name)


def colour_of(i: int) -> str:
    """Return the colour of a chart's series."""
    return COLOURS[i % len(COLOURS)]
