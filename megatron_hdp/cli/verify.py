"""``megatron-hdp verify``: which checkpoints of a folder are good, and which one to resume from."""

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_hdp.cli.shared.outputs import indented
from megatron_hdp.exit_codes import ExitCode

if TYPE_CHECKING:
    from megatron_hdp.megatron.checkpoint.verification import Verdict


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the subcommand."""
    parser = subparsers.add_parser(
        "verify",
        help="check a folder of checkpoints and name the one to resume from",
        description="Reads every file of every checkpoint. Exit code 0: all are good and the "
        "tracker file names the latest. Exit code 1: something is wrong.",
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="the folder of --save")
    parser.add_argument("--json", action="store_true", help="print one JSON object for tools")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from megatron_hdp.megatron.checkpoint.folder import CheckpointFolder
    from megatron_hdp.megatron.checkpoint.verification import verify

    folder: Path = arguments.folder
    checkpoints = CheckpointFolder(folder)
    places = {iteration: checkpoints.find(iteration) for iteration in checkpoints.iterations()}
    named, trouble = None, None
    try:
        if release := checkpoints.release():
            named = checkpoints.iteration_of(release)
            places = {named: release, **places}
        else:
            named = checkpoints.latest()
        if places and named not in places:
            trouble = f"the tracker file names iteration {named}, which is not there"
    except ValueError as error:
        trouble = str(error)
    if not places:
        found = "no such folder" if not folder.is_dir() else "no folder iter_... or release in it"
        raise ValueError(
            trouble or f"{folder}: found {found}, expected checkpoints: give the folder of --save"
        )

    findings = []
    for iteration, place in places.items():
        findings.append(verify(place, iteration))
        if not arguments.json:
            print(_line(findings[-1]), flush=True)
    best = latest_good(findings, named)
    if arguments.json:
        report = {
            "folder": str(folder),
            "tracker": named,
            "trouble": trouble,
            "latest_good": best,
            "checkpoints": [asdict(one) | {"is_good": one.is_good} for one in findings],
        }
        print(indented(report))
    else:
        print(*_verdict(folder, best, named, trouble), sep="\n")
    is_fine = trouble is None and all(one.is_good for one in findings)
    return ExitCode.DONE if is_fine else ExitCode.FAILED


def latest_good(findings: Sequence["Verdict"], named: int | None) -> int | None:
    """Return the iteration to resume from, None if there is none.

    What is later than the one that the tracker names was given up, unless nothing else is good.
    """
    good = [one.iteration for one in findings if one.is_good]
    kept = [iteration for iteration in good if named is None or iteration <= named]
    return max(kept or good, default=None)


def _line(finding: "Verdict") -> str:
    size = f"{finding.num_bytes / 1e6:,.1f} MB"
    notes = [] if finding.has_checksums else ["without checksums, as far as its own files tell"]
    if finding.added_files:
        notes.append(f"not saved with it: {', '.join(finding.added_files)}")
    about = "; ".join([size, *notes])
    verdict = "good   " if finding.is_good else "damaged"
    return "\n".join(
        [
            f"{_name(finding.iteration):<19} {verdict}  {about}",
            *(f"    {fault}" for fault in finding.faults),
        ]
    )


def _verdict(folder: Path, best: int | None, named: int | None, trouble: str | None) -> list[str]:
    lines = [] if trouble is None else [trouble]
    if best is None:
        return [*lines, "none is good: start anew with another --save"]
    if best == named:
        return [*lines, f"the latest good one is {_name(best)}: --load {folder} takes it"]
    return [*lines, f"the latest good one is {_name(best)}: --load {folder} --ckpt-step {best}"]


def _name(iteration: int) -> str:
    return f"iteration {iteration:,}" if iteration else "release"
