"""How many examples a property's test draws: a third of them where the slow tests are left out."""

import os

BRIEF = "MEGATRON_HDP_BRIEF_TESTS"


def some(number: int) -> int:
    """A third of a number of examples in the default suite, all of them in ``test.sh all``."""
    return -(-number // 3) if os.environ.get(BRIEF) else number
