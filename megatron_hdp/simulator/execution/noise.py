"""What the planner does not know: noise of each micro-batch on each member, and slow ranks.

Noise is a function of (seed, step, micro-batch, rank), by a hash: whatever else is drawn, in
whatever order, changes nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from megatron_hdp.arrays import Float64Array, Int32Array, Int64Array, UInt64Array
from megatron_hdp.planner.online import FASTEST, SLOWEST, is_speed


@dataclass(frozen=True)
class Disturbance:
    """How a machine differs from its cost model."""

    noise: float = 0.0
    """Sigma of the lognormal factor, of median 1, on a micro-batch's compute on a member."""
    slow: Mapping[int, float] = field(default_factory=dict)
    """Speed of ranks, times that of the cost model."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.noise <= 10:
            raise ValueError(f"noise is {self.noise!r}; expected a sigma from 0 to 10")
        for rank, speed in self.slow.items():
            if not is_speed(speed):
                raise ValueError(
                    f"speed of rank {rank} is {speed!r}; expected {SLOWEST:g} to {FASTEST:g}"
                )

    def speeds(self, known: Float64Array) -> Float64Array:
        """Speeds of all ranks, from those that the planner knows.

        Raises:
            ValueError: a slow rank is none of them.
        """
        speeds = known.copy()
        for rank, speed in self.slow.items():
            if not 0 <= rank < len(speeds):
                raise ValueError(f"slow rank is {rank}; expected 0 to {len(speeds) - 1}")
            speeds[rank] *= speed
        return speeds

    def factors(
        self, step: int, micro_batches: Int64Array, ranks: Int32Array
    ) -> Float64Array | None:
        """Factor on the compute of members, given by micro-batch and rank; None without noise."""
        if not self.noise:
            return None
        key = _mixed(np.array([self.seed], dtype=np.uint64))
        key = _mixed(key ^ np.uint64(step))
        keys = _mixed(_mixed(key ^ micro_batches.astype(np.uint64)) ^ ranks.astype(np.uint64))
        factors: Float64Array = np.exp(self.noise * _normal(keys))
        return factors


def _normal(keys: UInt64Array) -> Float64Array:
    """Standard normal numbers, one a key (Box and Muller)."""
    radius, angle = _uniform(_mixed(keys)), _uniform(_mixed(keys ^ np.uint64(1)))
    normal: Float64Array = np.sqrt(-2 * np.log(radius)) * np.cos(2 * np.pi * angle)
    return normal


def _uniform(keys: UInt64Array) -> Float64Array:
    """Numbers in (0, 1]."""
    uniform: Float64Array = ((keys >> np.uint64(11)).astype(np.float64) + 1) / 2.0**53
    return uniform


def _mixed(keys: UInt64Array) -> UInt64Array:
    """The finaliser of splitmix64 (Steele, Lea and Flood 2014)."""
    mixed = keys + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    result: UInt64Array = mixed ^ (mixed >> np.uint64(31))
    return result
