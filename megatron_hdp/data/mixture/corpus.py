"""The opened sources of one split: metadata of their sequences, and their tokens when asked for.

Metadata decide which sequences form a step and never touch a token; tokens are read by whoever
needs them, for a step that is decided.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_hdp.arrays import BoolArray, Int64Array
from megatron_hdp.data.mixture.draw import BatchSize, MixedSource, Mixture, Together
from megatron_hdp.data.mixture.schedule import MixtureSpec
from megatron_hdp.data.mixture.source import Source, digest
from megatron_hdp.data.mixture.stream import SourceStream
from megatron_hdp.data.order import SourceOrder
from megatron_hdp.data.shuffles import shuffle_of

_SHOWN = 16  # sequences that a message names


class Corpus:
    """The sources of one split, in order."""

    def __init__(
        self,
        spec: MixtureSpec,
        sources: Sequence[Source],
        max_length: int,
        together: Together = map,
    ) -> None:
        """Take opened sources, one for each of the spec's, in its order.

        Raises:
            ValueError: under the policy ``error`` a source has longer rows than a phase allows.
        """
        self.spec = spec
        self.sources = tuple(sources)
        self._together = together
        self._require_one_kind()
        sizes = {one.name: max(one.size(spec.weight_unit), 1.0) for one in self.sources}
        self.schedule = spec.schedule.resolved(sizes, max_length)
        for i, source in enumerate(self.sources):
            bound = self.schedule.least_max_length(i)
            if source.has_media and source.longest > bound:
                raise ValueError(
                    f"{spec.origin}: source '{source.name}' has a sequence of {source.longest:,} "
                    f"tokens, the schedule allows {bound:,}, and would cut {source.item_names}: "
                    "expected the same max-length in all phases with such a source"
                )
            if source.long_sequence == "error" and source.longest > bound:
                has = "may have" if source.is_estimated else "has"
                policies = "truncate" if source.is_estimated else "truncate or split"
                raise ValueError(
                    f"{spec.origin}: source '{source.name}' {has} a sequence of "
                    f"{source.longest:,} tokens, the schedule allows {bound:,}: give it "
                    f"long-sequence {policies}, or raise max-length"
                )

    @property
    def sides(self) -> str | None:
        """``pairs`` or ``labelled`` where the sources hold preferences."""
        found = self.sources[0].sides
        return None if found is None else found.kind

    @property
    def has_media(self) -> bool:
        """Whether pictures, videos or sounds stand among the tokens of a source."""
        return any(one.has_media for one in self.sources)

    @property
    def item_names(self) -> str:
        """What items of its sources are called, such as ``pictures``."""
        return " and ".join(sorted({one.item_names for one in self.sources if one.has_media}))

    @property
    def group(self) -> int:
        """Neighbouring sequences of a step, from its first, that belong together."""
        return self.sources[0].group

    def _require_one_kind(self) -> None:
        """Refuse preferences beside something else."""
        found = {one.name: one.sides and one.sides.kind for one in self.sources}
        if len(set(found.values())) > 1:
            words = ", ".join(f"{name} of {kind or 'no sides'}" for name, kind in found.items())
            raise ValueError(
                f"{self.spec.origin}: found sources that cannot be trained together ({words}), "
                "expected all of them of pairs, all labelled, or none: leave some out"
            )

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that can be drawn."""
        longest = max(one.longest for one in self.sources)
        return min(longest, max(one.max_length for one in self.schedule.settings))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the sources."""
        return tuple(one.name for one in self.sources)

    def mixture(self, orders: Mapping[str, SourceOrder], batch: BatchSize, seed: int) -> Mixture:
        """Return what draws this split's steps, in the version and by the key of each order."""
        mixed = [
            MixedSource(
                one.name,
                SourceStream(
                    one,
                    shuffle_of(
                        orders[one.name].version, one.num_groups, seed, orders[one.name].key
                    ),
                    splits_long=one.long_sequence == "split",
                    max_epochs=one.spec.max_epochs,
                    group=self.group,
                ),
                self.group * one.mean_length,
            )
            for one in self.sources
        ]
        unit, group = self.spec.weight_unit, self.group
        return Mixture(mixed, self.schedule, batch, unit, self._together, group)

    def orders(self) -> dict[str, SourceOrder]:
        """Return what decides the order of each source in a run that begins now.

        A source's orders are told from others' by its name, so that places may change.
        """
        alone = len(self.sources) == 1
        return {one.name: one.order(0 if alone else digest(one.name) or 1) for one in self.sources}

    def tokens(self, source: int, row: int, start: int, count: int) -> Int64Array:
        """Return tokens of a source's row from its token ``start`` on.

        Of a sequence whose last token has a label, the token behind it may be asked for.
        """
        return self.sources[source].tokens(row, start, count)

    def is_trained(self, source: int, row: int, start: int, stop: int) -> BoolArray:
        """Return which of the labelled tokens ``[start, stop)`` of a row carry loss."""
        return self.sources[source].is_trained(row, start, stop)

    def words_for(self, sources: Sequence[int], rows: Sequence[int]) -> str:
        """Return what a message calls the documents of some sequences."""
        found: dict[int, list[int]] = {}
        for source, row in zip(sources[:_SHOWN], rows[:_SHOWN], strict=True):
            found.setdefault(source, []).append(row)
        words = [self.sources[source].words(some) for source, some in found.items()]
        more = len(sources) - _SHOWN
        return " and ".join([*words, *([f"{more} more"] if more > 0 else [])])

    def describe(self, i: int, use: str) -> str:
        """Return how many sequences of a source are ``use``, and what became of its documents."""
        source = self.sources[i]
        return source.describe(use, "" if len(self.sources) == 1 else f" of {source.name}")
