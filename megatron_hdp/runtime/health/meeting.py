"""Where ranks wait for one another without a time limit, before anything is communicated.

One that prepares its data for an hour holds all others up. In a collective they would give up on
it after minutes; here they wait as long as it lives. That it is dead the heartbeats find out.
"""

from __future__ import annotations

import itertools
import time

import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron_hdp.runtime.timeline import MEETING, Timeline

_LOOK_S = 0.05
_MOST_S = 1.0  # between looks, once it takes long
_numbers = itertools.count()


def meet(timeline: Timeline) -> None:
    """Returns once every rank of the job has called it as often as this one.

    Args:
        timeline: where the wait is noted.
    """
    if dist.get_world_size() == 1:
        return
    store = distributed_c10d._get_default_store()
    key = f"megatron_hdp/meeting/{next(_numbers)}"
    num_here, pause_s = store.add(key, 1), _LOOK_S
    with timeline.noted(MEETING):
        while num_here < dist.get_world_size():
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _MOST_S)
            num_here = store.add(key, 0)
