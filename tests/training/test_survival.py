"""What happens to a job when a rank dies, stops, stands still, fails, or is told to end."""

import os
import re
import signal
import time

import pytest

from tests.support.processes import running, started, until
from tests.training.faults import train
from tests.training.runs import folder, lines_of, long_flags

__all__ = ["folder"]  # a fixture

RANKS = 3
START_S = 120  # imports are done; what a busy machine may take to run the first steps
STALL_S = 10
WITHIN_S = 200  # of a fault; a job that does not notice it waits for 300 s


def outcomes(folder, fault, within_s, num_ranks=RANKS, **changes):
    """Exit codes and texts of the ranks without the fault, and the text of that with it.

    All have ended `within_s` seconds after the fault, but one that was stopped.
    """
    rank = int(fault.split(":")[0])
    marker = folder / "acted"
    with started(num_ranks, folder, train, fault, long_flags(folder, **changes), marker) as ranks:
        until(marker.exists, START_S, ranks)
        deadline = time.monotonic() + within_s
        others = [one for number, one in enumerate(ranks) if number != rank]
        codes = [one.wait(deadline - time.monotonic()) for one in others]
        if not fault.endswith("stop"):
            ranks[rank].wait(deadline - time.monotonic())
        return codes, [one.text() for one in others], ranks[rank].text()


STALL = {"stall_timeout_seconds": STALL_S}
STAGE = STALL | {"pipeline_model_parallel_size": 2, "num_layers": 2, "hdp_tokens_per_rank": 100}
WHERE = ("in forward of micro-batch", "of step 3")
KILLED = (f" (host {os.uname().nodename})", "died or was stopped", *WHERE)
STOPPED = ("died or was stopped: no sign of life for", *WHERE)
STANDS_STILL = ("stalled while 2 of 3 ranks wait: rank 1 ", "stand_still, faults.py:", "of step 3")
NAMED = {  # fault, flags, ranks, words of what the others say
    "killed": ("2:3:kill", {}, 3, *KILLED),
    "killed-which-holds-the-store": ("0:3:kill", {}, 3, *KILLED),
    "stopped": ("2:3:stop", STALL, 3, *STOPPED),
    "stopped-which-holds-the-store": ("0:3:stop", STALL, 3, "the job's store has not answered for"),
    "stands-still": ("1:3:stand-still", STALL, 3, *STANDS_STILL),
    "fails": ("1:2:fail", {}, 3, "failed: RuntimeError: planted"),
    "stage-killed": ("1:3:kill", STAGE, 2, "died or was stopped", WHERE[0]),
    "stage-stands-still": ("1:3:stand-still", STAGE, 2, "stalled while 1 of 2 ranks", WHERE[0]),
}
QUICK = ("stands-still", "fails")


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=() if one in QUICK else pytest.mark.slow) for one in NAMED]
)
def test_a_rank_that_fails_is_named_and_all_end(folder, name):
    fault, changes, num_ranks, *expected = NAMED[name]
    codes, texts, own = outcomes(folder, fault, WITHIN_S, num_ranks, **changes)
    assert codes == [3] * (num_ranks - 1), texts
    if name == "stands-still":
        texts.append(own)
    for text in texts:
        (line,) = [line for line in text.splitlines() if "error on rank" in line]
        found = line if name.startswith("killed") else text
        assert all(words in found for words in (f"rank {fault[0]} (host ", *expected)), text
        assert "second line" not in text
    if name == "stopped":
        assert any("stack of rank" in text and "comm.py" in text for text in texts), texts
    if name == "fails":
        assert "Traceback" in own and "second line" in own


@pytest.mark.parametrize(
    "is_told", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["told", "by-itself"]
)
def test_a_rank_that_dies_at_the_start_is_named(folder, is_told):
    """The others wait for it to make groups. A launcher that notices asks them to end."""
    with started(RANKS, folder, train, "1:0:kill", long_flags(folder), folder / "acted") as ranks:
        assert ranks[1].wait(START_S) == -signal.SIGKILL
        others = ranks[0], ranks[2]
        if is_told:
            for one in others:
                os.kill(one.process.pid, signal.SIGTERM)
        codes = [one.wait(WITHIN_S) for one in others]
        assert codes == [3, 3], [one.text() for one in others]
        for one in others:
            assert "rank 1 (host " in one.text() and "died or was stopped" in one.text()


@pytest.mark.slow
def test_a_slow_rank_is_waited_for(folder):
    """Each of its micro-batches takes less than the limit, all of them more."""
    whole = {"hdp_strategy": "naive", "hdp_tokens_per_rank": 100, "global_batch_size": 32}
    limit = {"stall_timeout_seconds": 3}
    started_at = time.monotonic()
    codes, texts, own = outcomes(folder, "1:3:slow", 120, train_iters=3, **whole, **limit)
    assert codes == [0, 0], (texts, own)
    assert time.monotonic() - started_at > 2 * limit["stall_timeout_seconds"]


@pytest.mark.slow
def test_the_first_step_may_take_longer(folder):
    """A stall in the first step, which compiles, lasts as long as a collective may."""
    run = long_flags(folder, stall_timeout_seconds=1)
    with started(RANKS, folder, train, "1:1:stand-still", run, folder / "acted") as ranks:
        until((folder / "acted").exists, START_S, ranks)
        time.sleep(6)
        assert all(one.process.is_alive() for one in ranks), [one.text() for one in ranks]


