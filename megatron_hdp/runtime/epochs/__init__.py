"""Members of a job change in its processes: who is in which epoch, and how waits for the dead end.

An *epoch* is a time in which the members of a job are the same. The agent of the first node alone
names the members of each; a process that it does not name may only leave.
"""

from megatron_hdp.runtime.epochs import keys, nccl
from megatron_hdp.runtime.epochs.keys import Epoch, Message, Terms
from megatron_hdp.runtime.epochs.membership import EpochOverError, Membership, NotNamedError

__all__ = [
    "Epoch",
    "EpochOverError",
    "Membership",
    "Message",
    "NotNamedError",
    "Terms",
    "keys",
    "nccl",
]
