"""A data plane on this machine, with readers in this process, held against in-process loaders."""

import json
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from megatron_hdp.data.mixture import Position
from megatron_hdp.data.steps import LocalLoaders, Reader
from megatron_hdp.data_plane.loaders import RayLoaders
from megatron_hdp.data_plane.starting import SOCKET, PlanePlace, node_of_plane
from tests.support.thread_plane import plan_settings, planner_of, require_same, setup_of

VOCABULARY = 10**6


class RunningPlane:
    """Its readers take the same steps from it and from loaders in this process."""

    def __init__(self, folder, setup):
        self.folder = folder
        readers = [Reader(rank, VOCABULARY) for rank in range(setup.settings.num_ranks)]
        self.remote = [RayLoaders(folder / SOCKET, setup, one) for one in readers]
        planner = planner_of(setup)
        self.local = [LocalLoaders(planner, one) for one in readers]
        self.position = Position()

    def step(self):
        """Takes the next step, checks that it is the right one; returns the longest wait."""
        for one in self.remote:
            one.expect(self.position)
        began = time.monotonic()
        found = [one.get(self.position) for one in self.remote]
        waited_s = time.monotonic() - began
        for one, local in zip(found, self.local, strict=True):
            require_same(one, local.get(self.position))
        self.position = found[0].totals.after
        return waited_s

    def status(self):
        """What the node says of itself, once all loaders have answered it."""
        deadline = time.monotonic() + 180
        while time.monotonic() < deadline:
            with suppress(FileNotFoundError):
                found = json.loads((self.folder / "status.json").read_text())
                crews = found.get("sources", {}).get("train", {})
                told = [bool(one) for crew in crews.values() for one in crew["loaders"]]
                if told and all(told):
                    return found
            time.sleep(0.1)
        raise AssertionError("not all loaders have answered within three minutes")

    def close(self):
        for one in (*self.remote, *self.local):
            one.close()


@contextmanager
def running_plane(path, num_ranks=4, timeout_s=60.0, log_stays=False, **loaders):
    """A plane over the training split of a file of --hdp-data; nothing of it is left behind."""
    setup = setup_of(path, plan_settings(num_ranks=num_ranks), **loaders)
    place = PlanePlace.make("127.0.0.1", 1)
    spec = setup.loaders
    num_spares = len(spec.crews(setup.spec.sources)) * (spec.min + spec.shadows)
    with node_of_plane(place, 0, timeout_s, num_spares) as folder:
        plane = RunningPlane(folder, setup)
        try:
            yield plane
        except BaseException:
            print((folder / "log").read_text())
            raise
        finally:
            plane.close()
    assert folder.exists() is log_stays
    assert not processes_of(folder)


def processes_of(folder: Path):
    """Processes that a plane has started and that are still there; they get a moment to end."""
    deadline = time.monotonic() + 20
    while True:
        found = []
        for process in psutil.process_iter(["cmdline", "status"]):
            words = " ".join(process.info["cmdline"] or [])
            if str(folder) in words and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(process)
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.2)
