"""Pictures of the steps over one split: who encodes them, and what comes of their gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from megatron_hdp.data.mixture import Corpus
from megatron_hdp.data.steps import PlanSettings, RankMicroBatch, RankStep, Reader
from megatron_hdp.megatron.execution import HdpExecutor
from megatron_hdp.megatron.media import BatchMedia, DrawnItems, JobEncoder, StepMedia
from megatron_hdp.megatron.model import add_up_gradients, encoder_of
from megatron_hdp.megatron.options import TrainingArguments
from megatron_hdp.megatron.step.figures import StepReport
from megatron_hdp.runtime.timeline import ENCODER


class StepItems:
    """Has the items of steps encoded by all ranks, with the encoder of the model's first chunk.

    Attributes:
        encoding_s: what the latest step took on this rank, without waiting for others.
    """

    def __init__(self, encoder: JobEncoder, corpus: Corpus, most_damaged: int) -> None:
        self._encoder, self._corpus, self._most_damaged = encoder, corpus, most_damaged
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
    ) -> StepItems | None:
        """Those of a job whose model has an encoder; every rank must call this."""
        if arguments.hdp_encoder is None:
            return None
        chunks, balance = executor.chunks, arguments.hdp_media_balance
        encoder = JobEncoder(
            encoder_of(chunks[0]),
            arguments,
            chunks,
            executor.place,
            settings,
            reader,
            balance,
            executor.timeline,
        )
        return cls(encoder, corpus, arguments.hdp_corrupt_limit)

    def of(self, step: RankStep) -> StepMedia | None:
        """A step's items, of which this rank has decoded those that it encodes.

        None of a step without any. Every rank must call this.

        Raises:
            EveryRankError: too many sequences with damaged pictures in a row.
            ValueError: an item that the encoder has no rows for.
        """
        assert step.planned is not None, "ranks draw steps with pictures themselves"
        batch = DrawnItems.of(self._corpus, step.planned.step)
        if not batch.media:
            return None
        media = BatchMedia.of(batch, self._encoder.encoder)
        found = self._encoder.prepared(batch, media, step.planned.plan, self._corpus)
        found.decode(self._most_damaged)
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
        timeline = self._encoder.timeline
        timeline.reset()
        with media.rows_in_place(micro_batches, learns=learns) as placed:
            self.encoding_s = timeline.totals_s[ENCODER]
            yield placed, partial(self._learn, media) if learns else None
        self.encoding_s += timeline.totals_s[ENCODER]  # since the schedule began

    def _learn(self, media: StepMedia) -> None:
        media.differentiate()
        add_up_gradients(self._encoder.encoder)


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
