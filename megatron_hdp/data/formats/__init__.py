"""From files to records: which files a source names, how each is cut, what a piece of one holds."""

from megatron_hdp.data.formats.files import files_below, files_of, kind_of
from megatron_hdp.data.formats.reading import layout_of, pieces_of, read
from megatron_hdp.data.formats.records import BadRecord, Piece, Record

__all__ = [
    "BadRecord",
    "Piece",
    "Record",
    "files_below",
    "files_of",
    "kind_of",
    "layout_of",
    "pieces_of",
    "read",
]
