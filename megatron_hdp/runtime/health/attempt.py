"""What a rank says to torchrun: why it failed, and which attempt of the job it belongs to.

torchrun's agent keeps one store for all attempts, so that a new attempt would read addresses that
ranks of the previous one left there. Its count of restarts cannot tell attempts apart: each node
counts for itself.
"""

from __future__ import annotations

import os
import time
import uuid

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

_POLL_S = 0.02


def store_of_attempt(store: dist.Store, rank: int, world_size: int) -> dist.Store:
    """A part of `store` that only the ranks which now call this share.

    Every rank says hello with a word that was never used before; rank 0 answers that word with the
    name of the attempt, so nobody can take an answer from an earlier attempt for this one's.

    Raises:
        dist.DistStoreError: a rank does not come within the store's timeout.
    """
    if rank > 0:
        word = uuid.uuid4().hex
        store.set(f"hello/{rank}", word)
        name = store.get(f"answer/{word}").decode()
        store.add(f"joined/{name}", 1)
    else:
        name = uuid.uuid4().hex
        _answer_all(store, name, world_size)
    return dist.PrefixStore(f"attempt/{name}", store)


def tell_torchrun(error: Exception) -> None:
    """Writes `error` with its traceback to the file that torchrun named, if it did."""
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        get_error_handler().record_exception(error)


def _answer_all(store: dist.Store, name: str, world_size: int) -> None:
    """Answers the ranks' words until all have come; some may at first be of an earlier attempt."""
    keys = [f"hello/{rank}" for rank in range(1, world_size)]
    answered: set[bytes] = set()
    while store.add(f"joined/{name}", 0) < len(keys):
        words = store.multi_get(keys)  # waits for ranks that never said anything
        for word in set(words) - answered:
            store.set(f"answer/{word.decode()}", name)
        answered.update(words)
        time.sleep(_POLL_S)
