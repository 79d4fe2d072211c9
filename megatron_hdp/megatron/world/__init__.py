"""All that a rank has bound to process groups: left, and made anew around live weights."""

from megatron_hdp.megatron.world.given_state import give_state
from megatron_hdp.megatron.world.world import World

__all__ = ["World", "give_state"]
