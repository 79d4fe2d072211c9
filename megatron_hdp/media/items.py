"""Items of a step, and a plan of which ranks encode them."""

from dataclasses import dataclass, replace

import numpy as np

from megatron_hdp.arrays import Float64Array, Int32Array, Int64Array
from megatron_hdp.media.gaps import PipelineGaps


class ItemPlanError(ValueError):
    """A batch of items that cannot be planned, or a plan that breaks a rule."""


@dataclass(frozen=True, kw_only=True)
class ItemBatch:
    """The items of one step, and the ranks that may encode them; all of the job's."""

    patches: Int64Array
    """Of each item, ``[items]``."""
    consumers: Int32Array
    """The rank whose part of a sequence holds an item's rows, ``[items]``."""
    micro_batches: Int32Array
    """The number of the micro-batch on that rank, ``[items]``."""
    num_ranks: int
    ranks_per_node: int = 8
    """Ranks k x this and behind share node k; a cut item stays in one."""
    patches_per_row: int = 4
    patches_per_pack: int = 65_536
    """The most patches of a call of the encoder: what its activations have room for."""
    most_ranks: int = 8
    """That may encode one item together."""
    speeds: Float64Array | None = None
    """Of each rank, 1 being the cost model's; None: all 1."""
    waves: Int32Array | None = None
    """Of each item, the exchange with which its rows travel; later micro-batches have no earlier
    one. None: there is one, ``[items]``."""
    gaps: PipelineGaps | None = None
    """Of the schedule that the items' waves belong to; None: encoding is all that a step does."""

    @property
    def rank_speeds(self) -> Float64Array:
        """Speeds of all ranks."""
        return np.ones(self.num_ranks) if self.speeds is None else self.speeds

    def of_wave(self, items: Int64Array) -> "ItemBatch":
        """Return these items by themselves, without waves."""
        return replace(
            self,
            patches=self.patches[items],
            consumers=self.consumers[items],
            micro_batches=self.micro_batches[items],
            waves=None,
            gaps=None,
        )

    def nodes(self, ranks: Int32Array) -> Int32Array:
        """Return the nodes of ranks."""
        return ranks // np.int32(self.ranks_per_node)

    def pieces(self, item: int, degree: int) -> Int64Array:
        """Return the patches of each member of an item cut between rows, ``[degree]``."""
        rows = int(self.patches[item]) // self.patches_per_row
        each = np.full(degree, rows // degree, dtype=np.int64)
        each[: rows % degree] += 1
        return each * self.patches_per_row


@dataclass(frozen=True, kw_only=True)
class ItemPlan:
    """Which ranks encode which items, and in which order.

    Items of one phase end before those of the next one begin, on all ranks; a phase's are of one
    wave. In a phase each rank first takes part in its cut items, in the order of their turns, which
    is the same everywhere, so that no two ranks wait for each other; then it encodes its packs of
    whole items.
    """

    strategy: str
    first_ranks: Int32Array
    """The first of the ranks that encode each item, ``[items]``."""
    degrees: Int32Array
    """How many these are, one behind the other, ``[items]``."""
    turns: Int32Array
    """Of a cut item its place among all cut ones; of a whole one its pack's number on its rank."""
    phases: Int32Array

    @property
    def is_cut(self) -> "np.ndarray[tuple[int], np.dtype[np.bool_]]":
        """Which items several ranks encode together, ``[items]``."""
        return self.degrees > 1

    def validate(self, batch: ItemBatch, *, packs_have_room: bool = True) -> None:
        """Check a plan against the rules.

        Args:
            batch: that was planned.
            packs_have_room: whether no pack may exceed `ItemBatch.patches_per_pack`.

        Raises:
            ItemPlanError: names the rule and the item.
        """
        last = self.first_ranks + self.degrees - 1
        _require("every item has its ranks", len(self.degrees) == len(batch.patches), 0)
        wrong = (self.first_ranks < 0) | (last >= batch.num_ranks) | (self.degrees < 1)
        _require("ranks are the job's", *_none_of(wrong))
        leaves = batch.nodes(self.first_ranks) != batch.nodes(last)
        _require("an item is cut within a node", *_none_of(leaves))
        rows = batch.patches // batch.patches_per_row
        _require("an item is cut between rows", *_none_of(self.degrees > rows))
        turns = self.turns[self.is_cut]
        _require("cut items have turns of their own", len(set(turns.tolist())) == len(turns), 0)
        if not packs_have_room:
            return
        largest = -(-rows // self.degrees) * batch.patches_per_row
        _require("a piece fits into a pack", *_none_of(largest > batch.patches_per_pack))
        whole = ~self.is_cut
        keys = np.stack([self.phases, self.first_ranks, self.turns])[:, whole]
        packs, pack_of = np.unique(keys, axis=1, return_inverse=True)
        held = np.bincount(pack_of, weights=batch.patches[whole], minlength=packs.shape[1])
        too_full = np.zeros(len(whole), dtype=bool)
        too_full[whole] = held[pack_of] > batch.patches_per_pack
        _require("a pack has room", *_none_of(too_full))


def _none_of(wrong: "np.ndarray[tuple[int], np.dtype[np.bool_]]") -> tuple[bool, int]:
    return not wrong.any(), int(np.argmax(wrong)) if len(wrong) else 0


def _require(rule: str, holds: bool, item: int) -> None:
    if not holds:
        raise ItemPlanError(f"a plan of items: {rule}: found item {item} otherwise")
