"""``megatron-hdp simulate``: runs a configuration's steps by several strategies, without a GPU."""

import argparse
from pathlib import Path

from megatron_hdp.cli.shared.numbers import above_zero, number
from megatron_hdp.cli.shared.outputs import check_outputs, steps_bar, write_json
from megatron_hdp.exit_codes import ExitCode
from megatron_hdp.strategies import CHOICES

_DEFAULT = "static,naive,bytescale,auto"


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the subcommand."""
    parser = subparsers.add_parser(
        "simulate",
        help="simulate steps of a configuration with several strategies, without a GPU",
        description="Draws global batches, plans them and runs the plans event by event as "
        "training does: rings hop by hop, pipeline stages, copies to the host, gradient sync.",
    )
    _add_job(parser.add_argument_group("what to train"))
    _add_machine(parser.add_argument_group("the machine"))
    add = parser.add_argument_group("the simulation").add_argument
    add(
        "--strategies",
        default=_DEFAULT,
        metavar="S,S",
        help=f"strategies of plan; static always runs, for comparison (default: {_DEFAULT})",
    )
    number(add, "--steps", "K", 1, 10**6, "global batches", default=5)
    number(add, "--seed", "S", 0, 2**62, "seed of batches and noise", default=0)
    add("--output", metavar="FILE.json", help="write all figures as JSON")
    add(
        "--report",
        action="append",
        default=[],
        metavar="FILE",
        help="write a report to read: a page that needs no network (.html) or a picture (.png, "
        ".svg, .pdf); may be repeated",
    )
    _add_failures(parser.add_argument_group("failures"))
    parser.set_defaults(run=_run)


def _add_job(group: "argparse._ArgumentGroup") -> None:
    add = group.add_argument
    add(
        "--config",
        action="append",
        required=True,
        metavar="FILE",
        help="YAML file of training's flags; later files win",
    )
    number(add, "--gpus", "N", 1, 2**24, "GPUs of the job", required=True)
    add(
        "--data",
        metavar="FILE|preset:github|preset:byted",
        help="a text file with one sequence length per line, an .idx file, or lengths drawn from a "
        "preset of the paper's datasets (default: preset:github)",
    )
    add("--hdp-data", metavar="FILE", help="YAML file of a mixture, as for training")
    add(
        "flags",
        nargs="*",
        metavar="-- FLAGS",
        help="flags of training after --; they win over the files",
    )


def _add_machine(group: "argparse._ArgumentGroup") -> None:
    add = group.add_argument
    add(
        "--cost-model",
        metavar="FILE",
        help="JSON file with measured coefficients, instead of the configuration's",
    )
    add(
        "--rank-speeds",
        metavar="FILE",
        help="text file with the speed of one rank per line; the planner knows them",
    )
    add(
        "--slow",
        metavar="RANK:SPEED,...",
        help="ranks that are slower than the planner knows, as 7:0.5",
    )
    add(
        "--noise",
        type=float,
        default=0.0,
        metavar="SIGMA",
        help="sigma of a lognormal factor on the compute time of every micro-batch (default: 0)",
    )
    add(
        "--machine",
        metavar="FILE",
        help="JSON file of what the machine has besides the cost model, where it differs from the "
        "defaults",
    )
    add(
        "--gpu-memory",
        default="80GB",
        metavar="SIZE",
        help="memory of one GPU, in GB (1e9 bytes), GiB or MiB, to compare with (default: 80GB)",
    )


def _add_failures(group: "argparse._ArgumentGroup") -> None:
    add = group.add_argument
    add(
        "--mtbf",
        type=above_zero,
        metavar="HOURS",
        help="mean time between failures of the whole job: say what share of the time is lost by "
        "restarts, and by resuming without the failed host",
    )
    for flag, metavar, default, words in (
        ("--restart-minutes", "M", 5.0, "from a failure to the first step of the restarted job"),
        ("--regroup-seconds", "S", 20.0, "from a failure to the step that survivors do again"),
        ("--replace-minutes", "M", 60.0, "until a failed host is replaced"),
    ):
        words += f" (default: {default:g})"
        add(flag, type=above_zero, metavar=metavar, default=default, help=words)
    add(
        "--checkpoint-minutes",
        type=above_zero,
        metavar="M",
        help="between checkpoints (default: --save-interval steps of the configuration, else 30)",
    )


def _run(arguments: argparse.Namespace) -> int:
    from megatron_hdp.cli import simulated_failures, simulated_items, simulated_run
    from megatron_hdp.simulator.execution import simulate
    from megatron_hdp.simulator.report import write_report

    strategies = _strategies(arguments.strategies)
    slow = _slow(arguments.slow)
    options = simulated_run.options_of(arguments)
    _check_files(arguments, options.hdp_cost_model)
    subject = simulated_run.subject_of(arguments, options)
    setting = simulated_run.setting_of(arguments, options, slow)
    drawn = simulated_run.batches_of(arguments, options)
    batches = drawn.lengths
    for note in filter(None, (*drawn.notes, setting.cost_model.warning)):
        print(note)
    print(simulated_run.headline(setting, batches))
    total = len(dict.fromkeys(["static", *strategies])) * len(batches)
    with steps_bar("steps run", total) as bar:
        run = simulate(setting, batches, strategies, arguments.seed, done=bar.update)
    print(simulated_run.table(run))
    encodings = simulated_items.encodings_of(options, setting, drawn.items, batches)
    if encodings:
        print(simulated_items.text_of(encodings, drawn.item_names))
    forecast = simulated_failures.forecast_of(run, batches, arguments, options)
    if forecast is not None:
        print(simulated_failures.text_of(forecast))
    if arguments.output:
        write_json(arguments.output, simulated_run.record(run, arguments, forecast, encodings))
    for path in arguments.report:
        write_report(run, subject, path)
        print(f"report written to {path}")
    return ExitCode.DONE


def _check_files(arguments: argparse.Namespace, cost_model: Path | None) -> None:
    """Refuse what cannot be written, before the work is done."""
    from megatron_hdp.simulator.plot import import_figure
    from megatron_hdp.simulator.report import SUFFIXES

    written = [("--output", arguments.output), *(("--report", path) for path in arguments.report)]
    read = [
        *(("--config", path) for path in arguments.config),
        ("--data", arguments.data),
        ("--hdp-data", arguments.hdp_data),
        ("--cost-model", cost_model and str(cost_model)),
        ("--rank-speeds", arguments.rank_speeds),
        ("--machine", arguments.machine),
    ]
    check_outputs(written, read, {"--output": (".json",), "--report": SUFFIXES})
    if any(not path.endswith(".html") for path in arguments.report):
        import_figure("a report", ", or write a page (.html)")


def _strategies(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in CHOICES:
            raise ValueError(
                f"--strategies {text}: found {name!r}, expected names of {', '.join(CHOICES)}, "
                "with commas between them"
            )
    return names


def _slow(text: str | None) -> dict[int, float]:
    """Speeds by rank; which ranks there are is known later."""
    from megatron_hdp.planner.online import SLOWEST, is_speed

    found: dict[int, float] = {}
    for pair in text.split(",") if text else []:
        rank, colon, speed = pair.partition(":")
        try:
            number, factor = int(rank), float(speed)
        except ValueError:
            number, factor = -1, 0.0
        if not colon or number < 0 or not is_speed(factor):
            raise ValueError(
                f"--slow {text}: found {pair!r}, expected RANK:SPEED, such as 7:0.5 for an HDP "
                f"rank of half the speed, {SLOWEST:g} at least"
            )
        if number in found:
            raise ValueError(f"--slow {text}: names rank {number} twice; leave one of them out")
        found[number] = factor
    return found
