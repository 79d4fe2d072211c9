"""Pictures that loaders beside the ranks decode: the same bits, whatever dies, on any ranks."""

import os
import signal
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_hdp.data.media import stored
from megatron_hdp.data_plane.hooks import VARIABLE
from tests.training.media_runs import ALONE, losses
from tests.training.runs import BUCKETS, SHARDED, largest_difference
from tests.training.test_pictures import PARTS, pictures_run

pytest.importorskip("ray", reason="no Ray: pip install 'megatron-hdp[ray]'")
pytestmark = pytest.mark.slow

RUN_S = 600
KILLS, FOLDER = 4, "TEST_DEATHS"
PLANE = "loaders: {backend: ray, max: 2, shadows: 1}\n"


def with_plane(folder, **overrides):
    """A run that loads in its ranks, and one that loads beside them."""
    local = pictures_run(folder, **overrides)
    path = folder / "plane.yaml"
    path.write_text(local.hdp_data.read_text() + PLANE)
    return local, replace(local, hdp_data=path)


@pytest.mark.parametrize("ranks, flags", [(3, SHARDED | BUCKETS), (4, PARTS)])
def test_the_same_run(run_ranks, tmp_path, ranks, flags):
    local, remote = with_plane(tmp_path, steps=4, **flags)
    expected = run_ranks(ranks, losses, local)
    assert run_ranks(ranks, losses, remote, timeout_s=RUN_S) == expected


def test_it_resumes_on_other_ranks(run_ranks, tmp_path):
    """Four ranks, then three, then five: the steps of one."""
    local, remote = with_plane(tmp_path, **SHARDED, **BUCKETS)
    expected = run_ranks(1, losses, replace(local, **ALONE))[0]
    folder, found = tmp_path / "checkpoints", []
    for ranks, until_step in ((4, 2), (3, 4), (5, len(expected))):
        more = {"load": folder} if found else {}
        part = replace(remote, save=folder, train_iters=until_step, **more)
        found += run_ranks(ranks, losses, part, timeout_s=RUN_S)[0]
    assert largest_difference(found, expected) <= 1e-10
    assert [one[3:] for one in found] == [one[3:] for one in expected]


def die_while_decoding():
    """In each process of the plane: the first pictures end it, one after the other."""
    decode = stored.StoredPicture.decoded

    def deadly(picture):
        for number in range(KILLS):
            with suppress(FileExistsError):
                Path(os.environ[FOLDER], str(number)).touch(exist_ok=False)
                os.kill(os.getpid(), signal.SIGKILL)
        return decode(picture)

    stored.StoredPicture.decoded = deadly


def losses_in(environment, arguments):
    """Body of a rank: its plane's processes have more in their environment."""
    os.environ.update(environment)
    return losses(arguments)


def test_loaders_that_die_while_they_decode(run_ranks, tmp_path):
    local, remote = with_plane(tmp_path, steps=4)
    expected = run_ranks(2, losses, local)
    deaths = tmp_path / "deaths"
    deaths.mkdir()
    hook = f"{__name__}:{die_while_decoding.__name__}"
    environment = {VARIABLE: hook, FOLDER: str(deaths)}
    assert run_ranks(2, losses_in, environment, remote, timeout_s=RUN_S) == expected
    assert len(list(deaths.iterdir())) == KILLS
