"""Processes end with the one that started them: ranks with their launcher, helpers with their rank.

Needs the standard library alone, so that it comes before all that takes time to import.
"""

from megatron_hdp.processes.children import adopt_orphans, bound_to_this_process, end_with_parent

__all__ = ["adopt_orphans", "bound_to_this_process", "end_with_parent"]
