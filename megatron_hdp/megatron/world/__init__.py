"""All that a rank has bound to process groups: left, and made anew around live weights.

`Recovery` does so from epoch to epoch of a job whose ranks may die.
"""

from megatron_hdp.megatron.world.given_state import give_state
from megatron_hdp.megatron.world.recovery import EpochEnds, Recovery
from megatron_hdp.megatron.world.world import World

__all__ = ["EpochEnds", "Recovery", "World", "give_state"]
