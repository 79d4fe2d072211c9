"""How many examples a property draws: a quarter of them where the slow tests are left out."""

import os

BRIEF = "MEGATRON_HDP_BRIEF_TESTS"


def some(number: int) -> int:
    """A quarter of a number of examples in the default suite, all of them in ``test.sh all``."""
    return -(-number // 4) if os.environ.get(BRIEF) else number
