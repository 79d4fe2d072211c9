"""Sequences that are taken out of a step: they hold no token and no loss on any rank.

They are of corrupt documents, each of which costs itself while many in a row stop the run, or of
sources that have failed, without which a run continues.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from megatron_hdp.data.mixture import Corpus
from megatron_hdp.data.steps import Amounts, RankStep, StepTotals
from megatron_hdp.megatron.parallel import compute_device, say
from megatron_hdp.runtime.gathering import gathered, largest

_COUNTED = ("num_skipped", "_in_a_row", "_num_lost", "_told", "_steps_told")


@dataclass(frozen=True, order=True)
class LeftOut:
    """What the step loses with it."""

    sequence_id: int
    """Its place in the step."""
    source: int
    row: int
    length: int
    num_loss_tokens: int


def found_by_all(step: RankStep, sequence_ids: Iterable[int]) -> list[LeftOut]:
    """Takes sequences that any rank has found out of this rank's micro-batches.

    A sequence may be read by several ranks, so all of them must hear of what one of them found: the
    loss tokens of the whole sequence leave the global batch. Every rank of the job must call this;
    it returns those of the whole step, in its order, equal on every rank.
    """
    share, mine = step.share, []
    for sequence_id in sequence_ids:
        place = share.place_of(sequence_id)
        columns = (share.sources, share.rows, share.lengths, share.num_loss_tokens)
        mine.append(LeftOut(sequence_id, *(int(column[place]) for column in columns)))
    everyone = sorted({one for of_rank in gathered(mine) for one in of_rank})
    ids = {one.sequence_id for one in everyone}
    for micro_batch in step.micro_batches:
        micro_batch.drop(ids)
    return everyone


def without_corrupt(step: RankStep) -> None:
    """Takes corrupt sequences out, uncounted; every rank of the job must call this."""
    corrupt_ids = [i for one in step.micro_batches for i in one.corrupt_ids]
    (any_corrupt,) = largest([len(corrupt_ids)], compute_device())
    if any_corrupt:
        found_by_all(step, corrupt_ids)


class LeftOutOfSteps:
    """Takes out of the steps of one split what cannot be trained, the same on all ranks.

    Which sequences are corrupt depends on the data alone, so every parallel layout trains the same
    steps. A node that could not read a sequence of a failed source decides for all.

    Attributes:
        num_skipped: corrupt documents that were left out so far, of each source.
    """

    def __init__(self, corpus: Corpus, vocab_size: int, corrupt_limit: int) -> None:
        self.num_skipped = [0] * len(corpus.sources)
        self._corpus = corpus
        self._vocab_size = vocab_size
        self._limit = corrupt_limit
        self._in_a_row: list[str] = []
        self._num_lost: Counter[str] = Counter()
        self._told: set[str] = set()
        self._steps_told: set[tuple[str, int]] = set()

    def kept(self) -> dict[str, Any]:
        """What it has counted and told, for `put_back`: a step that is run again counts once."""
        return {name: copy.copy(getattr(self, name)) for name in _COUNTED}

    def put_back(self, kept: dict[str, Any]) -> None:
        """Goes back to what `kept` gave, here or in another epoch of the job."""
        for name in _COUNTED:
            setattr(self, name, copy.copy(kept[name]))

    def of(self, step: RankStep, damaged: Collection[int] = ()) -> Amounts:
        """What is left of a step; every rank of the job must call this.

        `damaged` are sequences that all ranks know to be.

        Raises:
            ValueError: too many corrupt documents in a row, or a source that failed has left no
                loss token in the step.
        """
        self._tell_of_sources(step.totals)
        corrupt_ids = [i for one in step.micro_batches for i in one.corrupt_ids]
        any_corrupt, any_lost = largest([len(corrupt_ids), len(step.lost)], compute_device())
        amounts, lost = step.totals.amounts, self._lose(step) if any_lost else []
        for one in lost:
            amounts = amounts.without(one.source, one.length, one.num_loss_tokens)
        for one in found_by_all(step, _here(step, damaged)) if damaged else ():
            amounts = amounts.without(one.source, one.length, one.num_loss_tokens)
            lost.append(one)
        if lost:
            _require_loss(step, amounts, len(lost))
        if not any_corrupt:
            self._in_a_row.clear()
            return amounts
        lost_ids = {one.sequence_id for one in lost}
        for one in self._skip(step, [i for i in corrupt_ids if i not in lost_ids]):
            amounts = amounts.without(one.source, one.length, one.num_loss_tokens)
        return amounts

    def _skip(self, step: RankStep, sequence_ids: Iterable[int]) -> list[LeftOut]:
        """Takes corrupt sequences, wherever they were found, out; counts them in a row."""
        corrupt = found_by_all(step, sequence_ids)
        first_good = 0  # of the places behind the latest corrupt one
        for one in corrupt:
            if one.sequence_id > first_good:
                self._in_a_row.clear()
            first_good = one.sequence_id + 1
            self._note_corrupt(one)
        if first_good < step.totals.sequences:
            self._in_a_row.clear()
        return corrupt

    def _note_corrupt(self, one: LeftOut) -> None:
        document = self._corpus.words_for([one.source], [one.row])
        expected = f"token ids from 0 to {self._vocab_size - 1}, the tokenizer's"
        self._in_a_row.append(document)
        if len(self._in_a_row) > self._limit:
            raise ValueError(
                f"{len(self._in_a_row)} corrupt documents in a row: "
                f"{', '.join(self._in_a_row)}; expected {expected}: "
                "train with the tokenizer that made the data, make the data again, or raise "
                "--hdp-corrupt-limit"
            )
        self.num_skipped[one.source] += 1
        say(
            f"skipped corrupt {document} (expected {expected}); {sum(self.num_skipped)} skipped so "
            "far"
        )

    def _lose(self, step: RankStep) -> list[LeftOut]:
        """Takes what failed sources did not give, whichever rank lacks it, out of the step."""
        found = found_by_all(step, [i for one in step.lost for i in one.ids])
        whys = gathered({one.name: one.why for one in step.lost})
        why = {name: text for of_rank in reversed(whys) for name, text in of_rank.items()}
        number = step.totals.before.steps + 1
        names = Counter(self._corpus.names[one.source] for one in found)
        for name, count in sorted(names.items()):
            if (name, number) in self._steps_told:
                continue  # an evaluation has the same steps each time, Megatron may run one again
            self._steps_told.add((name, number))
            self._num_lost[name] += count
            say(
                f"source '{name}' has failed ({why[name]}): {count:,} of its sequences are left "
                f"out of step {number:,}"
            )
        return found

    def _tell_of_sources(self, totals: StepTotals) -> None:
        """Says once of each failed source that the run continues without it."""
        for name, why in totals.without.items():
            if name not in self._told:
                self._told.add(name)
                say(
                    f"source '{name}' has failed ({why}): the run continues without it, its "
                    f"share goes to the others; {self._num_lost[name]:,} of its sequences were "
                    "drawn and are not trained"
                )


def _here(step: RankStep, sequence_ids: Collection[int]) -> list[int]:
    """Those that this rank has something of."""
    return [one for one in step.share.ids.tolist() if one in sequence_ids]


def _require_loss(step: RankStep, amounts: Amounts, num_lost: int) -> None:
    if amounts.loss_tokens:
        return
    raise ValueError(
        f"found no token with loss in step {step.totals.before.steps + 1} once the {num_lost:,} of "
        f"its {step.totals.sequences:,} sequences are left out whose source failed or whose "
        "media are damaged, expected at least one: the lines above name them and say why; start "
        "the job again when they can be read, or make the global batch larger"
    )
