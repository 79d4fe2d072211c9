"""Where the time of a step goes: parts that add up to it."""

from collections.abc import Sequence

from megatron_hdp.simulator.execution import StepRecord

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
