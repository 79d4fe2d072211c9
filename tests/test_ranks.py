"""The rank runner: results in order, failures by rank, hangs with stacks, nobody left over."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.processes import run_script
from tests.support.ranks import RankError, RankTimeout

_kept: list[dist.Work] = []  # a send whose handle is dropped never arrives


def _sum_of_ranks(offset: float) -> dict:
    total = torch.tensor([dist.get_rank() + offset], dtype=torch.float64)
    dist.all_reduce(total)
    about = {"threads": torch.get_num_threads(), "parent": os.getppid()}
    return {"rank": int(os.environ["RANK"]), "total": total, **about}


def _send_late() -> int:
    """Rank 0 has returned long before rank 1 reads what it sent."""
    payload = torch.arange(100_000)
    if dist.get_rank() == 0:
        _kept.append(dist.isend(payload, 1))
        return 0
    time.sleep(0.3)
    dist.recv(payload, 0)
    return int(payload[-1])


def _fail_on(*ranks: int) -> None:
    store = dist.distributed_c10d._get_default_store()
    store.set(f"connected {dist.get_rank()}", "yes")  # who fails earlier leaves others half-way
    store.wait([f"connected {rank}" for rank in range(dist.get_world_size())])
    if dist.get_rank() in ranks:
        raise ValueError(f"planted on {dist.get_rank()}")
    dist.barrier()


def _die() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def _hang_in_recv(folder: Path) -> None:
    (folder / str(os.getpid())).touch()
    if dist.get_rank() == 0:
        dist.recv(torch.zeros(1), 1)
    elif dist.get_rank() == 1:
        _planted_sleep()


def _planted_sleep() -> None:
    time.sleep(600)


def test_results_come_in_rank_order_with_tensors(run_ranks) -> None:
    results = run_ranks(4, _sum_of_ranks, offset=0.5)
    assert [result["rank"] for result in results] == [0, 1, 2, 3]
    assert all(result["total"].item() == 8.0 for result in results)
    assert {result["threads"] for result in results} == {1}


def test_a_warm_run_is_of_the_same_server(run_ranks) -> None:
    """It has imported torch: 0.2 s a run, where four imports would take 20 s."""
    runs = [run_ranks(2, _sum_of_ranks, 0.0) for _ in range(2)]
    assert len({result["parent"] for results in runs for result in results}) == 1


def test_a_rank_may_return_before_its_peers_have_read(run_ranks) -> None:
    assert run_ranks(2, _send_late) == [0, 99_999]


def test_every_failing_rank_is_named_with_its_traceback(run_ranks) -> None:
    with pytest.raises(RankError, match="ranks failed") as error:
        run_ranks(3, _fail_on, 0, 2)
    assert {0, 2} <= set(error.value.tracebacks)
    for rank in (0, 2):
        assert f"ValueError: planted on {rank}" in error.value.tracebacks[rank]
        assert "_fail_on" in error.value.tracebacks[rank]
        assert f"--- rank {rank} ---" in str(error.value)


def test_a_dead_rank_is_a_failure(run_ranks) -> None:
    with pytest.raises(RankError, match="exit code -9"):
        run_ranks(2, _die)


def test_a_hang_fails_by_the_deadline_with_stacks_and_leaves_nobody(run_ranks, tmp_path) -> None:
    start = time.monotonic()
    with pytest.raises(RankTimeout, match="still running after 1 s: 0, 1") as error:
        run_ranks(3, _hang_in_recv, tmp_path, timeout_s=1)
    assert time.monotonic() - start < 30
    stacks = error.value.tracebacks
    assert sorted(stacks) == [0, 1, 2]
    assert "_hang_in_recv" in stacks[0]
    assert "recv" in stacks[0]
    assert "_planted_sleep" in stacks[1]
    assert stacks[2] == "had returned its result"
    processes = [int(path.name) for path in tmp_path.iterdir()]
    assert len(processes) == 3
    for process in processes:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


def test_a_script_runs_as_if_it_were_started(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, time\n"
        "beside = sys.path[0] == os.path.dirname(__file__)\n"
        "print(__name__, sys.argv[1:], os.environ['COLOUR'], beside)\n"
        "time.sleep(float(sys.argv[2]))\n"
        "sys.exit('it ends badly')"
    )
    done = run_script(script, "a", "0", COLOUR="red")
    assert (done.returncode, done.stderr) == (1, "it ends badly\n")
    assert done.stdout == "__main__ ['a', '0'] red True\n"
    with pytest.raises(subprocess.TimeoutExpired):
        run_script(script, "a", "60", timeout_s=0.5, COLOUR="red")
