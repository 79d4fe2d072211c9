"""Preferences in a step: the answers' sums by one pass forward, then weights of their tokens.

A loss of pairs goes through one number a sequence, the sum of its answer's log-probabilities. All
ranks hear these sums, and their derivatives are weights by which the step trains; so the sides of a
pair may lie on any ranks, and packing and balancing are those of any other step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from megatron_hdp.arrays import AnyArray, Int64Array
from megatron_hdp.data import DataOrder
from megatron_hdp.data.mixture import Corpus, Step
from megatron_hdp.data.steps import (
    RankMicroBatch,
    RankShare,
    RankStep,
    StepPlanner,
    UnrelatedPlanner,
)
from megatron_hdp.megatron.model import LastStage
from megatron_hdp.megatron.options import TrainingArguments
from megatron_hdp.megatron.parallel import RankPlace, compute_device
from megatron_hdp.megatron.step.figures import PreferenceFigures
from megatron_hdp.megatron.step.reference_sums import ReferenceSums
from megatron_hdp.runtime.gathering import EveryRankError
from megatron_hdp.runtime.health import fingerprint
from megatron_hdp.runtime.loss import Preference, RewardFigures

_ROWS, _TARGETS, _WEIGHTS = "own rows", "own targets", "own weights"
Tensors = Mapping[str, torch.Tensor]


def objective_of(arguments: TrainingArguments) -> Preference | None:
    """The loss of preferences that a run trains by, if it does.

    Raises:
        ValueError: numbers out of range, or that the loss does not take.
    """
    if arguments.hdp_objective is None:
        return None
    return Preference(
        kind=arguments.hdp_objective,  # type: ignore[arg-type]  # one of its choices
        beta=arguments.hdp_beta,
        label_smoothing=arguments.hdp_label_smoothing,
        gamma=arguments.hdp_gamma,
        desirable_weight=arguments.hdp_desirable_weight,
        undesirable_weight=arguments.hdp_undesirable_weight,
    )


def require_fitting(corpus: Corpus, objective: str | None) -> None:
    """Refuses an objective over data of another kind, and preferences without an objective.

    Raises:
        ValueError: says what was found and expected.
    """
    found, origin = corpus.sides, corpus.spec.origin
    if objective is None and found is not None:
        raise ValueError(
            f"{origin}: found preferences ({found}), of which the loss of the next token would "
            "train rejected answers, too; expected text or conversations: add --hdp-objective"
        )
    if objective is not None and (found is None or (found != "pairs" and objective != "kto")):
        expected = "labelled or pairs" if objective == "kto" else "pairs"
        raise ValueError(
            f"--hdp-objective {objective}: found a source of {found or 'tokens'} in {origin}, "
            f"expected {expected}: give its sources this format"
        )


@dataclass(frozen=True)
class UnrelatedSums:
    """Of answers behind prompts of others, ``[n]`` each; the same on every rank."""

    keys: Int64Array
    """Fingerprints of what prompts and answers are."""
    sums: torch.Tensor
    """As of `AnswerTable`."""
    counts: torch.Tensor
    """Likewise."""


@dataclass(frozen=True)
class AnswerTable:
    """Of each sequence of a step, in its order, ``[n]`` each; the same on every rank."""

    sums: torch.Tensor
    """Log-probabilities of the answer's tokens, nats, float64; 0 where it is left out."""
    counts: torch.Tensor
    """Those tokens; 0 likewise."""
    sources: torch.Tensor
    documents: torch.Tensor
    """Of the source's token file."""
    unrelated: UnrelatedSums | None = None
    """Where the objective measures against their divergence."""


