"""Learning while running: what measured steps say of the cost model and of single ranks.

Design: `docs/design/online.md`.
"""

from megatron_hdp.planner.online.filter import (
    COLUMNS,
    Corrections,
    FilterState,
    Finding,
    observe,
)
from megatron_hdp.planner.online.seen_costs import SeenCosts
from megatron_hdp.planner.online.speeds_file import FASTEST, SLOWEST, is_speed, speeds_in

__all__ = [
    "COLUMNS",
    "FASTEST",
    "SLOWEST",
    "Corrections",
    "FilterState",
    "Finding",
    "SeenCosts",
    "is_speed",
    "observe",
    "speeds_in",
]
