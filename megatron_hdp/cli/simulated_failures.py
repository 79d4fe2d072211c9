"""What failures would cost the run that ``simulate`` has run: ``--mtbf``."""

import argparse
import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_hdp.arrays import Int64Array
from megatron_hdp.planner.memory import copies_bytes, shard_bytes
from megatron_hdp.simulator.execution import (
    Failures,
    Forecast,
    Run,
    Setting,
    outcome_of,
)
from megatron_hdp.simulator.units import num_bytes, seconds

if TYPE_CHECKING:
    from megatron_hdp.megatron.options import TrainingArguments

_CHECKPOINT_MINUTES = 30.0


def forecast_of(
    run: Run,
    batches: Sequence[Int64Array],
    arguments: argparse.Namespace,
    options: "TrainingArguments",
) -> Forecast | None:
    """What failures cost with the fastest strategy; None without ``--mtbf`` or without a plan."""
    times = {name: one.step_time_s for name, one in run.outcomes.items()}
    known = {name: step_s for name, step_s in times.items() if step_s is not None}
    if arguments.mtbf is None or not known:
        return None
    strategy = min(known, key=lambda name: known[name])
    step_s = known[strategy]
    checkpoint_s = 60 * (arguments.checkpoint_minutes or _CHECKPOINT_MINUTES)
    if arguments.checkpoint_minutes is None and options.save_interval is not None:
        checkpoint_s = options.save_interval * step_s
    setting, job = run.setting, run.setting.job
    copied = shard_bytes(job) if job is not None and job.distributed_optimizer else 0.0
    host_bytes_per_s = setting.cost_model.host_bytes_per_s / (job.tensor_ranks if job else 1)
    smaller = without_a_host(setting)
    short = None
    if smaller is not None:
        short = outcome_of(smaller, batches, strategy).step_time_s
    return Forecast(
        failures=Failures(
            mtbf_s=3600 * arguments.mtbf,
            restart_s=60 * arguments.restart_minutes,
            checkpoint_s=checkpoint_s,
            regroup_s=arguments.regroup_seconds,
            replace_s=60 * arguments.replace_minutes,
        ),
        strategy=strategy,
        step_s=step_s,
        short_step_s=short,
        copies_s=copied / host_bytes_per_s + copied / setting.machine.network_bytes_per_s,
        copies_host_bytes=copies_bytes(copied),
    )


def without_a_host(setting: Setting) -> Setting | None:
    """The same job without the HDP ranks of its last host; None: no rank is left.

    Ranks that share experts leave together.
    """
    lost = min(setting.cost_model.ranks_per_node, setting.ranks)
    lost = setting.lockstep_ranks * math.ceil(lost / setting.lockstep_ranks)
    left = setting.ranks - lost
    if left < 1:
        return None
    gpus_per_rank = setting.num_gpus // setting.ranks
    num_gpus = left * gpus_per_rank
    speeds = setting.cost_model.rank_speeds[:left]
    slow = {rank: speed for rank, speed in setting.disturbance.slow.items() if rank < left}
    return dataclasses.replace(
        setting,
        ranks=left,
        num_gpus=num_gpus,
        job=setting.job and dataclasses.replace(setting.job, num_gpus=num_gpus),
        cost_model=dataclasses.replace(setting.cost_model, rank_speeds=speeds),
        disturbance=dataclasses.replace(setting.disturbance, slow=slow),
    )


def text_of(forecast: Forecast) -> str:
    """What is lost, in a few lines."""
    one = forecast.failures
    missing = f"missing hosts cost {forecast.missing_share:.2%}"
    if forecast.short_step_s is None:
        missing = "too few ranks are left without one host: they wait for its replacement"
    gain = forecast.figures()["gain"]
    lines = [
        f"a failure each {one.mtbf_s / 3600:g} h, {forecast.strategy}, share of the time lost:",
        f"  restarts  {1 - forecast.restart_share:.2%}  {one.restart_s / 60:g} min each, and the "
        f"work since checkpoints that are {one.checkpoint_s / 60:.3g} min apart",
        f"  in place  {1 - forecast.in_place_share:.2%}  {one.regroup_s:g} s each, and the step "
        f"that ran; {missing}",
        f"  so {gain:.3f} times the steps" if gain is not None else "  with restarts none is left",
    ]
    if forecast.copies_host_bytes:
        lines.append(
            f"  copies of the optimizer's shards: {num_bytes(forecast.copies_host_bytes)} of host "
            f"memory a GPU, {seconds(forecast.copies_s)} on the way beside each step"
        )
    return "\n".join(lines)
