"""Whatever dies in a data plane, ranks get the same steps, or hear at once that it is lost."""

import json
import os
import random
import signal
import time

import psutil
import pytest

from megatron_hdp.data_plane.wire import DataPlaneLost
from tests.support.plane import processes_of, running_plane
from tests.support.sources import data_file, write_notes, write_sources

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


def until(is_so):
    """Waits for what the node says of itself twice a second."""
    deadline = time.monotonic() + MOST_WAIT_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def pids_of(plane, source):
    return [one["pid"] for one in plane.status()["sources"]["train"][source]["loaders"]]


def test_a_loader_the_planner_and_the_constructor_die(tmp_path):
    """One after the other, in one plane: its steps stay those of in-process loaders."""
    path = data_file(write_sources(tmp_path))
    with running_plane(path, shadows=1) as plane:
        steps(plane)
        before = plane.status()
        for number in (signal.SIGTERM, signal.SIGUSR1):  # as Slurm warns all of a job
            os.kill(before["pid"], number)
        first, shadow = before["sources"]["train"]["web"]["loaders"]
        kill(first["pid"])
        assert steps(plane, 6) < MOST_WAIT_S
        until(lambda: first["pid"] not in pids_of(plane, "web"))
        assert shadow["pid"] in pids_of(plane, "web")

        kill(before["planner"]["pid"])
        assert steps(plane, 6) < MOST_WAIT_S
        until(lambda: plane.status()["planner"]["epoch"] == before["planner"]["epoch"] + 1)

        kill(before["constructor"]["pid"])
        assert steps(plane, 4) < MOST_WAIT_S
        until(lambda: plane.status()["constructor"]["pid"] != before["constructor"]["pid"])


@pytest.mark.slow
def test_a_source_without_a_shadow_waits_for_its_loader(tmp_path):
    with running_plane(data_file(write_sources(tmp_path))) as plane:
        steps(plane)
        (loader,) = plane.status()["sources"]["train"]["code"]["loaders"]
        kill(loader["pid"])
        assert steps(plane, 6) < MOST_WAIT_S
        until(lambda: loader["pid"] not in pids_of(plane, "code"))


@pytest.mark.slow
def test_text_that_is_tokenised_on_the_fly_survives_its_loaders(tmp_path):
    write_sources(tmp_path)
    path = write_notes(tmp_path, 200, range(40))
    with running_plane(path, min=2, shadows=1) as plane:
        steps(plane)
        for one in plane.status()["sources"]["train"]["notes"]["loaders"]:
            kill(one["pid"])
            assert steps(plane, 4) < MOST_WAIT_S


@pytest.mark.slow
def test_random_kills(tmp_path):
    """Twenty of them, anywhere and at any moment."""
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    with running_plane(data_file(write_sources(tmp_path)), shadows=1) as plane:
        steps(plane)  # there are no loaders before
        for _ in range(20):
            status = plane.status()
            pids = [status["planner"]["pid"], status["constructor"]["pid"]]
            pids += [
                one["pid"]
                for crew in status["sources"]["train"].values()
                for one in crew["loaders"]
            ]
            victim = rng.choice(pids)
            if psutil.pid_exists(victim):
                kill(victim)
            time.sleep(rng.random())
            assert steps(plane, 2) < MOST_WAIT_S


@pytest.mark.slow
@pytest.mark.parametrize("what", ["gcs_server", "raylet", "megatron_hdp.data_plane.host"])
def test_what_never_comes_back_is_told_at_once(tmp_path, what):
    with running_plane(data_file(write_sources(tmp_path))) as plane:
        steps(plane)
        (process,) = (
            one
            for one in processes_of_plane(plane)
            if any(what in word for word in one.cmdline()[:4])
        )
        process.kill()
        with pytest.raises(DataPlaneLost, match=r"has ended") as lost:
            for _ in range(100):
                plane.step()
                time.sleep(0.1)
        assert "start the job again" in str(lost.value)


def processes_of_plane(plane):
    host = json.loads((plane.folder / "status.json").read_text())["pid"]
    found = psutil.Process(host)
    return [found, *found.children(recursive=True)]


def test_no_process_outlives_the_one_that_started_the_plane(tmp_path):
    """A test of the check that all of these tests make."""
    assert processes_of(tmp_path / "nowhere") == []
