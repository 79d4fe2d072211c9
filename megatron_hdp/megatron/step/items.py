"""Pictures of the steps over one split: who encodes them, and what comes of their gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from megatron_hdp.data.media import Decoded
from megatron_hdp.data.mixture import Corpus, Position
from megatron_hdp.data.one_ahead import OneAhead
from megatron_hdp.data.steps import (
    Loaders,
    PlanSettings,
    RankMicroBatch,
    RankStep,
    Reader,
    WantedItem,
)
from megatron_hdp.media import LearntCost
from megatron_hdp.megatron.execution import HdpExecutor, make_whole
from megatron_hdp.megatron.media import (
    BatchMedia,
    DrawnItems,
    Encoding,
    JobEncoder,
    StepMedia,
    work_of_calls,
)
from megatron_hdp.megatron.model import add_up_gradients, encoder_of
from megatron_hdp.megatron.options import TrainingArguments
from megatron_hdp.megatron.step.figures import StepReport
from megatron_hdp.megatron.step.learning import exchanged
from megatron_hdp.planner import Evaluation, Plan
from megatron_hdp.runtime.timeline import ENCODER

ItemDecoder = Callable[[Sequence[WantedItem]], list[Decoded]]


class StepItems:
    """Has the items of steps encoded by all ranks, with the encoder of the model's first chunk.

    Attributes:
        encoding_s: what the latest step took on this rank, without waiting for others.
    """

    def __init__(
        self, encoder: JobEncoder, corpus: Corpus, most_damaged: int, learnt: LearntCost | None
    ) -> None:
        self._encoder, self._corpus, self._most_damaged = encoder, corpus, most_damaged
        self._learnt, self._has_run = learnt, False
        self.encoding_s = 0.0
        self._learns = any(one.requires_grad for one in encoder.encoder.parameters())

    @classmethod
    def of_job(
        cls,
        arguments: TrainingArguments,
        executor: HdpExecutor,
        corpus: Corpus,
        settings: PlanSettings,
        reader: Reader,
        behind: int | None = None,
    ) -> StepItems | None:
        """Those of a job whose model has an encoder; every rank must call this.

        What items cost is learnt from steps, if `behind` says how many lie between one and the
        first whose items are planned by it.
        """
        if arguments.hdp_encoder is None:
            return None
        chunks = executor.chunks
        how = Encoding(
            arguments.hdp_media_balance, arguments.hdp_media_waves, arguments.hdp_encoder_rows
        )
        encoder = JobEncoder(
            encoder_of(chunks[0]),
            arguments,
            chunks,
            executor.place,
            settings,
            reader,
            how,
            executor.timeline,
        )
        learnt = None if behind is None else LearntCost(encoder.encoder.cost, behind)
        return cls(encoder, corpus, arguments.hdp_corrupt_limit, learnt)

    def prepared(self, step: RankStep, decode: ItemDecoder) -> StepMedia | None:
        """A step's items, of which those that this rank encodes are decoded; None without any.

        Communicates nothing.

        Raises:
            ValueError: an item that the encoder has no rows for.
        """
        assert step.planned is not None, "who loads data with pictures gives whole steps"
        drawn = step.planned.step
        batch = DrawnItems.of(self._corpus, drawn)
        if not batch.media:
            return None
        media = BatchMedia.of(batch, self._encoder.encoder)
        cost = None if self._learnt is None else self._learnt.of_step(drawn.before.steps)
        found = self._encoder.prepared(batch, media, step.planned.plan, self._corpus, cost)
        places = batch.places()

        def by(items: Sequence[int]) -> list[Decoded]:
            wanted = []
            for item in items:
                one = batch.media[item]
                source, row = int(drawn.sources[one.sequence]), int(drawn.rows[one.sequence])
                wanted.append(WantedItem(source, row, places[item], one.data))
            return decode(wanted)

        found.decode(by)
        return found

    def of(self, step: RankStep) -> StepMedia | None:
        """What was prepared of a step's items, once all ranks know of damages.

        Every rank must call this.

        Raises:
            EveryRankError: too many sequences with damaged pictures in a row, or a file that cannot
                be read.
        """
        found = step.items
        if not isinstance(found, StepMedia):
            return None
        found.agree_on_damages(self._most_damaged)
        return found

    @contextmanager
    def in_place(
        self,
        media: StepMedia | None,
        micro_batches: tuple[RankMicroBatch, ...],
        forward_only: bool,
    ) -> Iterator[tuple[tuple[RankMicroBatch, ...], Callable[[], None] | None]]:
        """Within it the model sees the rows of a step's items, if there are some.

        Yields the micro-batches that are to run, and what is to run before gradients are reduced.
        """
        learns = self._learns and not forward_only
        self.encoding_s = 0.0
        if media is None:
            # no micro-batch has the encoder's gradients, so buckets are not full in a backward
            yield micro_batches, _nothing if learns else None
            return
        make_whole(self._encoder.chunks[0], self._encoder.encoder.parameters())
        timeline = self._encoder.timeline
        timeline.reset()
        with media.rows_in_place(micro_batches, learns=learns) as placed:
            self.encoding_s = timeline.totals_s[ENCODER]
            yield placed, partial(self._learn, media) if learns else None
        self.encoding_s += timeline.totals_s[ENCODER]  # since the schedule began

    def observe(self, step: int, media: StepMedia) -> None:
        """Learns from a step what items cost, by its number in the run.

        Every rank must call this.
        """
        if self._learnt is None:
            return
        table = exchanged([*work_of_calls(media.calls, media.patches), self.encoding_s])
        if self._has_run:  # the first step of a process is slow
            self._learnt.observe(step, table)
        self._has_run = True

    def _learn(self, media: StepMedia) -> None:
        media.differentiate()
        add_up_gradients(self._encoder.encoder)


class ItemsAhead:
    """The `Loaders` of one rank whose steps come with their items, pictures decoded.

    Both happen in a thread, before the step is asked for.

    Args:
        loaders: that give the steps.
        items: of the split.
    """

    def __init__(self, loaders: Loaders, items: StepItems) -> None:
        self._loaders, self._items = loaders, items
        self._ahead = OneAhead(self._prepare, Position.key)
        self.follow, self.decode = loaders.follow, loaders.decode
        self.num_loaders, self.steps_ahead = loaders.num_loaders, loaders.steps_ahead

    def expect(self, position: Position) -> None:
        """Begins to prepare the step that begins at a position."""
        self._ahead.expect(position)

    def get(self, position: Position) -> RankStep:
        """The step that begins at a position.

        Raises:
            ValueError: nothing of the step carries loss, or an item has no rows.
            DataPlaneLost: see `RayLoaders.get`.
        """
        found = self._ahead.get(position)
        self.num_loaders, self.steps_ahead = self._loaders.num_loaders, self._loaders.steps_ahead
        return found

    def statically(self, step: RankStep, failure: str) -> RankStep:
        """A step under the static plan, decoded anew by the ranks that now encode."""
        return self._with_items(self._loaders.statically(step, failure), step.totals.before)

    def interrupt(self) -> None:
        """From any thread: who waits here for another process raises."""
        self._loaders.interrupt()

    def close(self) -> None:
        """Ends what prepares steps that will not run."""
        self._loaders.interrupt()
        self._ahead.close()
        self._loaders.close()

    def _prepare(self, position: Position) -> RankStep:
        return self._with_items(self._loaders.get(position), position)

    def _with_items(self, step: RankStep, position: Position) -> RankStep:
        items = self._items.prepared(step, partial(self._loaders.decode, position))
        return replace(step, items=items)


def draw_step(step: RankStep, times: tuple[Plan, Evaluation], path: Path, title: str) -> None:
    """Draws a step's plan, a lane a rank, and beside it, if there are items, who encodes them."""
    from megatron_hdp.simulator.plot import plot_plan
    from megatron_hdp.simulator.plot_items import plot_items

    plot_plan(*times, path, title=title)
    if isinstance(media := step.items, StepMedia):
        batch, made = media.planned
        told = f"{title}, items by {made.strategy}: efficiency {media.efficiency:.3f}"
        beside = path.with_stem(f"{path.stem}-items")
        plot_items(batch, {told: made}, media.cost, beside)


def with_items(report: StepReport, media: StepMedia | None) -> StepReport:
    """The report with what the whole step had to encode."""
    if media is None:
        return report
    encoder: Any = media.job.encoder  # one of a known model
    return replace(
        report,
        media_items=len(media.media.items),
        media_rows=media.media.num_rows,
        encoder_flop=encoder.training_flop(media.patches),
        encoder_efficiency=media.efficiency,
    )


def _nothing() -> None:
    """A step without items leaves the encoder's gradients at zero."""
