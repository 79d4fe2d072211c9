"""What a run would be, as a page or a picture for a person who has to decide.

`figures` is the table and where the time of a step goes, `bars` what ranks do when, `charts` are
curves over steps and time; `page` and `picture` put them together.
"""

import os

from megatron_hdp.simulator.execution import Run
from megatron_hdp.simulator.report.figures import COLUMNS, Subject, cells
from megatron_hdp.simulator.report.page import write_page
from megatron_hdp.simulator.report.picture import write_picture

__all__ = ["COLUMNS", "SUFFIXES", "Subject", "cells", "write_report"]

SUFFIXES = (".html", ".png", ".svg", ".pdf")


def write_report(run: Run, subject: Subject, path: str) -> None:
    """Write what a run would be to a file of one of `SUFFIXES`; the same run, the same bytes.

    Raises:
        ImportError: a picture is wanted, and matplotlib is not installed.
    """
    if os.path.splitext(path)[1] == ".html":
        write_page(run, subject, path)
    else:
        write_picture(run, subject, path)
