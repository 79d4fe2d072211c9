"""``megatron-hdp data describe``: what each source holds, as tables or as JSON."""

import argparse
from collections.abc import Sequence

from megatron_hdp.cli.data_commands.descriptions import Description, describe, sources_of
from megatron_hdp.cli.data_commands.flags import opening_of
from megatron_hdp.cli.data_commands.histogram import QUANTILES
from megatron_hdp.cli.shared.outputs import indented
from megatron_hdp.exit_codes import ExitCode
from megatron_hdp.simulator.units import aligned

_NO_LIMIT = 2**40


def run(arguments: argparse.Namespace) -> int:
    """Describe, print and write."""
    opening = opening_of(arguments, max_length=arguments.max_length or _NO_LIMIT)
    found = describe(sources_of(arguments.data), opening, arguments.split)
    if arguments.json:
        print(indented({"sources": {one.title: one.to_record() for one in found}}))
    else:
        print(report(found))
    return ExitCode.DONE


def report(found: Sequence[Description]) -> str:
    """Return the tables: how much there is, how long it is, where its tokens lie."""
    tables = [_sizes(found), _media(found), _lengths(found), _shares(found)]
    notes = [
        f"  {one.title}: estimates, from {one.sampled[0]:,} of {one.sampled[1]:,} records"
        for one in found
        if one.sampled is not None
    ]
    return "\n\n".join("\n".join(lines) for lines in (*tables, notes) if lines)


def short_power(most: int) -> str:
    """Return a power of two as people say it: 8192 is ``8K``."""
    for unit, power in (("G", 30), ("M", 20), ("K", 10)):
        if most >= 2**power:
            return f"{most >> power}{unit}"
    return str(most)


def _sizes(found: Sequence[Description]) -> list[str]:
    columns = {
        "documents": [one.documents for one in found],
        "empty": [one.empty for one in found],
        "bad": [one.bad for one in found],
        "cut": [one.cut for one in found],
        "sequences": [one.histogram.num_sequences for one in found],
        "tokens": [one.histogram.num_tokens for one in found],
        "loss tokens": [one.loss_tokens for one in found],
    }
    for name in ("empty", "bad", "cut"):
        if not any(columns[name]):
            del columns[name]
    if columns["sequences"] == columns["documents"]:
        del columns["sequences"]
    if not any(one.is_masked for one in found):
        del columns["loss tokens"]
    totals = [("all", *(f"{sum(column):,}" for column in columns.values()))]
    rows = [
        (one.title, *(f"{column[i]:,}" for column in columns.values()))
        for i, one in enumerate(found)
    ]
    return aligned([("source", *columns), *rows, *(totals if len(found) > 1 else [])])


def _media(found: Sequence[Description]) -> list[str]:
    """Return nothing where no source has any."""
    rows = []
    for one in found:
        if (media := one.media) is None:
            continue
        tokens = one.histogram.num_tokens
        share = f"{media.num_rows / max(tokens, 1):.1%}"
        sizes = [f"{count:,}" for count in media.sizes.values()]
        of_encoder = f"{media.encoder_share(tokens):.1%}"
        counts = f"{media.num_items:,}", f"{media.num_rows:,}"
        rows.append((one.title, *counts, share, *sizes, of_encoder, media.names))
    if not rows:
        return []
    counted = [one.media for one in found if one.media is not None]
    unit = " or ".join(sorted({one.unit for one in counted}))
    names = [f"{unit} {name}" for name in counted[0].sizes]
    header = ("media", "items", "rows", "of tokens", *names, "encoder beside 8B", "items are")
    return aligned([header, *rows])


def _lengths(found: Sequence[Description]) -> list[str]:
    header = ("length", "shortest", *(f"{share:.0%}" for share in QUANTILES), "longest", "mean")
    rows = [
        (
            one.title,
            f"{one.histogram.shortest:,}",
            *(f"{one.histogram.quantile(share):,}" for share in QUANTILES),
            f"{one.histogram.longest:,}",
            f"{one.histogram.mean:,.1f}",
        )
        for one in found
    ]
    return aligned([header, *rows])


def _shares(found: Sequence[Description]) -> list[str]:
    buckets = _buckets(found)
    rows = []
    for one in found:
        shares = one.histogram.token_shares()
        rows.append((one.title, *(f"{shares.get(most, 0.0):.1%}" for most in buckets)))
    return aligned([("tokens up to", *map(short_power, buckets)), *rows])


def _buckets(found: Sequence[Description]) -> list[int]:
    known = {most for one in found for most in one.histogram.token_shares()}
    return [2**power for power in range(min(known).bit_length() - 1, max(known).bit_length())]
