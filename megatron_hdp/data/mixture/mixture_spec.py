"""What one split of a run draws from: sources, which part of each, and their weights."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron_hdp.data.mixture.schedule import Schedule
from megatron_hdp.data.spec import PrimitivesSpec, SourceSpec

WEIGHT_UNITS = ("tokens", "loss-tokens", "sequences")
SPLITS = ("train", "valid", "test")


@dataclass(frozen=True, kw_only=True)
class MixtureSpec:
    """The sources of one split."""

    sources: tuple[SourceSpec, ...]
    origin: str
    """The file or flag that says it, for messages."""
    schedule: Schedule = Schedule()
    weight_unit: str = "tokens"
    """What a weight is a share of."""
    split: str = "1"
    """Weights of training, validation and test, by which each source's documents are cut."""
    part: int = 0
    """Which of these three this is."""
    held_out: Mapping[str, int] = field(default_factory=dict)
    """By source: sequences at its end that validation takes and training leaves."""
    takes_held_out: bool = False
    """Whether those are what this split takes, and nothing else."""
    primitives: PrimitivesSpec = PrimitivesSpec()
    """Functions of the user's own in the place of those that decide steps."""
