"""A profile in words: a table for people, a JSON object for tools."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict

import numpy as np
import orjson

from megatron_hdp.profile.cases import COMPUTE, RING
from megatron_hdp.profile.fitting import (
    KINDS,
    Measured,
    coefficients_of,
    errors_of,
    median_error,
    nine_of_ten,
    wires_of,
)
from megatron_hdp.profile.job import Profile

_COUNTED = (
    *("kv_bytes_per_token", "activation_bytes_per_token", "num_layers"),
    *("window_tokens", "window_share", "halo_bytes", "query_ratio"),
)


def as_text(profile: Profile) -> str:
    """The coefficients, how sure they are, how well they tell what the fit has not seen."""
    lines = [
        f"machine    {profile.place}; load {_load()}",
        f"attention  {profile.backend}",
        f"range      {_range(profile)}",
        "",
        "  coefficient                       value  nine of ten fits",
    ]
    intervals = intervals_of(profile)
    for name, value in asdict(profile.cost_model).items():
        if name in ("rank_speeds", "attention_points", "doubt", "channels", "slowed"):
            continue
        if name in intervals:
            how = "{:.3g} to {:.3g}".format(*intervals[name])
        else:
            how = _source(name, profile)
        lines.append(f"  {name:<28} {value:>10.4g}  {how}")
    lines += ["", "  median error of the cost model          fitted  held out"]
    for kind, words in KINDS:
        errors = [_median_error(profile, kind, held_out) for held_out in (False, True)]
        if errors[0] is not None:
            shown = ["-" if one is None else f"{one:.1%}" for one in errors]
            lines.append(f"  {words:<37} {shown[0]:>8}  {shown[1]:>8}")
    lines += ["", *(f"note: {note}" for note in notes_of(profile))]
    return "\n".join(lines).rstrip()


def as_json(profile: Profile) -> bytes:
    """Everything that was found."""
    cases = [
        asdict(one.case)
        | {
            "seconds": one.seconds,
            "median_s": one.median_s,
            "predicted_s": profile.fit.predicted_s(one.case),
            "error": error,
        }
        for one, error in zip(
            profile.measured, errors_of(profile.fit, profile.measured).tolist(), strict=True
        )
    ]
    report = {
        "machine": profile.place,
        "load": _load(),
        "attention": profile.backend,
        "cost_model": asdict(profile.cost_model),
        "intervals": intervals_of(profile),
        "lengths": lengths_of(profile.measured),
        "degrees": _degrees(profile),
        "median_error": {
            kind: {
                "fitted": _median_error(profile, kind, False),
                "held_out": _median_error(profile, kind, True),
            }
            for kind, _ in KINDS
        },
        "notes": notes_of(profile),
        "cases": cases,
    }
    return orjson.dumps(report, option=orjson.OPT_INDENT_2)


def intervals_of(profile: Profile) -> dict[str, tuple[float, float]]:
    """In which nine of ten fits to resampled repetitions lie, by the names of the cost model."""
    samples = [coefficients_of(one) for one in profile.fit.resampled]
    return {
        name: nine_of_ten([one.get(name, np.inf) for one in samples])
        for name in coefficients_of(profile.fit)
    }


def notes_of(profile: Profile) -> list[str]:
    """What a reader must know besides."""
    notes = list(profile.notes)
    for where, (hop_s, s_per_byte) in wires_of(profile.measured).items():
        words = "within a node" if where == "intra" else "between nodes"
        speed = f", {1e-9 / s_per_byte:.3g} GB/s" if s_per_byte else ""
        notes.append(f"transfers by themselves {words}: {1e6 * hop_s:,.0f} us a hop{speed}")
    if profile.left_out:
        notes.append(
            f"{len(profile.left_out)} cases had no room in the budget, the first "
            f"{profile.left_out[0]}: raise --budget-seconds"
        )
    return notes


def lengths_of(measured: Sequence[Measured]) -> tuple[int, int]:
    """The shortest and the longest sequence that was run whole on a rank."""
    whole = [one.case for one in measured if one.case.kind == COMPUTE]
    lengths = [length for case in whole for length in case.lengths]
    return min(lengths), max(lengths)


def _median_error(profile: Profile, kind: str, is_held_out: bool) -> float | None:
    return median_error(profile.fit, profile.measured, kind, is_held_out=is_held_out)


def _range(profile: Profile) -> str:
    shortest, longest = lengths_of(profile.measured)
    degrees = _degrees(profile)
    passes = min(len(one.seconds) for one in profile.measured)
    of_rings = f"rings of {', '.join(map(str, degrees))} ranks" if degrees else "no rings"
    return (
        f"{shortest:,} to {longest:,} tokens on a rank; {of_rings}; {len(profile.measured)} cases, "
        f"{passes} times each"
    )


def _degrees(profile: Profile) -> list[int]:
    return sorted({one.case.degree for one in profile.measured if one.case.kind == RING})


def _source(name: str, profile: Profile) -> str:
    if name in _COUNTED or (name == "ranks_per_node" and profile.room.ranks > 1):
        return "counted"
    if name == "runtime_bytes" and not profile.cost_model.runtime_bytes:
        return "there is no GPU"
    if name in ("host_bytes_per_s", "runtime_bytes"):
        return "measured"
    if name == "b_experts" and not profile.room.has_experts:
        return "the model has none"
    return "not measured, see the notes"


def _load() -> str:
    return " ".join(f"{one:.2f}" for one in os.getloadavg())
