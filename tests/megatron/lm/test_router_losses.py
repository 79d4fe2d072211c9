"""Whose losses Megatron's log is given."""

import torch

from megatron_hdp.megatron.lm.router_losses import RouterLosses
from megatron_hdp.megatron.model import HdpRouter


def router():
    """One that has noted a loss; the rest of it is not needed here."""
    made = HdpRouter.__new__(HdpRouter)
    torch.nn.Module.__init__(made)
    made.losses = {"z_loss": torch.ones(())}
    return made


def test_routers_of_all_model_chunks_forget_what_they_noted():
    routers = [router() for _ in range(3)]
    chunks = [torch.nn.Sequential(*routers[:2]), torch.nn.Sequential(routers[2])]
    RouterLosses(chunks).begin_step()
    assert [one.losses for one in routers] == [{}, {}, {}]