@pytest.mark.parametrize(
    "fault, name",
    [
        ("1:2:SIGUSR1", "SIGUSR1"),
        pytest.param("0:2:SIGTERM", "SIGTERM", marks=pytest.mark.slow),
        pytest.param("2:2:twice", "", marks=pytest.mark.slow),
    ],
)
def test_a_signal_to_one_rank_saves_and_ends_all(folder, fault, name):
    save = folder / "checkpoints"
    with started(RANKS, folder, train, fault, long_flags(folder, save=save)) as ranks:
        assert [one.wait(START_S) for one in ranks] == [0] * RANKS, ranks[0].text()
        text = ranks[0].text()
        assert f"{name} received: the job ends after iteration 2, saving first" in text, text
        assert f"saved checkpoint of iteration 2 to {save}" in text, text
    assert (save / "latest_checkpointed_iteration.txt").read_text() == "2"
    rest = long_flags(
        folder, load=save, metrics_path=folder / "rest.jsonl", hdp_tokens_per_rank=100
    )
    with started(1, folder, train, "0:0:none", rest) as ranks:
        assert ranks[0].wait(START_S) == 0, ranks[0].text()
    assert [one["step"] for one in lines_of(folder / "rest.jsonl")] == [3, 4, 5]


@pytest.mark.slow
def test_a_signal_without_a_place_to_save_is_said(folder):
    with started(
        1, folder, train, "0:2:SIGTERM", long_flags(folder, hdp_tokens_per_rank=100)
    ) as ranks:
        assert ranks[0].wait(START_S) == 0, ranks[0].text()
        assert "ends after iteration 2, without --save, nothing is saved" in ranks[0].text()


def test_a_signal_before_the_first_step_ends_all(folder):
    run = long_flags(folder, hdp_tokens_per_rank=50, save=folder / "checkpoints")
    with started(2, folder, train, "1:0:SIGTERM", run) as ranks:
        assert [one.wait(START_S) for one in ranks] == [0, 0], ranks[0].text()
        assert "SIGTERM received: the job ends before its first step" in ranks[0].text()
    assert not (folder / "checkpoints/latest_checkpointed_iteration.txt").exists()


def torchrun(folder, fault, argv, *options, once=None, num_ranks=RANKS):
    words = ["-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks)]
    words += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", *options]
    words += ["-m", "tests.training.faults", fault, *argv]
    marker = {} if once is None else {"FAULT_ONCE": str(once)}
    return running(words, folder / "torchrun.log", **marker)


@pytest.mark.slow
def test_an_exception_is_printed_under_torchrun(folder):
    """Whose excepthook it would have been lost in; torchrun's summary has it, too."""
    run = long_flags(folder, hdp_tokens_per_rank=100)
    with torchrun(folder, "0:1:fail", run, num_ranks=1) as job:
        assert job.wait(START_S) == 1
        log = job.text()
    assert "[rank0]: Traceback (most recent call last):\n[rank0]:   File " in log, log
    assert "[rank0]: RuntimeError: planted\n[rank0]: second line\n" in log, log
    assert "RuntimeError: planted" in log[log.index("Root Cause") :], log


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["kill", "stop", "fail"])
def test_torchrun_restarts_from_the_checkpoint(folder, fault):
    run = {"train_iters": 6, "stall_timeout_seconds": STALL_S}
    plain = long_flags(folder, **run, metrics_path=folder / "plain.jsonl")
    with started(RANKS, folder, train, "0:0:none", plain) as ranks:
        assert [one.wait(START_S) for one in ranks] == [0] * RANKS, ranks[0].text()
    save, once = folder / "checkpoints", folder / "acted"
    run |= {"save": save, "load": save, "save_interval": 2, "metrics_path": folder / "cut.jsonl"}
    # rank 1 fails in step 4, after the checkpoint of step 2
    argv = long_flags(folder, **run)
    with torchrun(folder, f"1:4:{fault}", argv, "--max-restarts", "1", once=once) as job:
        assert job.wait(300) == 0, job.text()
        log = job.text()
    assert once.exists()
    assert "iter_0000002: iteration 2, " in log, log
    for rank in (0, 2):
        assert re.search(rf"error on rank {rank}: .*rank 1 \(host ", log), log
    plain, cut = (lines_of(folder / name) for name in ("plain.jsonl", "cut.jsonl"))
    assert [step["step"] for step in cut] == [1, 2, 3, 4, 5, 6]
    for one, other in zip(plain, cut, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-10)
        assert one["consumed_sequences"] == other["consumed_sequences"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "number, options",
    [
        (signal.SIGTERM, ()),
        (signal.SIGINT, ()),
        (signal.SIGUSR1, ("--signals-to-handle", "SIGTERM,SIGINT,SIGUSR1")),
    ],
)
def test_torchrun_passes_a_signal_on(folder, number, options):
    """torchrun itself ends with 1, its workers with 0."""
    save = folder / "checkpoints"
    run = long_flags(folder, train_iters=100_000, save=save)
    with torchrun(folder, "0:0:none", run, *options) as job:
        job.wait_for("iteration        3/", START_S)
        job.process.send_signal(number)
        assert job.wait(60) == 1
        log = job.text()
    assert f"{number.name} received: the job ends after iteration" in log
    assert "error on rank" not in log and "[rank" not in log
    assert (save / "latest_checkpointed_iteration.txt").exists()
