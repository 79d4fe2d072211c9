"""What ``data plan`` finds, as text and as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_hdp.arrays import Float64Array
from megatron_hdp.cli.data_commands.drawn_steps import Forecast, Phase
from megatron_hdp.data.mixture import Corpus, Position
from megatron_hdp.simulator.units import aligned, num_bytes, short

_UNITS = {"tokens": "tokens", "loss-tokens": "loss tokens", "sequences": "sequences"}


@dataclass
class Findings:
    """All of it."""

    corpus: Corpus
    forecast: Forecast
    seq_length: int
    seed: int
    has_cache: bool
    """Whether tables lie in files that the processes of a node share."""

    @property
    def index_bytes(self) -> int:
        """Bytes of what says where sequences lie, and which of their tokens are trained."""
        return sum(one.index_bytes for one in self.corpus.sources)

    @property
    def private_index_bytes(self) -> int:
        """Those of them that every process holds for itself."""
        return 0 if self.has_cache else sum(one.private_bytes for one in self.corpus.sources)

    def epochs(self, begin: Position, end: Position) -> Float64Array:
        """Return how often each source is passed between two positions, by its rows."""
        sources = self.corpus.sources
        rows = [end.of(one.name).rows - begin.of(one.name).rows for one in sources]
        return np.array(rows) / [one.num_groups for one in sources]

    def span(self, phase: Phase) -> tuple[int, int]:
        """Return where a phase begins and where the next one does, or the steps end."""
        phases, unit = self.corpus.schedule.phases, self.corpus.schedule.unit
        end = phase.end.steps if unit == "steps" else phase.end.tokens
        is_last = phase is self.forecast.phases[-1]
        return phases[phase.number].begin, end if is_last else phases[phase.number + 1].begin


def record(found: Findings) -> dict[str, Any]:
    """Return all figures as plain values."""
    forecast, names = found.forecast, found.forecast.names

    def named(values: Float64Array) -> dict[str, float]:
        return dict(zip(names, values.tolist(), strict=True))

    start, total = Position(), np.zeros(len(names))
    phases = []
    for phase in forecast.phases:
        begin, end = found.span(phase)
        total = total + phase.amounts
        phases.append(
            {
                "from": begin,
                "to": end,
                "shares": named(phase.shares),
                "epochs": named(found.epochs(phase.begin, phase.end)),
                "shares_since_start": named(total / max(total.sum(), 1.0)),
                "epochs_since_start": named(found.epochs(start, phase.end)),
                "steps": phase.num_steps,
                "tokens": phase.num_tokens,
                "loss_tokens": phase.num_loss_tokens,
                "sequences": phase.num_sequences,
                "mean_length": phase.mean_length,
                "longest": phase.longest,
                **_pictures(found, phase),
            }
        )
    return {
        "unit": found.corpus.schedule.unit,
        "weight_unit": found.corpus.spec.weight_unit,
        "phases": phases,
        "exhausted": forecast.exhausted,
        "steps": forecast.end.steps,
        "steps_wanted": forecast.steps_wanted,
        "tokens": forecast.end.tokens,
        "sequences": forecast.end.sequences,
        "first_step_without_loss": forecast.without_loss,
        "seq_length": found.seq_length,
        "seed": found.seed,
        "index_bytes": found.index_bytes,
        "private_index_bytes": found.private_index_bytes,
    }


def title(found: Findings) -> str:
    """Return one line on what was drawn."""
    forecast = found.forecast
    steps = f"{forecast.end.steps:,} steps"
    if forecast.is_cut_short:
        steps = f"{steps} of {forecast.steps_wanted:,}, then all sources have ended"
    return (
        f"{steps}: {forecast.end.tokens:,} tokens in {forecast.end.sequences:,} sequences of "
        f"at most {found.seq_length:,}, seed {found.seed}"
    )


def text(found: Findings) -> str:
    """Return the tables."""
    forecast = found.forecast
    lines = [title(found)]
    for phase in forecast.phases:
        lines += ["", _headline(found, phase), *_shares(found, phase)]
    lines += ["", _exhaustion(forecast), _memory(found)]
    if forecast.without_loss is not None:
        lines.append(
            f"step {forecast.without_loss:,} has no token with loss: a run stops there; make the "
            "global batch larger"
        )
    return "\n".join(lines)


def _headline(found: Findings, phase: Phase) -> str:
    begin, end = found.span(phase)
    places = f"steps {begin:,} to {end:,}"
    if found.corpus.schedule.unit == "tokens":
        places = f"tokens {short(begin)} to {short(end)} ({phase.num_steps:,} steps)"
    declared = found.corpus.schedule.phases[phase.number]
    if declared.end > declared.begin:
        places += f", changing until {short(declared.end)}"
    text = (
        f"{places}: {phase.num_tokens / phase.num_steps:,.0f} tokens a step in sequences of "
        f"{phase.mean_length:,.1f}, the longest of {phase.longest:,}"
    )
    if not phase.num_items:
        return text
    rows, share = phase.num_rows / phase.num_steps, phase.num_rows / phase.num_tokens
    names = found.corpus.item_names
    return (
        f"{text}; {phase.num_items / phase.num_steps:,.1f} {names} a step of {rows:,.0f} rows, "
        f"{share:.1%} of the tokens"
    )


def _pictures(found: Findings, phase: Phase) -> dict[str, int]:
    if not found.corpus.has_media:
        return {}
    return {"items": phase.num_items, "rows": phase.num_rows}


def _shares(found: Findings, phase: Phase) -> list[str]:
    epochs = found.epochs(phase.begin, phase.end)
    since = found.epochs(Position(), phase.end)
    unit = _UNITS[found.corpus.spec.weight_unit]
    header = ("source", f"share of {unit}", "epochs", "since the start")
    rows = [
        (name, f"{phase.shares[i]:.4f}", f"{epochs[i]:,.2f}", f"{since[i]:,.2f}")
        for i, name in enumerate(found.forecast.names)
    ]
    return aligned([header, *rows])


def _exhaustion(forecast: Forecast) -> str:
    ends = {name: step for name, step in forecast.exhausted.items() if step is not None}
    words = [f"{name} with step {step:,}" for name, step in ends.items()]
    if rest := [name for name in forecast.names if name not in ends]:
        words.append(f"{', '.join(rest)} never")
    return f"runs out: {'; '.join(words)}"


def _memory(found: Findings) -> str:
    size = num_bytes(found.index_bytes)
    if found.has_cache:
        return f"indices: {size} in files that the processes of a node share, nothing in each"
    private = num_bytes(found.private_index_bytes)
    held = "in every process" if private == size else f"of which {private} in every process"
    return f"indices: {size} {held}; with --data-cache-path the processes of a node share them"
