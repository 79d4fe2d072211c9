"""A refusal of the planner in the words of who called it: flags where it names its arguments."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from megatron_hdp.planner.flat_plan import PlanError


@contextmanager
def told_as(names: Mapping[str, str]) -> Iterator[None]:
    """Within the block, what the planner raises names the caller's flags.

    Args:
        names: by the planner's arguments, as its messages write them: ``tokens_per_rank``,
            ``max_length``, ``offload="auto"``.
    """
    try:
        yield
    except PlanError:
        raise
    except ValueError as error:
        if not names:
            raise
        arguments = "|".join(map(re.escape, names))
        message = re.sub(arguments, lambda found: names[found[0]], str(error))
        raise ValueError(message) from error
