"""The loops of one's own that the docs show: they train, alike on any number of ranks."""

import contextlib
import io
import re
import runpy
import sys
from unittest import mock

import pytest

from megatron_hdp.processes.ports import free_port
from tests.support.processes import run_script
from tests.support.scripts import SCRIPTS

FOLDER = SCRIPTS / "examples" / "own_loop"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))
LOSS = re.compile(r"^step \d+: loss (-?\d+\.\d+)", re.MULTILINE)
WIDE = {"--hdp-tokens-per-rank": 4096}


def printed(name, **flags):
    """Body of a rank: what a script prints."""
    words = [f"{flag}={value}" for flag, value in flags.items()]
    out = io.StringIO()
    with (
        contextlib.chdir(SCRIPTS.parent),
        contextlib.redirect_stdout(out),
        mock.patch.object(sys, "argv", [name, *words]),
    ):
        runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    return out.getvalue()


def losses(text):
    return [float(one) for one in LOSS.findall(text)]


@pytest.mark.slow  # gradients of a session's steps: tests/session/test_exactness.py
@pytest.mark.parametrize("name", NAMES)
def test_any_number_of_ranks_trains_alike(run_ranks, name):
    (alone,) = run_ranks(1, printed, name, **WIDE)
    together = run_ranks(2, printed, name)
    assert len(set(losses(alone))) == 3
    assert losses(together[0]) == pytest.approx(losses(alone), rel=2e-5, abs=2e-6)
    assert losses(together[1]) == []


def test_a_script_joins_the_job_that_started_it():
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    words = [f"{flag}={value}" for flag, value in WIDE.items()]
    done = run_script(FOLDER / "train.py", *words, **place, MASTER_PORT=str(free_port()))
    assert done.returncode == 0, done.stderr
    assert len(losses(done.stdout)) == 3
