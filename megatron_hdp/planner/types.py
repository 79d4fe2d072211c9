"""The plan of one global batch: its arrays, its rules and its JSON in one place."""

import os
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike

from megatron_hdp.arrays import Int64Array
from megatron_hdp.planner import serialisation, validation
from megatron_hdp.planner.flat_plan import FlatPlan, MicroBatch, PlanError

__all__ = ["MicroBatch", "Plan", "PlanError"]


@dataclass(frozen=True, eq=False)
class Plan(FlatPlan):
    """Every micro-batch of one global batch, in one global launch order; immutable.

    The arrays are those of `FlatPlan`. Two plans are the same when their fingerprints are.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        state = {f.name: getattr(self, f.name) for f in fields(self)}
        return _restore, (state | {"summary": dict(self.summary)},)

    def validate(self, *, pipeline_stages: int = 1, num_layers: int | None = None) -> None:
        """Checks the rules that every plan obeys.

        Args:
            pipeline_stages: Above 1, a micro-batch must stand at the same position in the list of
                every rank that shares it.
            num_layers: Layers on a rank, needed when activations are offloaded.

        Raises:
            PlanError: names the broken rule and the culprit.
        """
        validation.validate(self, pipeline_stages=pipeline_stages, num_layers=num_layers)

    def on_ranks(self, places: ArrayLike) -> Self:
        """The same plan on other ranks: what it gives to rank r, rank ``places[r]`` runs.

        Args:
            places: Each rank once, ``[num_ranks]``.
        """
        taken = np.asarray(places)
        owners = np.repeat(np.arange(self.num_micro_batches), np.diff(self.local_offsets))
        ranks = taken[self.local_ranks]
        order = np.lexsort((ranks, owners))  # stable: of each rank as before
        return replace(
            self,
            ranks=taken[self.ranks],
            local_ranks=ranks[order],
            local_sequences=self.local_sequences[order],
        )

    def with_contents(self, contents: ArrayLike) -> Self:
        """The same plan, in which each micro-batch runs the sequences of another one.

        Args:
            contents: Of each micro-batch that whose sequences it gets; its ranks, parts and offload
                are the same. Each once, ``[num_micro_batches]``.
        """
        taken = np.asarray(contents)

        def moved(offsets: Int64Array, *columns: Any) -> tuple[Int64Array, list[Any]]:
            counts = np.diff(offsets)[taken]
            ends = np.cumsum(counts)
            places = np.repeat(offsets[:-1][taken] - (ends - counts), counts)
            places += np.arange(len(places))
            return np.append(0, ends), [one[places] for one in columns]

        sequence_offsets, (sequences,) = moved(self.sequence_offsets, self.sequences)
        columns = self.local_sequences, self.local_ranks
        local_offsets, (local_sequences, local_ranks) = moved(self.local_offsets, *columns)
        return replace(
            self,
            sequence_offsets=sequence_offsets,
            sequences=sequences,
            local_offsets=local_offsets,
            local_sequences=local_sequences,
            local_ranks=local_ranks,
        )

    def to_json(self) -> bytes:
        """The plan as JSON, version 1."""
        return serialisation.to_json(self)

    @classmethod
    def from_json(cls, data: bytes | str) -> Self:
        """Reads what ``to_json`` wrote; ValueError for another version or a malformed plan."""
        return cls(**serialisation.fields_from_json(data))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan as JSON."""
        Path(path).write_bytes(self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Reads a plan written by ``save``."""
        try:
            return cls.from_json(Path(path).read_bytes())
        except PlanError:
            raise
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error


def _restore(state: dict[str, Any]) -> Plan:
    return Plan(**state)
