"""A rank loads by itself until the data plane of its epoch has answered."""

import threading
from dataclasses import replace
from functools import partial

import pytest

from megatron_hdp.data.mixture import Position
from megatron_hdp.data.steps import LocalLoaders, Reader
from megatron_hdp.data_plane import loaders as loaders_module
from megatron_hdp.data_plane.cluster.job_folder import LOST
from megatron_hdp.data_plane.loaders import RayLoaders
from megatron_hdp.data_plane.meanwhile import LocalUntilPlane
from megatron_hdp.data_plane.node_service import NodeService
from megatron_hdp.data_plane.wire import DataPlaneLost, NodeServer, SegmentFolder
from tests.support.node import until
from tests.support.thread_plane import Others, local_steps, plan_settings, planner_of, require_same

READER = Reader(0, 10**6)


@pytest.fixture
def both(tmp_path, setup):
    tmp_path.chmod(0o700)
    made = LocalUntilPlane(
        LocalLoaders(planner_of(setup), READER), RayLoaders(tmp_path / "node.sock", setup, READER)
    )
    yield made
    made.close()


def test_steps_are_the_same_before_and_behind_the_change(
    both, corpus, services, tmp_path, monkeypatch
):
    expected = local_steps(corpus, plan_settings(), READER, 6)
    position, loaders, decoded_by = Position(), [], []
    for name in ("_local", "_plane"):
        note = partial(decoded_by.append, name)
        monkeypatch.setattr(getattr(both, name), "decode", lambda *_, note=note: note())
    for number, step in enumerate(expected):
        require_same(both.get(position), step)
        both.decode(position, ())
        loaders.append(both.num_loaders)
        position = step.totals.after
        if number == 2:
            service = NodeService(Others(services), SegmentFolder.make("steps", tmp_path), 20.0)
            server = NodeServer(tmp_path / "node.sock", service)
            until(lambda: both._plane.has_answered)
        if number < 5:
            both.expect(position)
    assert loaders == [None, None, None, 3, 3, 3]
    assert decoded_by == ["_local"] * 3 + ["_plane"] * 3
    server.close()
    service.close()


def test_a_plane_that_never_comes_is_no_silent_way_to_load_locally(both, tmp_path):
    position = both.get(Position()).totals.after
    (tmp_path / LOST).write_text("found no Ray, expected it")
    until(lambda: both._plane.has_answered)
    with pytest.raises(DataPlaneLost, match="found no Ray"):
        both.get(position)


def test_who_waits_for_the_plane_is_let_go(setup, tmp_path, monkeypatch):
    """Before it has connected, too; the plane is not taken for lost."""
    short = replace(setup, loaders=replace(setup.loaders, timeout_s=1.0))
    monkeypatch.setattr(loaders_module, "_SPARE_S", 1.0)
    loaders = RayLoaders(tmp_path / "node.sock", short, READER)
    threading.Timer(0.2, loaders.interrupt).start()
    for _ in range(2):
        with pytest.raises(DataPlaneLost, match="the client is closed"):
            loaders.get(Position())
    assert not (tmp_path / LOST).exists()
    loaders.close()
