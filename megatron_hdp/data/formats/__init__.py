"""From files to records: which files a source names, how each is cut, what a piece of one holds."""

from megatron_hdp.data.formats.files import files_below, files_of, kind_of
from megatron_hdp.data.formats.lines import line_origin, record_of_line
from megatron_hdp.data.formats.parts import Part, PartReader, table_parts
from megatron_hdp.data.formats.reading import layout_of, pieces_of, read
from megatron_hdp.data.formats.records import BadRecord, Piece, Record
from megatron_hdp.data.formats.texts import require_text

__all__ = [
    "BadRecord",
    "Part",
    "PartReader",
    "Piece",
    "Record",
    "files_below",
    "files_of",
    "kind_of",
    "layout_of",
    "line_origin",
    "pieces_of",
    "read",
    "record_of_line",
    "require_text",
    "table_parts",
]
