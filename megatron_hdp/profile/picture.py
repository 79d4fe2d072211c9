"""A profile as a picture: what was measured against what the fit says, and what is left over."""

from __future__ import annotations

import os
from typing import Any

from megatron_hdp.files import new_file
from megatron_hdp.profile.cases import ATTENTION, COMPUTE, EXPERTS, RING, TRANSFER
from megatron_hdp.profile.fitting import errors_of
from megatron_hdp.profile.job import Profile
from megatron_hdp.simulator.plot import import_figure

_COLOURS = {COMPUTE: "C0", ATTENTION: "C2", EXPERTS: "C3", RING: "C1", TRANSFER: "C4"}


def draw(profile: Profile, path: str | os.PathLike[str]) -> None:
    """Draws a profile; the suffix of ``path`` gives the format (png, svg, pdf).

    Raises:
        ValueError: the suffix names no format.
        ImportError: matplotlib is not installed.
    """
    figure = import_figure("a profile")(figsize=(11.0, 4.5), dpi=150, layout="constrained")
    times, left = figure.subplots(1, 2)
    for kind, colour in _COLOURS.items():
        for is_held_out in (False, True):
            _scatter(profile, kind, is_held_out, colour, times, left)
    ends = [limit for limits in (times.get_xlim(), times.get_ylim()) for limit in limits]
    times.axline((ends[1], ends[1]), slope=1, color="0.6", linewidth=0.8, zorder=0)
    left.axhline(0, color="0.6", linewidth=0.8, zorder=0)
    for axes in (times, left):
        axes.set_xscale("log")
        axes.set_xlabel("measured, seconds")
    times.set_yscale("log")
    times.set_ylabel("cost model, seconds")
    left.set_ylabel("error of the cost model, %")
    times.legend(fontsize=8)
    with new_file(path, durable=False) as temporary:
        figure.savefig(temporary, format=os.path.splitext(path)[1].lstrip(".") or "png")


def _scatter(
    profile: Profile, kind: str, is_held_out: bool, colour: str, times: Any, left: Any
) -> None:
    cases = profile.of(kind, is_held_out)
    if not cases:
        return
    measured = [one.median_s for one in cases]
    fitted = [profile.fit.predicted_s(one.case) for one in cases]
    how = {"color": colour, "facecolor": "none" if is_held_out else colour}
    words = f"{kind}, held out" if is_held_out else kind
    times.scatter(measured, fitted, label=words, **how)
    left.scatter(measured, 100 * errors_of(profile.fit, cases), **how)