class AnswerSums:
    """An `OwnLoss` that keeps each sequence's sum; nothing to learn from."""

    def __init__(self, num_sequences: int) -> None:
        self._num = num_sequences
        self._found: list[tuple[Int64Array, torch.Tensor]] = []

    def arrays(self, micro_batch: RankMicroBatch) -> dict[str, AnyArray]:
        """See `OwnLoss.arrays`."""
        rows = np.flatnonzero(micro_batch.loss_mask)
        return {_ROWS: rows, _TARGETS: micro_batch.labels[rows]}

    def of(self, micro_batch: RankMicroBatch, tensors: Tensors, last: LastStage) -> torch.Tensor:
        """See `OwnLoss.of`."""
        found = last.log_probs(tensors[_ROWS], tensors[_TARGETS])
        self._found.append((_sequences_of(micro_batch), found))
        return found.sum()

    def table(self) -> torch.Tensor:
        """Sums and counts of this rank's tokens, float64 ``[2, n]`` on the CPU."""
        found = torch.zeros(2, self._num, dtype=torch.float64)
        for ids, values in self._found:
            places = torch.from_numpy(ids)
            found[0].index_add_(0, places, values.to("cpu", torch.float64))
            found[1].index_add_(0, places, torch.ones(len(ids), dtype=torch.float64))
        return found


@dataclass(frozen=True)
class WeighedAnswers:
    """An `OwnLoss`: the tokens' negative log-probabilities, by a weight of each sequence."""

    weights: torch.Tensor
    """Float64 ``[n]``, on the CPU."""

    def arrays(self, micro_batch: RankMicroBatch) -> dict[str, AnyArray]:
        """See `OwnLoss.arrays`."""
        rows = np.flatnonzero(micro_batch.loss_mask)
        weights = self.weights.numpy()[_sequences_of(micro_batch)]
        return {_ROWS: rows, _TARGETS: micro_batch.labels[rows], _WEIGHTS: weights}

    def of(self, micro_batch: RankMicroBatch, tensors: Tensors, last: LastStage) -> torch.Tensor:
        """See `OwnLoss.of`."""
        return last.weighted_nll(tensors[_ROWS], tensors[_TARGETS], tensors[_WEIGHTS])


def _sequences_of(micro_batch: RankMicroBatch) -> Int64Array:
    """Places in the step of the sequences of its tokens with loss."""
    ids = np.array([*micro_batch.sequence_ids, -1], dtype=np.int64)
    found: Int64Array = ids[micro_batch.sequence_index[micro_batch.loss_mask]]
    return found


@dataclass(frozen=True)
class Judged:
    """What a loss of preferences makes of a step; the same on every rank."""

    figures: PreferenceFigures
    by_source: tuple[tuple[float, int], ...]
    """Sum of the losses, and pairs, of each source."""
    own_loss: WeighedAnswers
    """What trains, divided by the step's loss tokens."""


