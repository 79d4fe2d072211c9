"""Durations and sizes in the unit that keeps them readable."""


def seconds(value: float) -> str:
    """Return a duration in the unit that keeps it readable."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if value >= scale:
            return f"{value / scale:.3f} {unit}"
    return f"{value * 1e6:.3f} us"


def num_bytes(value: float) -> str:
    """Return a size in decimal units."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= scale:
            return f"{value / scale:.2f} {unit}"
    return f"{value:.0f} B"
