"""Activations that wait in host memory between forward and backward.

`activation_offload` is what the executor uses, `stash` decides what goes and when it returns,
`copies` moves it beside the compute, `host_pool` is where it waits; `saved_bytes` counts it, `need`
says how much of the host a step will want.

Design: `docs/design/offload.md`.
"""

from megatron_hdp.runtime.offload.activation_offload import ActivationOffload
from megatron_hdp.runtime.offload.copies import Copy, select_copy_engine
from megatron_hdp.runtime.offload.saved_bytes import saved_bytes
from megatron_hdp.runtime.offload.stash import MicroBatchStash

__all__ = ["ActivationOffload", "Copy", "MicroBatchStash", "saved_bytes", "select_copy_engine"]
