"""Of messages: who waits for whom on a GPU. Two ranks share the one there is."""

import os
import re
import tempfile
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from common import seconds_of
from several_ranks import new_group_of_all, one_gpu_environment, run

from megatron_hdp.runtime.ring import RingComm, new_ring_group
from questions import Answer, question

_LATE_S = 2.0
_LIMIT_S = 14.0  # three times, and channels: a topic has a minute
_PER_PEER = re.compile(r"(\d+) p2p channels per peer")


@question("first message of a ring", "no longer than ten later ones")
def _first_message() -> Answer:
    """Whether neighbours are connected, and the options of the communicator taken, at start."""
    (first_ms, later_ms, is_urgent), _ = run(2, message_times, timeout_s=_LIMIT_S)
    found = f"first {first_ms:.1f} ms, later {later_ms:.1f} ms, priority {is_urgent}"
    return Answer(found, bool(is_urgent) and first_ms < 10 * later_ms)


def message_times() -> tuple[float, float, bool]:
    """Body of a rank: milliseconds of the first message in a ring and of later ones."""
    group = new_group_of_all("cuda")
    comm, tensor = RingComm(group), torch.zeros(1 << 20, device="cuda")
    message = partial(comm.pass_on, tensor, (0, 1), dist.get_rank())
    times = [1e3 * seconds_of(lambda: message().wait(), "cuda") for _ in range(6)]
    options = group._get_backend(torch.device("cuda")).options
    return times[0], max(times[1:]), options.is_high_priority_stream


@question("channels that two ranks of the rings' communicator share, by NCCL's log", "4 or more")
def _channels() -> Answer:
    """Of two ranks that say they are two nodes; without the cap that these ranks have otherwise."""
    with tempfile.TemporaryDirectory() as folder:
        run(2, make_wide_rings, folder, timeout_s=_LIMIT_S)
        logs = "".join(path.read_text() for path in Path(folder).iterdir())
    found = [int(number) for number in _PER_PEER.findall(logs)]
    return Answer(f"{found}", min(found) >= 4)


def make_wide_rings(folder: str) -> None:
    """Body of a rank: makes the communicator as a run does, and notes what NCCL logs."""
    log = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT", "NCCL_DEBUG_FILE": f"{folder}/%p"}
    os.environ.update(one_gpu_environment(dist.get_rank()) | log)
    del os.environ["NCCL_MAX_CTAS"]
    torch.cuda.set_device(0)
    everyone, timeout = [list(range(dist.get_world_size()))], timedelta(seconds=_LIMIT_S)
    device = torch.device("cuda", 0)
    new_ring_group(everyone, timeout, device, max_ctas=16, backend="nccl", tell=print)


@question("a ring's message beside a reduction that waits", "passes at once")
def _a_ring_beside_a_reduction() -> Answer:
    """Whether messages pass while a reduction waits for a rank that has not begun it."""
    (sent_s, _), _ = run(2, one_reduces_early, "nothing", timeout_s=_LIMIT_S)
    return Answer(f"after {sent_s:.2f} s", sent_s < 0.5 * _LATE_S)


@question("memory given back beside a reduction that waits", f"waits for it, {_LATE_S:.0f} s")
def _a_driver_beside_a_reduction() -> Answer:
    """Whether giving memory back to the driver waits for that reduction: why the rule is there."""
    (_, freed_s), _ = run(2, one_reduces_early, "free", timeout_s=_LIMIT_S)
    return Answer(f"after {freed_s:.2f} s", freed_s > 0.5 * _LATE_S)


def one_reduces_early(then: str) -> tuple[float, float]:
    """Body of a rank: seconds until a message has passed, and until memory was given back."""
    rings, reductions = RingComm(new_group_of_all("cuda")), new_group_of_all("cuda")
    tensor, block = torch.zeros(1 << 20, device="cuda"), torch.zeros(1 << 28, device="cuda")
    current = torch.cuda.current_stream()
    torch.cuda.synchronize()
    dist.barrier()
    started = time.perf_counter()
    if dist.get_rank() == 0:
        reduction = dist.all_reduce(tensor.clone(), group=reductions, async_op=True)
    rings.pass_on(tensor, (0, 1), dist.get_rank()).wait()
    current.synchronize()
    sent_s = time.perf_counter() - started
    del block
    if dist.get_rank() == 0 and then == "free":
        torch.cuda.empty_cache()
    freed_s = time.perf_counter() - started
    if dist.get_rank() == 1:
        time.sleep(_LATE_S)
        reduction = dist.all_reduce(tensor.clone(), group=reductions, async_op=True)
    reduction.wait()
    torch.cuda.synchronize()
    return sent_s, freed_s
