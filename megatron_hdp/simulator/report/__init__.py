"""What a run would be, as a page or a picture for a person who has to decide.

`figures` is the table, `parts` where the time of a step goes, `bars` what ranks do when, `charts`
curves over steps and time; `page` and `picture` put them together.
"""

from megatron_hdp.simulator.report.figures import COLUMNS, cells
from megatron_hdp.simulator.report.subject import Subject
from megatron_hdp.simulator.report.writing import SUFFIXES, write_report

__all__ = ["COLUMNS", "SUFFIXES", "Subject", "cells", "write_report"]
