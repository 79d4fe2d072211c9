"""The runs of a Megatron-LM checkout that the default suite needs: made once in a session."""

import fcntl
import os
from pathlib import Path

import pytest

from tests.megatron.lm.runs import LENGTHS, drive
from tests.support.gradients import write_corpus


@pytest.fixture(scope="session")
def _common(request, tmp_path_factory):
    """A folder with the runs of each module's ``common_plan``, shared by all workers of a session.

    One process that imports Megatron once makes those of all selected modules.
    """
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    folder = base / "megatron-lm"
    folder.mkdir(exist_ok=True)
    modules = {item.module for item in request.session.items if hasattr(item.module, "common_plan")}
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (folder / "failed").exists():
            pytest.fail("another worker made these runs and failed")
        if not (folder / "done").exists():
            (folder / "failed").touch()
            plan = []
            for module in sorted(modules, key=lambda one: one.__name__):
                (folder / name_of(module)).mkdir(exist_ok=True)
                write_corpus(folder / name_of(module), LENGTHS)
                plan += module.common_plan(folder / name_of(module))
            drive(folder, plan)
            (folder / "failed").rename(folder / "done")
    return folder


@pytest.fixture(scope="module")
def runs(request, _common) -> Path:
    """The module's part of the folder."""
    return _common / name_of(request.module)


def name_of(module):
    return module.__name__.rpartition("test_")[2]
