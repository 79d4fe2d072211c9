"""What the data plane must know of a split: the same that a rank's own loaders would."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_hdp.data.mixture import (
    Corpus,
    MixtureSpec,
    Opening,
    Schedule,
    Source,
    Together,
    open_corpus,
)
from megatron_hdp.data.order import SourceOrder
from megatron_hdp.data.spec import LoadersSpec
from megatron_hdp.data.steps import PlanSettings, StepPlanner


@dataclass(frozen=True, kw_only=True)
class SplitSetup:
    """One split of a run's data, and how its steps are drawn and planned."""

    split: str
    spec: MixtureSpec
    max_length: int
    long_sequence: str
    tokenizer: str | None
    cache_folder: str | None
    settings: PlanSettings
    orders: Mapping[str, SourceOrder]
    loaders: LoadersSpec

    @property
    def planning_waits(self) -> int:
        """How many times the time limit the planner may need, should sources fail one by one.

        That is those that say how long their rows are, and that the run goes on without.
        """
        sources = self.spec.sources
        return 1 + sum(one.tokenise == "on-the-fly" and one.may_fail for one in sources)

    @property
    def making_waits(self) -> int:
        """The same of a step that is planned and whose tokens are loaded."""
        return self.planning_waits + any(one.may_fail for one in self.spec.sources)

    def planner(
        self,
        say: Callable[[str], None],
        publish: Callable[[Source], Source],
        together: Together = map,
    ) -> StepPlanner:
        """Return what draws and plans the split's steps.

        Args:
            say: takes lines for the log.
            publish: makes of an opened source one that decodes nothing in this process.
            together: maps a function over the sources, several at once, since those wait.

        Raises:
            ValueError: a source cannot be opened.
        """
        opened = open_corpus(self.spec, self._opening(say))
        sources = [publish(one) for one in opened.sources]
        made = StepPlanner(Corpus(self.spec, sources, self.max_length, together), self.settings)
        made.follow(self.orders)
        return made

    def opened(self, names: Collection[str], say: Callable[[str], None]) -> Sequence[Source]:
        """Return some of its sources, opened, and no others.

        Raises:
            ValueError: one of them cannot be opened, or is none of the split.
        """
        declared = {one.name: one for one in self.spec.sources}
        if unknown := set(names) - declared.keys():
            raise ValueError(f"found sources {sorted(unknown)}, expected some of {[*declared]}")
        sources = tuple(declared[name] for name in names)
        spec = replace(self.spec, sources=sources, schedule=Schedule())
        return open_corpus(spec, self._opening(say)).sources

    def _opening(self, say: Callable[[str], None]) -> Opening:
        return Opening(
            max_length=self.max_length,
            long_sequence=self.long_sequence,
            tokenizer=self.tokenizer,
            cache_folder=None if self.cache_folder is None else Path(self.cache_folder),
            say=say,
        )
