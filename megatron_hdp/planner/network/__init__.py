"""What NCCL gives two ranks to send on, and what that means for a cost model."""

from megatron_hdp.planner.network.channels import (
    FIELDS,
    VARIABLES,
    Field,
    Nccl,
    Version,
    channels_of_a_pair,
    following,
)

__all__ = ["FIELDS", "VARIABLES", "Field", "Nccl", "Version", "channels_of_a_pair", "following"]
