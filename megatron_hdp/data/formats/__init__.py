"""From files to records: which files a source names, how each is cut, what a piece of one holds."""

from megatron_hdp.data.formats.files import files_below, files_of, kind_of
from megatron_hdp.data.formats.lines import CompressedLines, Lines, line_origin, record_of_line
from megatron_hdp.data.formats.records import BadRecord, Format, Piece, Record
from megatron_hdp.data.formats.registry import format_of, pieces_of, read, table_of
from megatron_hdp.data.formats.tables import PartReader, Table
from megatron_hdp.data.formats.texts import Text

__all__ = [
    "BadRecord",
    "CompressedLines",
    "Format",
    "Lines",
    "PartReader",
    "Piece",
    "Record",
    "Table",
    "Text",
    "files_below",
    "files_of",
    "format_of",
    "kind_of",
    "line_origin",
    "pieces_of",
    "read",
    "record_of_line",
    "table_of",
]