class StepPreferences:
    """The loss of preferences of the steps over one split.

    Attributes:
        reference: sums of the frozen model; None until they are there, or where none are needed.
        unrelated: plans a step's answers behind prompts of others; None where none are asked for.
    """

    def __init__(
        self,
        objective: Preference,
        corpus: Corpus,
        contents: Mapping[str, int],
        place: RankPlace,
        unrelated: UnrelatedPlanner | None,
    ) -> None:
        """Take fingerprints of what stands in the sources, by name."""
        self.objective = objective
        self.reference: ReferenceSums | None = None
        self.unrelated = unrelated
        self._corpus = corpus
        self._data = [contents[name] for name in corpus.names]
        self._place = place

    @classmethod
    def of(
        cls, arguments: TrainingArguments, planner: StepPlanner, order: DataOrder, place: RankPlace
    ) -> StepPreferences | None:
        """That of a run's arguments; None where it trains on next tokens.

        Raises:
            ValueError: the data are of another kind, the objective's numbers out of range, or an
                answer behind another prompt may fit on no number of ranks.
        """
        corpus = planner.corpus
        require_fitting(corpus, arguments.hdp_objective)
        objective = objective_of(arguments)
        if objective is None:
            return None
        contents = {name: one.contents or 0 for name, one in order.sources.items()}
        unrelated = None
        if objective.kind == "kto" and arguments.hdp_kto_divergence == "answers":
            unrelated = UnrelatedPlanner(planner)
        return cls(objective, corpus, contents, place, unrelated)

    def hold(self, reference: ReferenceSums) -> None:
        """Takes sums, with room for all answers of the sources."""
        for data, source in zip(self._data, self._corpus.sources, strict=True):
            assert source.sides is not None, "preferences have sides"
            reference.hold(data, len(source.sides))
        self.reference = reference

    def knows(self, step: Step) -> bool:
        """Whether the reference's sums of all answers of a step are there."""
        if not all(
            reference.are_known(data, documents).all()
            for reference, data, documents in self._parts(step)
        ):
            return False
        if self.unrelated is None:
            return True
        assert self.reference is not None, "nothing holds them"
        keys = self._keys(self.unrelated.crossed.of(step))
        return not np.isnan(self.reference.of_unrelated(keys)).any()

    def note(self, table: AnswerTable) -> None:
        """Takes sums of a step's answers as those of the reference.

        Raises:
            EveryRankError: one is NaN or infinite.
        """
        assert self.reference is not None, "nothing holds them"
        if (other := table.unrelated) is not None:
            if not other.sums.isfinite().all():
                raise EveryRankError(
                    "the reference's log-probability of an answer behind another row's prompt is "
                    "not finite, expected a finite number: give another checkpoint, or "
                    "--hdp-kto-divergence none"
                )
            self.reference.put_unrelated(other.keys, other.sums.numpy())
        wrong = (~table.sums.isfinite()).nonzero()
        if len(wrong):
            place = int(wrong[0])
            raise EveryRankError(
                f"the reference's log-probability of document {int(table.documents[place])} of "
                f"source '{self._corpus.names[int(table.sources[place])]}' is "
                f"{float(table.sums[place])}, expected a finite number: give another checkpoint"
            )
        for i, data in enumerate(self._data):
            mine = table.sources == i
            documents = table.documents[mine].long().numpy()
            self.reference.put(data, documents, table.sums[mine].numpy())

    def _parts(self, step: Step) -> Iterator[tuple[ReferenceSums, int, Int64Array]]:
        assert self.reference is not None, "nothing holds them"
        for i, (data, source) in enumerate(zip(self._data, self._corpus.sources, strict=True)):
            yield self.reference, data, source.documents(step.rows[step.sources == i])

    def table(self, step: RankStep, found: AnswerSums) -> AnswerTable:
        """What all ranks have found of a step; every rank must call this."""
        mine = torch.zeros(4, step.totals.sequences, dtype=torch.float64)
        if self._place.is_last_stage and self._place.tensor_rank == 0:
            mine[:2] = found.table()
            share = step.share
            for place in _answered_for(share).tolist():
                source = int(share.sources[place])
                rows = share.rows[place : place + 1]
                (document,) = self._corpus.sources[source].documents(rows).tolist()
                mine[2:, share.ids[place]] = torch.tensor([source, document]).double()
        mine = mine.to(compute_device())
        dist.all_reduce(mine)
        return AnswerTable(*mine.cpu())

    def of_unrelated(self, step: RankStep, found: AnswerSums) -> UnrelatedSums:
        """The same of a step of `unrelated`, which every rank has drawn; every rank must call."""
        assert step.planned is not None, "they are drawn here"
        sums = found.table().to(compute_device())
        if not self._place.is_last_stage or self._place.tensor_rank:
            sums.zero_()
        dist.all_reduce(sums)
        return UnrelatedSums(self._keys(step.planned.step), *sums.cpu())

    def _keys(self, step: Step) -> Int64Array:
        """Fingerprints of what stands in a step of `unrelated`: of prompt, answer, and where it is
        cut.
        """
        assert self.unrelated is not None, "there are such steps"
        found = []
        documents = self.unrelated.crossed.documents(step).tolist()
        for (i, prompt, j, answer), length in zip(documents, step.lengths.tolist(), strict=True):
            found.append(fingerprint(self._data[i], prompt, self._data[j], answer, length) >> 1)
        return np.array(found, dtype=np.int64)

    def _divergence(self, found: UnrelatedSums | None) -> float | None:
        """Nats, at least 0: the mean over a step's answers behind prompts of others; None: 0."""
        if found is None:
            return None
        assert self.reference is not None, "it is there before the first step"
        is_there = found.counts > 0
        known = torch.from_numpy(self.reference.of_unrelated(found.keys))[is_there]
        if known.isnan().any():
            raise EveryRankError(
                "found no reference log-probability of an answer behind another row's prompt, "
                "expected one of each row of the step: give --hdp-reference-checkpoint beside "
                "--hdp-reference-log-probs, or --hdp-kto-divergence none"
            )
        if not len(known):
            return 0.0
        return max(0.0, float((found.sums[is_there] - known).mean()))

    def judged(self, table: AnswerTable, loss_tokens: int) -> Judged:
        """The loss of a step, and the weights of its answers; a pair that lacks a side is left out.

        Raises:
            EveryRankError: the reference's sum of an answer is not there, or no pair is left.
        """
        is_there = table.counts > 0
        if self._corpus.group > 1:
            both = is_there.view(-1, self._corpus.group).all(dim=1)
            is_there = both.repeat_interleave(self._corpus.group)
        taken = is_there.nonzero()[:, 0]
        if not len(taken):
            raise EveryRankError(
                "found no whole pair in a step, expected at least one: the lines above name the "
                "documents that were left out; mend them, or make the global batch larger"
            )
        sources, documents = table.sources[taken], table.documents[taken].long()
        sums = table.sums[taken] - self._of_reference(sources, documents)
        sums.requires_grad_()
        sides, kl = self._sides(sources, documents), self._divergence(table.unrelated)
        with torch.enable_grad():  # an evaluation may have none
            losses, rewards = self.objective.losses(sums, table.counts[taken], sides, kl or 0.0)
            (slopes,) = torch.autograd.grad(losses.sum(), sums)
        weights = torch.zeros_like(table.sums)
        # the step divides by its loss tokens, by which the losses of routers are means, too
        weights[taken] = -slopes * (max(loss_tokens, 1) / len(losses))
        losses = losses.detach()
        of_loss = sources if sides.dtype == torch.bool else sources[::2]
        by_source = [losses[of_loss == i] for i in range(len(self._data))]
        rewarded = RewardFigures.of(rewards, sides)
        return Judged(
            PreferenceFigures.of(float(losses.mean()), len(losses), rewarded, kl),
            tuple((float(one.sum()), len(one)) for one in by_source),
            WeighedAnswers(weights),
        )

    def _of_reference(self, sources: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
        known = torch.zeros(len(sources), dtype=torch.float64)
        if not self.objective.needs_reference:
            return known
        assert self.reference is not None, "it is there before the first step"
        for i, data in enumerate(self._data):
            mine = sources == i
            known[mine] = torch.from_numpy(self.reference.of(data, documents[mine].numpy()))
        if known.isnan().any():
            place = int(known.isnan().nonzero()[0])
            name = self._corpus.names[int(sources[place])]
            raise EveryRankError(
                f"found no reference log-probability of document {int(documents[place])} of "
                f"source '{name}', expected one of each answer of the step: give "
                "--hdp-reference-checkpoint beside --hdp-reference-log-probs"
            )
        return known

    def _sides(self, sources: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
        """As of `Preference.losses`, among the answers that are taken."""
        if self.objective.kind != "kto":
            return torch.arange(len(sources)).view(-1, 2)
        found = torch.zeros(len(sources), dtype=torch.bool)
        for i, source in enumerate(self._corpus.sources):
            assert source.sides is not None, "preferences have sides"
            mine = sources == i
            found[mine] = torch.from_numpy(source.sides.is_good[documents[mine].numpy()])
        return found


def _answered_for(share: RankShare) -> Int64Array:
    """Places in a share of the sequences that no other HDP rank tells of."""
    slots = np.repeat(np.arange(share.num_slots), np.diff(share.offsets))
    is_sharded = np.arange(len(slots)) - share.offsets[slots] < share.num_sharded[slots]
    first = share.ring[share.ring_offsets[:-1]][slots]
    return np.flatnonzero(~is_sharded | (first == share.hdp_rank))
