"""What a run draws, computed apart from it."""

from megatron_hdp.data.shuffles import Feistel


def first_rows(num_rows, seed, count=None):
    """Rows of a run's first `count` sequences (all of an epoch) from one source, in order."""
    return Feistel(num_rows, seed).rows(0, 0, num_rows if count is None else count)
