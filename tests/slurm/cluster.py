"""A Slurm of its own for the tests: munged, slurmctld and a slurmd for each made-up node.

Everything lies in one folder: configuration, key, sockets, state and logs. The daemons stay in the
foreground as children of the test; leaving the context ends them and what their jobs left.
"""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from megatron_hdp.processes.ports import free_port

DAEMONS = ("munged", "slurmctld", "slurmd")
COMMANDS = ("sbatch", "srun", "squeue", "sinfo", "scancel", "scontrol")
NODES = ("hdp-a", "hdp-b")
START_S = 60
COMMAND_S = 60
# Slurm holds a job that is queued again for as long as a credential may be used; by default 120 s
CREDENTIAL_S = 5
GRACE_S = 120  # between the warning of a job that is preempted and its end


def what_is_missing() -> str | None:
    """Why no Slurm can be started here, with the remedy; None if one can."""
    found = {name: _path_of(name) for name in DAEMONS + COMMANDS}
    missing = [name for name, path in found.items() if path is None]
    if not missing:
        return None
    return (
        f"no Slurm: {', '.join(missing)} not found; install them, "
        "on Debian by: apt-get install -y slurmctld slurmd slurm-client munge"
    )


def _path_of(program: str) -> str | None:
    return shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin")


@dataclass
class Cluster:
    """A running Slurm; `run` calls its commands."""

    folder: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        """What Slurm's commands need, without what an allocation around the tests may have set."""
        outside = {name: text for name, text in os.environ.items() if not name.startswith("SLURM")}
        return outside | {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def run(self, *words: Any, **more: str) -> str:
        """Standard output of one command; `more` goes to its environment."""
        done = subprocess.run(
            [str(word) for word in words],
            env=self.environment | more,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
        )
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    def job(self, number: int | str) -> dict[str, str]:
        """The fields of ``scontrol show job``."""
        words = self.run("scontrol", "--oneliner", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def start(self, name: str, *options: Any) -> None:
        """A daemon in the foreground, its output in a file of its name."""
        with (self.folder / f"{name}.out").open("ab") as output:
            path = _path_of(name.split("-")[0])
            words = [str(word) for word in (path, *options)]
            process = subprocess.Popen(
                words, env=self.environment, stdout=output, stderr=output, cwd=self.folder
            )
        self.processes.append(process)

    def start_node(self, node: str) -> None:
        """The slurmd of a node."""
        self.start(f"slurmd-{node}", "-D", "-N", node)

    def bring_back(self, node: str) -> None:
        """A lost node, ready for jobs again."""
        self.start_node(node)
        self.run("scontrol", "update", f"nodename={node}", "state=resume")
        self.wait_until_idle()

    def lose_node(self, node: str) -> None:
        """Ends a node's slurmd and all that runs below it, as a power failure would.

        Slurm finds out by itself only after `SlurmdTimeout`; it is told, as by a site's checks.
        """
        doomed: list[psutil.Process] = []
        for one, environment in self.processes_here():
            with suppress(psutil.Error):
                if environment.get("SLURMD_NODENAME") == node:
                    parent = one.parent()
                    is_step = parent is not None and "slurmstepd" in " ".join(parent.cmdline())
                    doomed += [parent, one] if parent is not None and is_step else [one]
        (slurmd,) = [p for p in self.processes if list(p.args)[-2:] == ["-N", node]]
        slurmd.kill()
        slurmd.wait(COMMAND_S)
        self.processes.remove(slurmd)
        for one in doomed:
            with suppress(psutil.Error):
                one.kill()
        self.run("scontrol", "update", f"nodename={node}", "state=down", "reason=lost")

    def processes_here(self) -> Iterator[tuple[psutil.Process, dict[str, str]]]:
        """Processes of this Slurm's jobs, whose ids begin at 1 in each, with their environments."""
        for one in psutil.process_iter():
            with suppress(psutil.Error):
                environment = one.environ()
                if environment.get("SLURM_CONF", "").startswith(str(self.folder)):
                    yield one, environment

    def wait_until_idle(self) -> None:
        """Until every node can take a job."""
        states = ("sinfo", "--noheader", "--Node", "--partition=all", "--format=%T")
        idle = ["idle"] * len(NODES)
        _wait(self, "all nodes idle", lambda: _try(self, *states) == idle)

    def logs(self) -> str:
        """The ends of the daemons' logs."""
        logs = sorted([*self.folder.glob("*.out"), *self.folder.glob("*.log")])
        return "\n".join(f"== {log.name}\n{log.read_text()[-1500:]}" for log in logs)

    def stop(self) -> None:
        """Kills the daemons, then what they left: all that works below this cluster's folder."""
        for process in self.processes:
            process.kill()
            process.wait(COMMAND_S)
        for one in psutil.process_iter():
            with suppress(psutil.Error):
                place = Path(one.cwd())
                if self.folder in (place, *place.parents) and one.pid != os.getpid():
                    one.kill()


@contextmanager
def running_cluster(folder: Path) -> Iterator[Cluster]:
    """A Slurm with the nodes `NODES`, idle; ended on leaving, whatever happens."""
    cluster = Cluster(folder)
    try:
        _start(cluster)
        yield cluster
    finally:
        cluster.stop()


def _start(cluster: Cluster) -> None:
    folder = cluster.folder
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    (folder / "state").mkdir()
    (folder / "slurm.conf").write_text(_configuration(folder))
    files = [f"--{kind}-file={folder}/munge.{kind}" for kind in ("key", "log", "pid", "seed")]
    cluster.start("munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *files)
    _wait(cluster, "munged", lambda: (folder / "munge.socket").exists())
    cluster.start("slurmctld", "-D", "-i")
    for node in NODES:
        (folder / node).mkdir()
        cluster.start_node(node)
    cluster.wait_until_idle()


def _try(cluster: Cluster, *words: str) -> list[str]:
    """A command's words; none while the controller does not answer."""
    try:
        return cluster.run(*words).split()
    except AssertionError:
        return []


def _wait(cluster: Cluster, what: str, is_there: Callable[[], bool]) -> None:
    deadline = time.monotonic() + START_S
    while not is_there():
        alive = all(process.poll() is None for process in cluster.processes)
        in_time = time.monotonic() < deadline
        assert alive and in_time, f"no {what} within {START_S} s\n{cluster.logs()}"
        time.sleep(0.2)


def _configuration(folder: Path) -> str:
    host = socket.gethostname().split(".")[0]
    user = psutil.Process().username()
    nodes = "\n".join(
        f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} CPUs=1"
        for node in NODES
    )
    return f"""
ClusterName=hdp-tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={free_port()}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire={CREDENTIAL_S}
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/linear
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=bf_interval=2,sched_interval=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ReturnToService=2
KillWait=30
{nodes}
PartitionName=all Nodes={",".join(NODES)} Default=YES MaxTime=INFINITE State=UP GraceTime={GRACE_S}
PartitionName=urgent Nodes={",".join(NODES)} MaxTime=INFINITE State=UP PriorityTier=10
"""
