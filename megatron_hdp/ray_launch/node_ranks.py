"""The ranks of one node, as processes of this one: start, look, warn, kill."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from megatron_hdp.processes import launcher

_START_RANK = str(Path(__file__).with_name("start_rank.py"))


@dataclass(frozen=True, kw_only=True)
class Placement:
    """What the ranks of one node must know of the job."""

    node: int
    """The node's place, from 0; it decides its ranks' numbers."""
    num_nodes: int
    ranks_per_node: int
    master_address: str
    """Where rank 0 listens."""
    master_port: int
    folder: str
    """The ranks' working folder."""
    log: str | None
    """The file that they write to; None for this process's own output."""

    def environment(self, local_rank: int) -> dict[str, str]:
        """The variables by which torch.distributed finds its place, named as torchrun does.

        One more tells our commands that they end with this process.
        """
        return {
            "RANK": str(self.node * self.ranks_per_node + local_rank),
            "LOCAL_RANK": str(local_rank),
            "GROUP_RANK": str(self.node),
            "WORLD_SIZE": str(self.num_nodes * self.ranks_per_node),
            "LOCAL_WORLD_SIZE": str(self.ranks_per_node),
            "GROUP_WORLD_SIZE": str(self.num_nodes),
            "MASTER_ADDR": self.master_address,
            "MASTER_PORT": str(self.master_port),
            launcher.MARK: "ray_launch",
        }


class NodeRanks:
    """Started processes; all calls return at once."""

    def __init__(self, placement: Placement, words: Sequence[str], more: Mapping[str, str]) -> None:
        """Starts the ranks: ``python words...``, with `more` in their environment."""
        self._processes: list[subprocess.Popen[bytes]] = []
        with ExitStack() as stack:
            output = None
            if placement.log is not None:
                output = stack.enter_context(Path(placement.log).open("ab"))
            for local_rank in range(placement.ranks_per_node):
                starter = [sys.executable, "-S", _START_RANK, str(os.getpid())]
                self._processes.append(
                    subprocess.Popen(
                        [*starter, sys.executable, "-u", *words],
                        cwd=placement.folder,
                        env=os.environ | more | placement.environment(local_rank),
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=output,
                    )
                )

    def codes(self) -> list[int | None]:
        """Exit codes, -N for signal N; None while a rank runs."""
        return [process.poll() for process in self._processes]

    def warn(self) -> None:
        """SIGUSR1 to the ranks that run: save after the step and end."""
        self._send(signal.SIGUSR1)

    def kill(self) -> None:
        """Ends the ranks that run."""
        self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        for process in self._processes:
            process.send_signal(number)


def free_port() -> int:
    """A port of this machine that nobody listens at."""
    with socket.socket() as bound:
        bound.bind(("", 0))
        return int(bound.getsockname()[1])
