"""The flags of a profile, and the whole way from a command line to the files.

What it needs to work is imported when it runs, so that help is immediate.
"""

import argparse
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from megatron_hdp.processes.ports import free_port

if TYPE_CHECKING:
    from megatron_hdp.megatron.options import TrainingArguments
    from megatron_hdp.profile.job import Profile

_PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_LINE_S = 10.0  # between two lines of progress


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Declares the flags that are not those of training."""
    add = parser.add_argument
    add(
        "--output",
        required=True,
        type=Path,
        metavar="FILE",
        help="write the cost model as JSON, and beside it FILE with .report.json for its suffix",
    )
    add(
        "--budget-seconds",
        type=_seconds,
        default=120.0,
        metavar="S",
        help="time to measure for, without building the model; three passes are made at least, and "
        "times too noisy to use are measured again, twice at most (default: 120)",
    )
    add(
        "--force",
        action="store_true",
        help="write the cost model though its times are too noisy to use; whoever reads the file "
        "says so",
    )
    add(
        "--picture",
        type=Path,
        metavar="FILE",
        help="draw what was measured against the fit (.png, .svg or .pdf)",
    )


def items_path(output: Path) -> Path:
    """Where what items cost is written, of a run with an encoder."""
    return output.with_suffix(".items.json")


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"found {text}, expected seconds above 0")
    return value


def report_path(output: Path) -> Path:
    """Where the report of a cost model is written."""
    return output.with_suffix(".report.json")


def arguments_of(own: argparse.Namespace, training: Sequence[str]) -> "TrainingArguments":
    """Checks everything that can be checked before ranks meet, and sets what CUDA reads.

    Args:
        own: values of the flags that `add_flags` declares.
        training: flags of the training command, ``--config`` among them.

    Raises:
        ValueError: a flag or a file is wrong; the same on every rank.
        ImportError: a picture is wanted, and matplotlib is not installed.
    """
    if is_first_rank():  # who writes
        _check_files(own)
    from megatron_hdp.megatron import known_warnings
    from megatron_hdp.megatron.options import parse_arguments

    known_warnings.leave_out()
    arguments = parse_arguments([*training, "--hybrid-data-parallel"], needs_data=False)
    _prepare_device(arguments)
    return arguments


def profile_of(own: argparse.Namespace, arguments: "TrainingArguments") -> None:
    """Profiles and writes the files; in a job, every rank calls this after `arguments_of`.

    Raises:
        ValueError: the ranks do not go with the configuration, or nothing could be fitted.
    """
    _take_place_alone()
    profile = _measured(arguments, own.budget_seconds, own.force)
    if profile is not None:
        write(profile, own)


def is_first_rank() -> bool:
    """Whether this process is the job's first rank, as far as its environment says."""
    return os.environ.get("RANK", "0") == "0"


def _check_files(own: argparse.Namespace) -> None:
    from megatron_hdp.files import is_stream

    paths = {"--output": own.output, "--picture": own.picture}
    for flag, path in paths.items():
        if path is None:
            continue
        if not path.parent.is_dir():
            raise ValueError(
                f"{flag} {path}: found no folder {path.parent}, expected one to write into: "
                "make it or give another path"
            )
        if path.is_dir():
            raise ValueError(f"{flag} {path}: found a folder, expected a file's name: add one")
        if is_stream(path):
            raise ValueError(
                f"{flag} {path}: found a device or a pipe, expected a file, beside which the "
                "report is written: give another path"
            )
    if own.picture is None:
        return
    names = {"--output": own.output, "the report of --output": report_path(own.output)}
    for flag, path in names.items():
        if os.path.realpath(own.picture) == os.path.realpath(path):
            raise ValueError(f"--picture {own.picture} is the file of {flag} as well: give another")
    if own.picture.suffix not in (".png", ".svg", ".pdf"):
        raise ValueError(
            f"--picture {own.picture}: found the suffix {own.picture.suffix!r}, expected .png, "
            ".svg or .pdf: change it"
        )
    from megatron_hdp.simulator.plot import import_figure

    import_figure("a profile")  # rather now than after minutes


def _prepare_device(arguments: "TrainingArguments") -> None:
    from megatron_hdp.runtime import cuda

    doubts = cuda.prepare(
        cuda.Run(
            capability=cuda.compute_capability(),
            tensor_parallel=arguments.tensor_model_parallel_size > 1,
            keeps_module_loading=arguments.hdp_module_loading == "inherit",
            hybrid_data_parallel=True,
        )
    )
    for doubt in doubts if is_first_rank() else ():
        print(f"profile: {doubt}", flush=True)


def _take_place_alone() -> None:
    """Makes a process that nobody gave a place in a job the only rank of one."""
    if any(name in os.environ for name in _PLACE[:2]):
        return
    place = ("0", "1", "0", "1", "127.0.0.1", str(free_port()))
    os.environ.update(zip(_PLACE, place, strict=True))


def _measured(arguments: "TrainingArguments", budget_s: float, force: bool) -> "Profile | None":
    """The profile, on the first rank of the job; None on the others."""
    from megatron_hdp.megatron import parallel
    from megatron_hdp.profile.job import run_profile

    parallel.join_job(arguments)
    is_first = parallel.is_first_rank()
    with ProgressBar(is_first) as progress:
        profile = run_profile(arguments, budget_s, progress, force=force)
    parallel.leave_job()
    return profile if is_first else None


class ProgressBar:
    """How far a profile is: a bar on a terminal, else a line now and then; on the first rank only.

    What `passes.measure` tells about itself; use it in a ``with`` block.
    """

    def __init__(self, is_shown: bool) -> None:
        self._is_shown = is_shown
        self._bar: Any = None
        self._next_s = time.monotonic() + _LINE_S

    def __enter__(self) -> Self:
        if self._is_shown and sys.stderr.isatty():
            from tqdm import tqdm

            form = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}"
            self._bar = tqdm(total=100, bar_format=form, desc="profile")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def __call__(self, what: str, share: float) -> None:
        """Shows what is done now, and the share of the budget that is gone."""
        percent = min(100, int(100 * share))
        if self._bar is not None:
            self._bar.set_description(f"profile, {what}", refresh=False)
            self._bar.update(max(0, percent - self._bar.n))
        elif self._is_shown and time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + _LINE_S
            print(f"profile: {percent} % of the budget, {what}", file=sys.stderr, flush=True)


def write(profile: "Profile", own: argparse.Namespace) -> None:
    """Prints a profile and writes its files."""
    from megatron_hdp.files import new_file
    from megatron_hdp.profile import report
    from megatron_hdp.profile.picture import draw

    print(report.as_text(profile))
    texts = {
        own.output: profile.cost_model.to_json(),
        report_path(own.output): report.as_json(profile),
    }
    if profile.items is not None:
        texts[items_path(own.output)] = profile.items.to_json()
    for path, text in texts.items():
        with new_file(path, durable=False) as temporary:
            Path(temporary).write_bytes(text)
        print(f"written to {path}")
    if profile.items is not None:
        print(f"give the last one as --hdp-item-costs: {profile.items}")
    if own.picture is not None:
        draw(profile, own.picture)
        print(f"picture written to {own.picture}")
