"""A Ray cluster as a site runs one: on the loopback, with a token, and nobody's job's."""

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from megatron_hdp.data_plane.cluster.job_folder import folder_of_job
from megatron_hdp.data_plane.cluster.ray_node import ray_node
from megatron_hdp.data_plane.starting import _LOOPBACK
from megatron_hdp.processes.ports import free_port

START_S = 240  # on a machine that is busy with other tests
ASK_S = 180

DRIVER = """
import json, ray, sys
ray.init(address="auto", log_to_driver=False)
five = ray.get(ray.remote(num_cpus=0)(lambda: 5).remote(), timeout=float(sys.argv[1]))
print(json.dumps([five, ray.util.list_named_actors(all_namespaces=True)]))
"""


@dataclass(frozen=True)
class Cluster:
    """One that runs."""

    process: "subprocess.Popen[bytes]"
    """``ray start --head``."""
    environment: dict[str, str]
    """With which others join it."""

    def named_actors(self) -> list[str]:
        """The names of all its actors, once it has also run a task."""
        found = subprocess.run(
            [sys.executable, "-c", DRIVER, str(ASK_S)],
            env=os.environ | self.environment,
            capture_output=True,
            text=True,
            timeout=ASK_S,
            check=False,
        )
        assert found.returncode == 0, found.stderr
        five, actors = json.loads(found.stdout.splitlines()[-1])
        assert five == 5
        return [one["name"] for one in actors]


@contextmanager
def running_cluster(num_cpus: int = 2) -> Iterator[Cluster]:
    """A head that is gone after the block, with all that it started."""
    address = f"127.0.0.1:{free_port()}"
    security = {
        **{"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)},
        **{_LOOPBACK: "0", "SLURM_CPUS_ON_NODE": str(num_cpus)},
    }
    with (
        mock.patch.dict(os.environ, security),
        folder_of_job() as (folder, _),
        ray_node(address, 0, Path(folder), START_S, print) as process,
    ):
        yield Cluster(process, security | {"RAY_ADDRESS": address})
    assert process.poll() is not None
