"""A signal to one rank is known on all; handlers come back."""

import os
import signal

import torch
import torch.distributed as dist

from megatron_hdp.runtime.health.signals import SIGNALS, StopSignals

CPU = torch.device("cpu")


def agreed_signals(number, count):
    """Body of a rank: what is agreed before and after rank 1 gets the signal `count` times."""
    before = [signal.getsignal(one) for one in SIGNALS]
    with StopSignals() as signals:
        agreed = [signals.agreed(CPU)]
        if dist.get_rank() == 1:
            for _ in range(count):
                os.kill(os.getpid(), number)
        agreed += [signals.agreed(CPU), signals.agreed(CPU)]
    return agreed, before == [signal.getsignal(one) for one in SIGNALS]


def test_a_signal_to_one_rank_is_agreed_on(run_ranks):
    for number in SIGNALS:
        for agreed, restored in run_ranks(2, agreed_signals, number, 1):
            assert agreed == [None, number, number] and restored


def test_signals_add_up_to_one(run_ranks):
    for agreed, _ in run_ranks(2, agreed_signals, signal.SIGTERM, 3):
        assert agreed == [None, signal.SIGTERM, signal.SIGTERM]


def test_no_signal(run_ranks):
    for agreed, restored in run_ranks(2, agreed_signals, signal.SIGTERM, 0):
        assert agreed == [None] * 3 and restored
