"""A run's figures: parts of a step, the table by strategy, a sentence, what to beware of."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_hdp.simulator.execution import Outcome, Run, StepRecord
from megatron_hdp.simulator.units import num_bytes, seconds
from megatron_hdp.strategies import BASELINE

COLUMNS = (
    "strategy",
    "step time",
    "tokens/s",
    "bubble",
    "ring traffic",
    "MFU",
    "peak memory",
    "speed-up",
)
_OURS = "auto"
PARTS = {
    "compute": "#1b9e77",
    "exposed ring traffic": "#386cb0",
    "host copies": "#8da0cb",
    "waiting": "#b3b3b3",
    "gradient sync": "#d95f02",
    "optimizer": "#e6ab02",
    "parameter gather": "#a6761d",
    "loading": "#e7298a",
}
"""Their colours, by name, in the order of a step."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What the run was asked for."""

    config: str
    """Names of files, and flags that win over them."""
    data: str
    """Where the lengths come from."""
    cost_model: str | None = None
    """The file of measured coefficients; None: they are assumed from the model's shape."""
    gpu_memory_bytes: float | None = None
    """That a GPU has; None: not looked at."""


def cells(run: Run, name: str) -> tuple[str, ...]:
    """A strategy's row below `COLUMNS`; dashes where it has no plan."""
    found = run.figures(name)
    if found["reason"] is not None:
        return (name, *["-"] * (len(COLUMNS) - 1))
    return (
        name,
        seconds(found["step_time_s"]),
        f"{found['tokens_per_s']:,.0f}",
        f"{found['bubble_share']:.1%}",
        num_bytes(found["ring_bytes"]),
        _or_none(found["mfu"], "{:.1%}".format),
        _or_none(found["peak_memory_bytes"], num_bytes),
        _or_none(found["speedup"], "{:.2f}".format),
    )


def candidate(run: Run) -> str | None:
    """The strategy that the headline is about: auto, else the fastest; None: none has a plan."""
    planned = [name for name, one in run.outcomes.items() if one.steps and name != BASELINE]
    if _OURS in planned:
        return _OURS
    return min(planned, key=lambda name: run.outcomes[name].step_time_s or 0.0, default=None)


def headline(run: Run) -> str:
    """What the run says, in a sentence."""
    name, mesh = candidate(run), run.outcomes[BASELINE]
    if name is None and not mesh.steps:
        return "No strategy has a plan on this configuration."
    if name is None:
        return f"The static mesh alone has a plan: {_alone(mesh)}."
    ours, speedup = run.outcomes[name], run.speedup(name)
    if speedup is None:
        return f"The static mesh has no plan on this configuration; {name} has one: {_alone(ours)}."
    faster = f"{name} trains {speedup:.2f} times as fast as the static mesh on this configuration"
    waits, of_mesh = (f"{one.bubble_share or 0.0:.1%}" for one in (ours, mesh))
    if waits == of_mesh:
        return f"{faster}; both wait for {waits} of a step."
    return f"{faster}; of a step, {waits} is waiting instead of {of_mesh}."


def warnings(run: Run, subject: Subject) -> list[str]:
    """What does not fit, and what has no plan."""
    found = []
    for name, outcome in run.outcomes.items():
        if outcome.reason is not None:
            found.append(f"{name} has no plan: {outcome.reason}")
        elif text := _too_much(outcome, subject.gpu_memory_bytes):
            found.append(f"{name} {text}")
    if run.setting.cost_model.warning:
        found.append(run.setting.cost_model.warning)
    if subject.cost_model is None:
        found.append(
            "The cost model is assumed from the model's shape, not measured: see what was assumed."
        )
    return found


def _alone(outcome: Outcome) -> str:
    step_s, share = outcome.step_time_s or 0.0, outcome.bubble_share or 0.0
    return f"a step takes {seconds(step_s)}, {share:.1%} of it waiting"


def _too_much(outcome: Outcome, limit: float | None) -> str | None:
    peak = outcome.peak_memory_bytes
    if limit is None or peak is None or peak <= limit:
        return None
    return (
        f"needs {num_bytes(peak)} on its fullest GPU, which has {num_bytes(limit)}: it would run "
        "out of memory"
    )


def _or_none(value: float | None, shown: Callable[[float], str]) -> str:
    return "-" if value is None else shown(value)


def parts_of(record: StepRecord) -> dict[str, float]:
    """Seconds of each part; those within the makespan are means of the ranks."""
    beside = record.waiting_s + record.ring_exposed_s + record.copies_s
    seconds = (
        record.makespan_s - beside,
        record.ring_exposed_s,
        record.copies_s,
        record.waiting_s,
        record.sync_s,
        record.optimizer_s,
        record.gather_s,
        record.loading_s,
    )
    return dict(zip(PARTS, seconds, strict=True))


def mean_parts(records: Sequence[StepRecord]) -> dict[str, float]:
    """Means over the steps; they add up to the mean step."""
    of_steps = [parts_of(one) for one in records]
    return {name: sum(one[name] for one in of_steps) / len(of_steps) for name in PARTS}
