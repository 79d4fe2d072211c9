"""What items cost, learnt from what calls of an encoder took; the same on every rank.

Of each rank a step tells how many patches it encoded, the sum of their squares over items, how many
calls that were, and the seconds. A rank's seconds are the cost model's coefficients times these.
They are fitted to all that was seen, what is older counting less; what steps do not tell apart
stays in the proportions of the encoder's shape.
"""

from dataclasses import replace

import numpy as np

from megatron_hdp.arrays import Float64Array
from megatron_hdp.media.cost import ItemCostModel

_FORGETS = 0.9
"""What a step counts when the next one is seen."""
_TRUST = 0.005
"""Of the shape's proportions beside what was seen."""
_COLUMNS = ("patch_s", "patch2_s", "pack_s")


class LearntCost:
    """The cost of items by what steps have shown.

    Args:
        shape: by which items are planned until something is known.
        behind: steps between one whose items are planned and the latest that it may depend on.
    """

    def __init__(self, shape: ItemCostModel, behind: int) -> None:
        self._shape, self._behind = shape, behind
        self._given = np.array([getattr(shape, name) for name in _COLUMNS])
        self._products, self._sums = np.zeros((3, 3)), np.zeros(3)
        self._known: dict[int, ItemCostModel] = {}

    def of_step(self, step: int) -> ItemCostModel:
        """Return the cost by which a step's items are planned, by its number in the run."""
        usable = [number for number in self._known if number <= step - self._behind]
        return self._known[max(usable)] if usable else self._shape

    def observe(self, step: int, seen: Float64Array) -> None:
        """Learn from a step.

        Args:
            step: its number in the run.
            seen: patches, squares, calls and seconds of each rank that encoded whole items,
                ``[ranks, 4]``; the same on every rank.
        """
        told = seen[(seen > 0).all(axis=1)]
        if len(told):
            work, seconds = told[:, :3], told[:, 3]
            self._products = _FORGETS * self._products + work.T @ work
            self._sums = _FORGETS * self._sums + work.T @ seconds
            # rounded, as processors differ in the last bits of what they solve
            rounded = [float(f"{one:.6g}") for one in self._fitted().tolist()]
            found = dict(zip(_COLUMNS, rounded, strict=True))
            scale = found["patch_s"] / self._shape.patch_s if self._shape.patch_s else 1.0
            gathered_s = scale * self._shape.gathered_s_per_patch
            self._known[step] = replace(self._shape, gathered_s_per_patch=gathered_s, **found)
        for number in sorted(self._known)[: -self._behind - 2]:
            del self._known[number]

    def _fitted(self) -> Float64Array:
        """Return the coefficients: least squares, drawn to the shape's at the best scale."""
        given, products = self._given, self._products
        scale = float(given @ self._sums / (given @ products @ given))
        drawn = _TRUST * np.diag(products)
        free = np.ones(3, dtype=bool)
        found = np.zeros(3)
        for _ in range(3):  # those below zero are zero
            matrix = (products + np.diag(drawn))[np.ix_(free, free)]
            target = (self._sums + drawn * scale * given)[free]
            found[:] = 0.0
            found[free] = np.linalg.solve(matrix, target)
            if (found >= 0).all():
                break
            free &= found > 0
        return found if found[:2].any() else scale * given
