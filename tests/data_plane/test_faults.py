"""Whatever dies in a data plane, ranks get the same steps, or hear at once that it is lost."""

import os
import random
import signal
import time
from functools import partial
from itertools import islice, takewhile

import psutil
import pytest

from megatron_hdp.data.mixture import Position
from megatron_hdp.data_plane.cluster.job_folder import remove_dead
from megatron_hdp.data_plane.wire import DataPlaneLost
from tests.support import node
from tests.support.plane import processes_of, running_plane
from tests.support.thread_plane import write_notes, write_pairs

pytest.importorskip("ray", reason="no Ray: pip install 'megatron-hdp[ray]'")

MOST_WAIT_S = 240  # on a machine that is busy with other tests


def kill(pid):
    os.kill(pid, signal.SIGKILL)


def steps(plane, count=3):
    """Takes some steps, so slowly that some are made ahead; returns the longest wait."""
    waits = []
    for _ in range(count):
        waits.append(plane.step())
        time.sleep(0.2)
    return max(waits)


until = partial(node.until, timeout_s=MOST_WAIT_S)


def pids_of(plane, source):
    return [one["pid"] for one in plane.status()["sources"]["train"][source]["loaders"]]


@pytest.mark.parametrize(
    ("together", "others"),
    [(3, False), pytest.param(1, True, marks=pytest.mark.slow)],
    ids=["shared loader", "loader-planner-and-constructor"],
)
def test_a_loader_the_planner_and_the_constructor_die(tmp_path, together, others):
    """One after the other, in one plane: its steps stay those of in-process loaders."""
    path = write_pairs(tmp_path)
    with running_plane(path, shadows=1, sources_per_loader=together) as plane:
        steps(plane)
        before = plane.status()
        for role in ("planner", "constructor"):  # Ray would import Arrow into them
            maps = psutil.Process(before[role]["pid"]).memory_maps()
            assert [one.path for one in maps if "arrow" in one.path] == []
        assert (pids_of(plane, "web") == pids_of(plane, "chat")) == (together > 1)
        for number in (signal.SIGTERM, signal.SIGUSR1):  # as Slurm warns all of a job
            os.kill(before["pid"], number)
        first, shadow = pids_of(plane, "web")
        kill(first)
        assert steps(plane, 6) < MOST_WAIT_S
        until(lambda: first not in pids_of(plane, "web"))
        assert shadow in pids_of(plane, "web")
        assert (pids_of(plane, "web") == pids_of(plane, "chat")) == (together > 1)
        if not others:
            return

        kill(before["planner"]["pid"])
        assert steps(plane, 6) < MOST_WAIT_S
        until(lambda: plane.status()["planner"]["epoch"] == before["planner"]["epoch"] + 1)

        kill(before["constructor"]["pid"])
        assert steps(plane, 4) < MOST_WAIT_S
        until(lambda: plane.status()["constructor"]["pid"] != before["constructor"]["pid"])


@pytest.mark.slow
def test_a_source_without_a_shadow_waits_for_its_loader(tmp_path):
    with running_plane(write_pairs(tmp_path)) as plane:
        steps(plane)
        (loader,) = pids_of(plane, "code")
        kill(loader)
        assert steps(plane, 6) < MOST_WAIT_S
        until(lambda: loader not in pids_of(plane, "code"))


@pytest.mark.slow
def test_text_that_is_tokenised_on_the_fly_survives_its_loaders(tmp_path):
    write_pairs(tmp_path)
    path = write_notes(tmp_path, 200, range(40))
    with running_plane(path, min=2, shadows=1) as plane:
        steps(plane)
        for one in pids_of(plane, "notes"):
            kill(one)
            assert steps(plane, 4) < MOST_WAIT_S


@pytest.mark.slow
def test_random_kills(tmp_path):
    """Twenty of them, anywhere and at any moment."""
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    with running_plane(write_pairs(tmp_path), shadows=1) as plane:
        steps(plane)  # there are no loaders before
        for _ in range(20):
            status = plane.status()
            pids = [status["planner"]["pid"], status["constructor"]["pid"]]
            for source in status["sources"]["train"]:
                pids += pids_of(plane, source)
            victim = rng.choice(pids)
            if psutil.pid_exists(victim):
                kill(victim)
            time.sleep(rng.random())
            assert steps(plane, 2) < MOST_WAIT_S


@pytest.mark.slow
@pytest.mark.parametrize("what", ["gcs_server", "raylet", "megatron_hdp.data_plane.host"])
def test_what_never_comes_back_is_told_at_once(tmp_path, what, capfd):
    with running_plane(write_pairs(tmp_path), log_stays=True) as plane:
        steps(plane)
        host = psutil.Process(plane.status()["pid"])
        processes = [host, *host.children(recursive=True)]
        (process,) = (one for one in processes if what in " ".join(one.cmdline()[:4]))
        process.kill()
        with pytest.raises(DataPlaneLost, match=r"has ended") as lost:
            for _ in range(100):
                plane.step()
                time.sleep(0.1)
        log = plane.folder / "log"
    assert "start the job again" in str(lost.value) and str(lost.value).endswith(f" {log}")
    assert f"the last lines of {log}:\n" in capfd.readouterr().err
    assert log.exists() and remove_dead(plane.folder, even_lost=True)


def test_no_process_outlives_the_one_that_started_the_plane(tmp_path):
    """A test of the check that all of these tests make."""
    assert processes_of(tmp_path / "nowhere") == []


def steps_of(plane):
    """What all readers get of steps, one after another."""
    position = Position()
    while True:
        step = [one.get(position) for one in plane.remote]
        position = step[0].totals.after
        yield step


@pytest.mark.slow  # roles/test_failures.py asks the same without Ray
@pytest.mark.parametrize("how", ["their file changes", "their loaders hang"])
def test_texts_that_the_run_goes_on_without(tmp_path, how):
    """The planner asks their loaders how long rows are, and a constructor for tokens."""
    write_pairs(tmp_path, more="")
    schedule = "schedule: [{from: 0, weights: {notes: 0.5, web: 0.5}}]\n"
    policy = ", on-failure: go-on-without"
    path = write_notes(tmp_path, 2000, range(1, 41), policy, schedule)
    with running_plane(path, timeout_s=30.0, min=2) as plane:
        found = steps_of(plane)
        fine = next(found), next(found), next(found)
        if how == "their loaders hang":
            for one in pids_of(plane, "notes"):
                os.kill(one, signal.SIGSTOP)
        else:
            with open(tmp_path / "notes.jsonl", "a") as file:
                file.write('\n{"text": "one more"}')
            os.utime(tmp_path / "notes.jsonl")
        later = [*takewhile(lambda step: not step[0].totals.without, found), *islice(found, 3)]
        # a status is of some moment, perhaps before that
        until(lambda: plane.status()["planner"]["failed"]["train"].keys() == {"notes"})
    last = later[-1][0].totals
    why = "no tokens within 30 s: " if how == "their loaders hang" else "has changed"
    assert why in last.without["notes"]
    assert [one.totals.amounts.source_tokens[0] for one in later[-1]] == [0] * 4
    assert last.sequences == 12 and (len(later) < 12 or how != "their loaders hang")
    lost = [lost for step in later for one in step for lost in one.lost]
    assert {one.name for one in lost} <= {"notes"}
    assert not fine[0][0].totals.without and fine[0][0].totals.amounts.source_tokens[0] > 0
