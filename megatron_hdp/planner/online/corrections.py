"""What is learnt of a run's cost model, and the cost model that comes of it."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from megatron_hdp.planner.cost_model import CostModel


@dataclass(frozen=True)
class Corrections:
    """How a machine differs from the cost model that a run began with."""

    attention_factor: float = 1.0
    """Of attention and its blocks."""
    linear_factor: float = 1.0
    """Of what is linear in the length."""
    g: float | None = None
    """Seconds of a micro-batch whatever it holds; None: as it was."""
    speeds: tuple[tuple[int, float], ...] = ()
    """Ranks, ascending, whose speed is another one, with that speed."""

    def of(self, base: CostModel, num_ranks: int) -> CostModel:
        """The cost model with these corrections; itself where there are none.

        Args:
            base: what they correct.
            num_ranks: HDP ranks.
        """
        if self == Corrections():
            return base
        points = tuple((length, self.attention_factor * s) for length, s in base.attention_points)
        speeds = list(base.rank_speeds or (1.0,) * num_ranks)
        for rank, speed in self.speeds:
            speeds[rank] = speed
        return dataclasses.replace(
            base,
            a=self.attention_factor * base.a,
            attention_b=self.attention_factor * base.attention_b,
            attention_points=points,
            block_s=self.attention_factor * base.block_s,
            b=self.linear_factor * base.b,
            b_experts=self.linear_factor * base.b_experts,
            g=base.g if self.g is None else self.g,
            rank_speeds=tuple(speeds) if self.speeds else base.rank_speeds,
        )

    def to_record(self) -> dict[str, Any]:
        """These as plain values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Self:
        """What `to_record` made a record of."""
        speeds = tuple((int(rank), float(speed)) for rank, speed in record["speeds"])
        return cls(**{**record, "speeds": speeds})
