"""What planner, loaders and constructors do, wherever they run: no Ray, no sockets."""

from megatron_hdp.data_plane.roles.constructing import ConstructingService
from megatron_hdp.data_plane.roles.decoding import DecodingService, LaidOut, RankItems
from megatron_hdp.data_plane.roles.failures import FAILURES, SourceSilent, why_of
from megatron_hdp.data_plane.roles.journal import Entry, FencedError, Journal
from megatron_hdp.data_plane.roles.loading import (
    Loaded,
    LoaderFigures,
    LoadingService,
    Wanted,
    WantedItems,
)
from megatron_hdp.data_plane.roles.planning import Answer, PlanningService
from megatron_hdp.data_plane.roles.published import PublishedSource
from megatron_hdp.data_plane.roles.scaling import Scaling, Seen

__all__ = [
    "FAILURES",
    "Answer",
    "ConstructingService",
    "DecodingService",
    "Entry",
    "FencedError",
    "Journal",
    "LaidOut",
    "Loaded",
    "LoaderFigures",
    "LoadingService",
    "PlanningService",
    "PublishedSource",
    "RankItems",
    "Scaling",
    "Seen",
    "SourceSilent",
    "Wanted",
    "WantedItems",
    "why_of",
]
