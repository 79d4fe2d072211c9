"""``megatron-hdp data prune``: removes caches that nobody opens any more."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from megatron_hdp.cli.data_commands.text import aligned
from megatron_hdp.data.caches import Fate, FoundCache, prune
from megatron_hdp.exit_codes import ExitCode

_DAY_S = 86_400.0
_HEADER = ("cache", "bytes", "days idle", "")


def run(arguments: argparse.Namespace) -> int:
    """Prune and print what became of each cache; a refusal of the system fails in the end."""
    found = list(
        prune(
            Path(arguments.folder),
            older_than_s=arguments.older_than * _DAY_S,
            dry_run=arguments.dry_run,
        )
    )
    print(report(found, dry_run=arguments.dry_run))
    refused = [one for one in found if one.fate is Fate.REFUSED]
    if refused:
        raise OSError(
            f"{arguments.folder}: {len(refused):,} caches could not be removed, the first: "
            f"{refused[0].name} ({refused[0].reason}): run it as the user who made them"
        )
    return ExitCode.DONE


def report(found: Sequence[FoundCache], *, dry_run: bool) -> str:
    """Return a line for each cache, and below them what is freed and what is kept."""
    removed = [one for one in found if one.fate is Fate.REMOVED]
    kept = [one for one in found if one.fate is not Fate.REMOVED]
    rows = [
        (one.name, f"{one.num_bytes:,}", f"{one.idle_s / _DAY_S:,.1f}", _said(one, dry_run))
        for one in found
    ]
    verb = "would free" if dry_run else "freed"
    last = f"{verb} {_bytes(removed)} of {_caches(removed)}; kept {_bytes(kept)} of {_caches(kept)}"
    return "\n".join([*(aligned([_HEADER, *rows], texts=(0, 3)) if rows else []), last])


def _said(one: FoundCache, dry_run: bool) -> str:
    if one.fate is Fate.REMOVED:
        return "would be removed" if dry_run else "removed"
    return f"kept: {one.reason or one.fate}"


def _bytes(found: Sequence[FoundCache]) -> str:
    return f"{sum(one.num_bytes for one in found):,} bytes"


def _caches(found: Sequence[FoundCache]) -> str:
    return f"{len(found):,} cache{'' if len(found) == 1 else 's'}"
