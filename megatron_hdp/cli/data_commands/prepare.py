"""``megatron-hdp data prepare``: every source of a file as tokens, where a run finds them."""

import argparse
import os
from dataclasses import dataclass

from megatron_hdp.cli.data_commands.flags import opening_of
from megatron_hdp.data.formats import kind_of
from megatron_hdp.data.index_checks import IndexChecks
from megatron_hdp.data.index_file import IndexFile, TokenFileError
from megatron_hdp.data.media import Items
from megatron_hdp.data.mixture import prefix_of, prepare_source, read_data_file
from megatron_hdp.data.spans import Spans
from megatron_hdp.data.sums import BESIDE
from megatron_hdp.data.token_file import TokenReader
from megatron_hdp.exit_codes import ExitCode
from megatron_hdp.simulator.units import aligned

_HEADER = ("source", "documents", "tokens", "bad", "pair")


@dataclass(frozen=True)
class Ready:
    """A source that a run can open."""

    name: str
    documents: int
    tokens: int
    bad: int
    prefix: str
    manifest: str | None
    """None of one that was a pair already."""


def run(arguments: argparse.Namespace) -> int:
    """Prepare and print what there is now."""
    spec = read_data_file(arguments.data).training
    opening = opening_of(arguments, max_length=1)
    found = []
    left_out = []
    for source in spec.sources:
        if source.tokenise == "on-the-fly":
            left_out.append(source.name)
            continue
        if kind_of(source) == "tokens":
            found.append(checked(source.name, prefix_of(source)))
            continue
        made = prepare_source(source, spec, opening)
        counts = (made.documents, made.tokens, made.bad)
        found.append(Ready(source.name, *counts, made.prefix, made.manifest))
    if found:
        print(report(found))
    for name in left_out:
        print(f"  {name}: tokenised on the fly, nothing to prepare")
    return ExitCode.DONE


def checked(name: str, prefix: str) -> Ready:
    """Check a pair, and what lies beside it, piece by piece.

    Raises:
        TokenFileError: it is missing, damaged, or its files do not belong together.
    """
    index = IndexFile(f"{prefix}.idx")
    checks = IndexChecks(index)
    documents = tokens = 0
    for piece in checks.documents():
        documents += int((piece.lengths > 0).sum())
        tokens += int(piece.lengths.sum())
    sums = TokenReader(prefix, index.dtype, checks.num_bytes).sums
    for suffix in BESIDE:
        if sums is not None and os.path.exists(prefix + suffix):
            sums.require_file(suffix)
    if os.path.exists(f"{prefix}.spans"):
        num_spans = len(Spans(f"{prefix}.spans"))
        if num_spans != index.num_documents:
            raise TokenFileError(
                f"{prefix}.spans is of {num_spans:,} documents, the .idx beside it has "
                f"{index.num_documents:,}, expected as many: they belong to different token files; "
                "make them again from their source"
            )
    if (items := Items.beside(prefix)) is not None and len(items) != index.num_documents:
        raise TokenFileError(
            f"{prefix}.items is of {len(items):,} documents, the .idx beside it has "
            f"{index.num_documents:,}, expected as many: make them again from their source"
        )
    return Ready(name, documents, tokens, 0, prefix, None)


def report(found: list[Ready]) -> str:
    """Return a line for each source, and below them where the manifests lie."""
    rows = [
        (one.name, *(f"{n:,}" for n in (one.documents, one.tokens, one.bad)), _near(one.prefix))
        for one in found
    ]
    notes = [
        f"  {one.name}: manifest {_near(one.manifest)}"
        if one.manifest
        else f"  {one.name}: a .bin/.idx pair already, checked"
        for one in found
    ]
    return "\n".join([*aligned([_HEADER, *rows], texts=(0, 4)), *notes])


def _near(path: str) -> str:
    """Return a path from here on where it lies below."""
    near = os.path.relpath(path)
    return path if near.startswith(os.pardir) else near
