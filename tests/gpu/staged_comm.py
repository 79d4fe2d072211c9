"""Rings over host memory and gloo, for several ranks on one GPU where NCCL refuses them."""

import torch

from megatron_hdp.runtime.ring.comm import RingComm


class StagedTransfer:
    """Copies to the device what arrived on the host."""

    def __init__(self, on_host, received):
        self.on_host, self.received = on_host, received

    def wait(self, is_idle=True):
        if self.on_host is not None:
            self.received.copy_(self.on_host.wait())
            self.on_host = None
        return self.received


class StagedComm(RingComm):
    """A `RingComm` over a gloo group for tensors of any device."""

    def trade(self, sent, to, received, of):
        room = torch.empty(received.shape, dtype=received.dtype)
        on_host = super().trade(sent.detach().cpu().contiguous(), to, room, of)
        return StagedTransfer(on_host, received)
