"""The quickstart's steps as `megatron-hdp simulate` would have them, beside what was measured.

``python scripts/examples/quickstart/simulated.py FOLDER [flags that the quickstart had]`` reads
what ``quickstart.sh`` left in FOLDER, simulates the same steps by the cost model that it found
there, prints both times of every step and draws ``FOLDER/simulated.png``, micro-batch by
micro-batch. Each rank must have a core: those that share cores take what the others leave them.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import capacity
import picture
import yaml
from measured import RankTime, Step, Stretch, nearest_step, read_run

from megatron_hdp.cli import simulated_run
from megatron_hdp.cli.main import build_parser
from megatron_hdp.simulator.execution import StepExecution

CONFIG = Path(__file__).parents[3] / "configs" / "tiny-cpu.yaml"
STRATEGIES = {"static": "static", "hdp": "auto"}
"""Of the quickstart's runs."""


def simulated(folder: Path, measured: Sequence[Step], strategy: str, flags: Sequence[str]):
    """Return the same steps, simulated.

    Args:
        folder: of the quickstart.
        measured: its steps by one strategy.
        strategy: its name.
        flags: of training, as the quickstart had them.

    Raises:
        ValueError: the steps are not of the same sequences.
    """
    data = folder / "simulated-data.yaml"
    data.write_text(yaml.safe_dump({"sources": {"stdlib": {"path": str(folder / "data/stdlib")}}}))
    groups = yaml.safe_load(CONFIG.read_text())
    ranks, context = len(measured[0].ranks), groups["model"]["seq-length"]
    tokens = capacity.tokens_per_rank(ranks, context, groups["batch"]["hdp-tokens-per-rank"])
    words = ["simulate", "--config", CONFIG, "--gpus", ranks, "--hdp-data", data]
    words += ["--cost-model", folder / "cost-model.json", "--steps", len(measured)]
    words += ["--seed", groups["optimization"]["seed"], "--", "--hdp-tokens-per-rank", tokens]
    arguments = build_parser().parse_args([*map(str, words), *flags])
    options = simulated_run.options_of(arguments)
    setting = simulated_run.setting_of(arguments, options, {})
    steps = []
    batches = simulated_run.batches_of(arguments, options).lengths
    for number, lengths in enumerate(batches):
        was = measured[number].metrics
        if int(lengths.sum()) != was["tokens"]:
            raise ValueError(
                f"step {number + 1}: drew {int(lengths.sum()):,} tokens, the run trained on "
                f"{was['tokens']:,}: give the flags that the quickstart had"
            )
        steps.append(_step(setting.executed(setting.planned(lengths, strategy), number), was))
    data.unlink()
    return steps


def _step(run: StepExecution, was: dict) -> Step:
    """A simulated step in the words of a measured one."""
    record = run.record
    metrics = {"step": was["step"], "seconds": record.step_s, "ring_bytes": record.ring_bytes}
    ranks = []
    for rank in range(run.plan.num_ranks):
        compute = []
        for number in range(run.plan.num_micro_batches):
            members = run.plan.micro_batch(number).ranks
            if rank not in members:
                continue
            for starts, ends in (
                (run.forward_start_s, run.forward_end_s),
                (run.backward_start_s, run.backward_end_s),
            ):
                ends_s = float(starts[0, number]), float(ends[0, number])
                compute.append(Stretch(*ends_s, len(members)))
        waits = [Stretch(float(run.end_s[0, rank]), run.makespan_s)]
        sync = [Stretch(run.makespan_s, run.step_s)]
        ranks.append(RankTime(tuple(compute), tuple(waits), tuple(sync)))
    return Step(metrics, record.step_s, 0.0, tuple(ranks))


def table(runs: dict[str, tuple[list[Step], list[Step]]]) -> str:
    """Return every step's measured and simulated seconds, and their medians."""
    names = list(runs)
    lines = [
        "step  " + "".join(f"{name + ': measured':>18}{'simulated':>13}{'':>9}" for name in names)
    ]
    for pairs in zip(*(zip(*runs[name], strict=True) for name in names), strict=True):
        cells = [_cells(a.seconds, b.seconds) for a, b in pairs]
        lines.append(f"{pairs[0][0].number:<6}" + "".join(cells))
    medians = [[median(step.seconds for step in run) for run in runs[name]] for name in names]
    lines.append("median" + "".join(_cells(*pair) for pair in medians))
    return "\n".join(line.rstrip() for line in lines)


def _cells(measured_s: float, simulated_s: float) -> str:
    return f"{measured_s:>16.3f} s{simulated_s:>11.3f} s{simulated_s / measured_s - 1:>+8.1%} "


def main(folder: str, *flags: str) -> None:
    """Print the table and draw the picture."""
    place = Path(folder)
    runs = {}
    for name, strategy in STRATEGIES.items():
        measured = read_run(place / name)
        runs[name] = measured, simulated(place, measured, strategy, flags)
    print(table(runs))
    shown = nearest_step(runs["static"][0], runs["hdp"][0])
    rows = {}
    for name, (measured, computed) in runs.items():
        rows[f"{name}, measured"] = measured[shown]
        rows[f"{name}, simulated"] = computed[shown]
    title = f"step {shown + 1}, measured and simulated by the cost model of the same machine"
    picture.draw(rows, title).savefig(place / "simulated.png")
    print(f"the picture of step {shown + 1}: {place / 'simulated.png'}")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: simulated.py FOLDER [FLAGS]")
    try:
        main(*sys.argv[1:])
    except ValueError as error:
        sys.exit(f"error: {error}")
