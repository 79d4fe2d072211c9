"""What lies in a folder of caches, tables of sequences and prepared sources, and what may go."""

from megatron_hdp.data.caches.pruning import Fate, FoundCache, prune

__all__ = ["Fate", "FoundCache", "prune"]
