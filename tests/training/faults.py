"""The training command with a fault planted in one rank, in a step's forward or at the start.

``python -m tests.training.faults RANK:STEP:FAULT [flags]`` runs it as a process of its own.
"""

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from megatron_hdp import pretrain_gpt
from megatron_hdp.megatron import parallel
from megatron_hdp.runtime.health.heartbeat import Heartbeat
from megatron_hdp.runtime.kernels.block import CpuFlashKernel


def fail() -> None:
    raise RuntimeError("planted\nsecond line")


def send_itself(number: int) -> None:
    time.sleep(2.5)  # what this rank does is known by then
    os.kill(os.getpid(), number)


def stand_still() -> None:
    time.sleep(600)


def signal_twice() -> None:
    os.kill(os.getpid(), signal.SIGUSR1)
    os.kill(os.getpid(), signal.SIGTERM)


FAULTS = {
    "kill": lambda: send_itself(signal.SIGKILL),
    "stop": lambda: send_itself(signal.SIGSTOP),
    "fail": fail,
    "stand-still": stand_still,
    "slow": lambda: time.sleep(1.5),
    "SIGTERM": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "SIGUSR1": lambda: os.kill(os.getpid(), signal.SIGUSR1),
    "twice": signal_twice,
    "none": lambda: None,
}


@contextmanager
def planted(fault: str, marker: Path | None = None) -> Iterator[None]:
    """Within the block, the process meets a fault.

    Args:
        fault: ``rank:step:name``; the first call of the attention kernel in that step acts, for
            step 0 what makes the process groups.
        marker: a file made when the fault acts; where it is already, nothing happens.
    """
    rank, step, name = fault.split(":")
    armed, acted_before = False, marker is not None and marker.exists()
    begin_step, forward = Heartbeat.begin_step, CpuFlashKernel.forward
    initialise = parallel.initialise

    def arm(number):
        nonlocal armed
        armed = number == int(step) and os.environ["RANK"] == rank

    def arm_and_begin(self, number):
        arm(number)
        begin_step(self, number)

    def act():
        nonlocal armed
        if armed and not acted_before:
            armed = name == "slow"  # which acts in every call
            if marker is not None:
                marker.touch()
            FAULTS[name]()

    def act_and_start(arguments):
        arm(0)
        act()
        return initialise(arguments)

    def act_and_compute(*args, **named):
        act()
        return forward(*args, **named)

    with (
        mock.patch.object(Heartbeat, "begin_step", arm_and_begin),
        mock.patch.object(CpuFlashKernel, "forward", act_and_compute),
        mock.patch.object(parallel, "initialise", act_and_start),
    ):
        yield


def train(fault: str, flags: list[str], marker: Path | None = None) -> None:
    """Runs the command with a planted fault; ends the process.

    Args:
        fault: see `planted`.
        flags: the command's.
        marker: see `planted`.
    """
    argv = ["pretrain_gpt", *flags]
    with planted(fault, marker), mock.patch.object(sys, "argv", argv):
        pretrain_gpt.run()


if __name__ == "__main__":
    once = os.environ.get("FAULT_ONCE")
    train(sys.argv[1], sys.argv[2:], Path(once) if once else None)
