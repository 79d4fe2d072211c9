"""From several sources to the sequences of a step.

Design: `docs/design/data-order.md`.
"""

from megatron_hdp.data.mixture.blend_flags import BlendFlags, specs_of_flags
from megatron_hdp.data.mixture.corpus import Corpus
from megatron_hdp.data.mixture.data_file import DataFile, DataFileError, read_data_file
from megatron_hdp.data.mixture.draw import BatchSize, Mixture, Step, Together
from megatron_hdp.data.mixture.media_source import MediaRows, MediaSource
from megatron_hdp.data.mixture.open_corpus import (
    Opening,
    any_documents,
    open_corpus,
    open_text,
    prefix_of,
    prepare_source,
    prepared,
)
from megatron_hdp.data.mixture.position import Position, SeenLosses, position_of_run
from megatron_hdp.data.mixture.schedule import (
    SPLITS,
    MixtureSpec,
    Phase,
    ResolvedSchedule,
    Schedule,
    normalised,
)
from megatron_hdp.data.mixture.source import Source
from megatron_hdp.data.mixture.table_source import TableSource
from megatron_hdp.data.mixture.text_source import TextSource

__all__ = [
    "SPLITS",
    "BatchSize",
    "BlendFlags",
    "Corpus",
    "DataFile",
    "DataFileError",
    "MediaRows",
    "MediaSource",
    "Mixture",
    "MixtureSpec",
    "Opening",
    "Phase",
    "Position",
    "ResolvedSchedule",
    "Schedule",
    "SeenLosses",
    "Source",
    "Step",
    "TableSource",
    "TextSource",
    "Together",
    "any_documents",
    "normalised",
    "open_corpus",
    "open_text",
    "position_of_run",
    "prefix_of",
    "prepare_source",
    "prepared",
    "read_data_file",
    "specs_of_flags",
]
