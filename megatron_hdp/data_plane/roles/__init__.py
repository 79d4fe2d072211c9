"""What planner, loaders and constructors do, wherever they run: no Ray, no sockets."""

from megatron_hdp.data_plane.roles.constructing import ConstructingService
from megatron_hdp.data_plane.roles.failures import FAILURES, SourceSilent, why_of
from megatron_hdp.data_plane.roles.journal import Entry, FencedError, Journal
from megatron_hdp.data_plane.roles.loading import Loaded, LoaderFigures, LoadingService, Wanted
from megatron_hdp.data_plane.roles.planning import Answer, PlanningService
from megatron_hdp.data_plane.roles.published import PublishedSource
from megatron_hdp.data_plane.roles.scaling import Scaling, Seen

__all__ = [
    "FAILURES",
    "Answer",
    "ConstructingService",
    "Entry",
    "FencedError",
    "Journal",
    "Loaded",
    "LoaderFigures",
    "LoadingService",
    "PlanningService",
    "PublishedSource",
    "Scaling",
    "Seen",
    "SourceSilent",
    "Wanted",
    "why_of",
]
