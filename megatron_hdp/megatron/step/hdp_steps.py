"""One step under HDP: agree on the prepared plan, run this rank's part, report."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from megatron_hdp.data import DataOrder
from megatron_hdp.data.mixture import Corpus, Position
from megatron_hdp.data.steps import (
    Amounts,
    Loaders,
    LocalLoaders,
    RankStep,
    StepPlanner,
    costed,
)
from megatron_hdp.data_plane.wire import DataPlaneLost
from megatron_hdp.megatron.execution import HdpExecutor, OwnLoss, RankOutcome, in_mode
from megatron_hdp.megatron.media import StepMedia
from megatron_hdp.megatron.options import TrainingArguments
from megatron_hdp.megatron.parallel import compute_device, say
from megatron_hdp.megatron.step.answers import AnswerPass, HowToRun
from megatron_hdp.megatron.step.figures import (
    FurtherLosses,
    StepReport,
    figures_by_source,
    over_all_ranks,
)
from megatron_hdp.megatron.step.items import ItemsAhead, StepItems, draw_step, with_items
from megatron_hdp.megatron.step.learning import BEHIND, BEHIND_WITH_PLANE, Learning
from megatron_hdp.megatron.step.left_out import LeftOutOfSteps
from megatron_hdp.megatron.step.loading import DataPlane
from megatron_hdp.megatron.step.non_finite import gather_words, non_finite_of
from megatron_hdp.megatron.step.preference import AnswerTable, Judged, StepPreferences
from megatron_hdp.megatron.step.preparation import (
    LongStepWarning,
    all_to_all_bytes,
    contents_of,
    data_order,
    least_ranks,
    plan_settings,
    reader_of,
    say_what_ends,
    share_tokens,
)
from megatron_hdp.planner import CostModel, Evaluation, Plan
from megatron_hdp.runtime.gathering import largest
from megatron_hdp.runtime.health import DataFailure, fingerprint, meet, require_agreement
from megatron_hdp.runtime.timeline import AGREEMENT


class PlannerError(RuntimeError):
    """The planner failed in two steps in a row."""


class HdpSteps:
    """The steps over one split of the data.

    Every rank of the job must make them, at the same place.

    Raises:
        DisagreementError: a rank reads other tokens than the rest.
        ValueError: the longest sequence fits on no number of ranks.
    """

    def __init__(
        self,
        arguments: TrainingArguments,
        executor: HdpExecutor,
        cost_model: CostModel,
        corpus: Corpus,
        vocab_size: int,
        *,
        split: str = "train",
        plane: DataPlane | None = None,
    ) -> None:
        self.arguments = arguments
        self.executor = executor
        self.place = executor.place
        self.corpus = corpus
        if split == "train":
            corpus.spec.tell_code(say)
        self.cost_model = costed(cost_model, corpus.spec.primitives, arguments.seq_length)
        settings = plan_settings(arguments, self.place, self.cost_model, vocab_size, split)
        self.planner = StepPlanner(corpus, settings)
        self.latest: RankStep | None = None
        self._long_steps = LongStepWarning(arguments.distributed_timeout_minutes)
        self.num_planner_failures = 0
        self._failed_before = False
        self._gradient_norms: tuple[torch.Tensor, ...] = ()
        self._broadcast_at = self.planner.broadcast_at(from_plane=plane is not None)
        depths = arguments.mtp_num_layers or 0 if split == "train" else 0
        self._further = FurtherLosses(depths, arguments.mtp_loss_scaling_factor, self.place)
        reader = reader_of(self.place, vocab_size, self._broadcast_at, depths)
        self._has_plane = plane is not None
        learns = arguments.learns_costs and split == "train"
        behind = (BEHIND if plane is None else BEHIND_WITH_PLANE) if learns else None
        self.items = StepItems.of_job(arguments, executor, corpus, settings, reader, behind)
        self.loaders: Loaders
        self.loaders = local = LocalLoaders(self.planner, reader)
        if plane is not None:
            self.loaders = plane.loaders(arguments, split, corpus, settings, reader, local)
        if self.items is not None:
            self.loaders = ItemsAhead(self.loaders, self.items)
        self._left_out = LeftOutOfSteps(corpus, vocab_size, arguments.hdp_corrupt_limit)
        self.order = self._agreed_order()
        self._local = local
        self.preferences = StepPreferences.of(arguments, self.planner, self.order, self.place)
        if self.preferences is not None:
            share = partial(share_tokens, place=self.place, broadcast_at=self._broadcast_at)
            how = HowToRun(self._forward, self._agree_beside, share, self._agreement)
            self._answers = AnswerPass(self.preferences, reader, how)
        self._learning = None
        if learns:
            self._learning = Learning(
                arguments,
                self.place,
                self.cost_model,
                corpus.spec.primitives,
                settings.pipeline,
                has_plane=plane is not None,
            )
        # what cannot be planned is refused now, not when it is drawn
        self.planner.balance(np.array([corpus.longest]), arguments.hdp_strategy)

    def _agreed_order(self) -> DataOrder:
        """The order of the data, whose ranks read the same tokens."""
        meet(self.executor.timeline)  # some may have prepared their data for long
        with self._agreement():
            spec = self.corpus.spec
            facts = {  # first of all: what follows has a length for each source
                "names of the sources": fingerprint(self.corpus.names),
                "weights and lengths over time": fingerprint(spec.schedule, spec.weight_unit),
                "max-epochs": fingerprint([one.max_epochs for one in spec.sources]),
                "--hdp-online": int(self.arguments.learns_costs),
            }
            require_agreement(facts, compute_device())
            contents = contents_of(self.corpus, self.place)
            order = data_order(self.arguments, self.corpus, contents)
            facts = {}
            for name, one in order.sources.items():
                facts[f"sequences of {name}"] = one.corpus
                facts[f"tokens in the .bin of {name}"] = contents[name]
            require_agreement(facts, compute_device())
        return order

    def follow(self, order: DataOrder) -> None:
        """Draws each source in the order that its run began with; before the first step here."""
        assert self.latest is None, "a step has run in another order"
        mine = {}
        for name, one in self.order.sources.items():
            began = order.sources.get(name, one)
            mine[name] = replace(one, version=began.version, key=began.key)
        self.order = replace(self.order, sources=mine)
        self.planner.follow(mine)
        self.loaders.follow(mine)

    def run(self, position: Position, forward_only: bool = False) -> StepReport:
        """Runs the step that begins at a position; leaves gradients in the DDP buffers.

        Raises:
            DisagreementError: ranks planned different things.
            PlannerError: the planner failed in two steps in a row.
            ValueError: too many corrupt documents in a row, or a step without loss tokens.
        """
        known = self._following(position)
        position = _for_plans(known)
        started = time.perf_counter()
        try:
            step = self.loaders.get(position)
        except DataPlaneLost as error:
            raise DataFailure(str(error)) from error
        data_wait_s = time.perf_counter() - started
        step = self.latest = self._agree(step, known, self.loaders)
        self._long_steps.check(step.totals.makespan_s, "is planned to take")
        items = None if self.items is None else self.items.of(step)
        if items is not None:
            step = replace(step, micro_batches=items.with_text_behind(step.micro_batches))
        with self._agreement():
            amounts = self._left_out.of(step, items.damaged if items else ())
        after = step.totals.after.knowing(position)
        self.loaders.expect(after)
        with self._agreement():
            weights = self._further.weights(step.micro_batches, amounts.loss_tokens)
        with self._agreement():
            share_tokens(step, self.place, self._broadcast_at)
        self._seed_dropout(step.totals.before.sequences)
        if not forward_only:
            say_what_ends(self.planner.mixture, step.totals)
        if self.preferences is None:
            judged, outcome = None, self._execute(step, amounts, forward_only, None, weights, items)
        else:
            table, outcome = self._answers.of(step, amounts, position)
            self._answers.expect(after)
            judged = self.preferences.judged(table, amounts.loss_tokens)
            if not forward_only:
                outcome = self._execute(step, amounts, own_loss=judged.own_loss)
        self._gradient_norms = outcome.gradient_norms
        if self.items is not None and items is not None and not forward_only:
            self.items.observe(position.steps, items)
        report = with_items(self._report(step, outcome, amounts, data_wait_s, judged), items)
        losses = {name: one.loss for name, one in (report.sources or {}).items()}
        after = report.position_after.seeing(position, losses)
        return self._learnt(replace(report, position_after=after), known, step, outcome)

    def answers(self, position: Position, following: Position | None = None) -> AnswerTable:
        """What the model, as it is, says of the answers of the step that begins at a position.

        Every rank must call this; another call's step begins at `following`. None of them counts.
        """
        kept = self.kept()
        step = self._agree(self._local.get(position), position, self._local)
        if following is not None:
            self._local.expect(following)
        with self._agreement():
            amounts = self._left_out.of(step)
        with self._agreement():
            share_tokens(step, self.place, self._broadcast_at)
        found, _ = self._answers.of(step, amounts, position)
        if following is not None:
            self._answers.expect(following)
        self.put_back(kept)
        return found

    def _forward(self, step: RankStep, amounts: Amounts, found: OwnLoss) -> RankOutcome:
        with in_mode(self.executor.chunks, training=False):
            return self._execute(step, amounts, forward_only=True, own_loss=found)

    def _execute(
        self,
        step: RankStep,
        amounts: Amounts,
        forward_only: bool = False,
        own_loss: OwnLoss | None = None,
        further: Sequence[float] = (),
        items: StepMedia | None = None,
    ) -> RankOutcome:
        """Runs a step's micro-batches; what they leave is divided by its loss tokens."""
        run = partial(
            self.executor.run,
            divisor=max(amounts.loss_tokens, 1),
            forward_only=forward_only,
            num_sources=len(self.corpus.sources),
            ends_together=step.share.ends_together,
            begins_together=step.share.begins_together,
            own_loss=own_loss,
            further_weights=further,
        )
        if self.items is None:
            return run(step.micro_batches)
        with self.items.in_place(items, step.micro_batches, forward_only) as (placed, before_sync):
            return run(placed, before_sync=before_sync)

    def _following(self, position: Position) -> Position:
        """The position with what the steps that begin there may depend on."""
        position = position.following(self.planner.losses_behind)
        if self._learning is not None:
            return self._learning.following(position)
        if position.costs is not None:
            say("what the run had learnt of its costs is dropped: --hdp-online is not given")
        return replace(position, costs=None)

    def _learnt(
        self, report: StepReport, known: Position, step: RankStep, outcome: RankOutcome
    ) -> StepReport:
        """The report with what the step that began at `known` has shown of costs."""
        if self._learning is None:
            return replace(report, position_after=replace(report.position_after, costs=None))
        with self._agreement():
            costs = self._learning.observed(known, step, outcome)
        return self._learning.reported(report, costs)

    def kept(self) -> dict[str, Any]:
        """What a step changes here before its gradients are agreed on, for `put_back`."""
        planner = (self.num_planner_failures, self._failed_before)
        return {"planner": planner, "left out": self._left_out.kept()}

    def put_back(self, kept: Mapping[str, Any]) -> None:
        """Goes back to what `kept` gave, here or in another epoch of the job."""
        self.num_planner_failures, self._failed_before = kept["planner"]
        self._left_out.put_back(kept["left out"])

    def least_ranks(self) -> int:
        """The fewest HDP ranks on which every sequence of the data fits."""
        return least_ranks(self.planner.settings, self.corpus.longest)

    def moved(self, position: Position, places: Sequence[int | None]) -> Position:
        """A position with what was learnt of ranks where these stand now, see `Learning.moved`."""
        return position if self._learning is None else self._learning.moved(position, places)

    def is_over(self, position: Position) -> bool:
        """Whether every source of the data has ended, so that no step begins at a position."""
        return self.planner.is_over(position.following(self.planner.losses_behind))

    def close(self) -> None:
        """Ends the preparation of steps that will not run."""
        self.loaders.close()
        if self.preferences is not None:
            self._answers.close()

    def _agree(self, step: RankStep, known: Position, loaders: Loaders) -> RankStep:
        """The step as every rank will run it: under the static plan if one of them failed to plan.

        Ranks compare the plan, and what they have learnt, before anything else is communicated.
        """
        failure = step.totals.failure
        with self._agreement():
            (failed,) = largest([failure is not None], compute_device())
        if failed:
            if failure is None:
                failure = "another rank's planner failed"
                step = loaders.statically(step, failure)
            self._note_planner_failure(failure)
        self._failed_before = bool(failed)
        facts = {
            "consumed sequences": step.totals.before.sequences,
            "cost model": fingerprint(self.cost_model.to_json()),
            **step.totals.fingerprints,
        }
        if known.costs is not None:
            facts["what the run has learnt"] = known.costs.fingerprint()
        with self._agreement():
            require_agreement(facts, compute_device())
        return step

    def _agree_beside(self, step: RankStep, known: Position, loaders: Loaders) -> RankStep:
        """The same of what runs beside a step: a failure there says nothing of the next step's."""
        failed_before, self._failed_before = self._failed_before, False
        found = self._agree(step, known, loaders)
        self._failed_before = failed_before
        return found

    def _agreement(self) -> AbstractContextManager[None]:
        """Where this rank may stand because another one has not come."""
        return self.executor.timeline.noted(AGREEMENT)

    def _note_planner_failure(self, failure: str) -> None:
        self.num_planner_failures += 1
        if self._failed_before:
            raise PlannerError(
                f"the planner failed in two steps in a row ({failure}): choose another "
                "--hdp-strategy, for example static, and report this"
            )
        say(f"the planner failed ({failure}): this step runs the static plan")

    def _seed_dropout(self, consumed: int) -> None:
        """Makes dropout a function of seed, data position and rank: no RNG state to save."""
        if not self.arguments.hidden_dropout:
            return  # nothing else draws; seeding costs a small step on a CPU a tenth of its time
        place = self.place
        seed = fingerprint(self.arguments.seed, consumed, place.hdp_rank, place.stage) % 2**31
        model_parallel_cuda_manual_seed(seed)

    def _report(
        self,
        step: RankStep,
        outcome: RankOutcome,
        amounts: Amounts,
        data_wait_s: float,
        judged: Judged | None,
    ) -> StepReport:
        """Sums and maxima over all ranks; tensor-parallel ranks hold the same loss."""
        ranks = dist.get_world_size()
        totals = step.totals
        non_finite = non_finite_of(step, self.corpus, "loss", outcome.losses)
        loss_keys = [f"loss of {name}" for name in self.corpus.names]
        with self._agreement():
            job = over_all_ranks(
                sums={
                    "loss_sum": sum(outcome.losses),
                    "num_non_finite": len(non_finite),
                    "busy_s": outcome.busy_s,
                    "ring_wait_s": outcome.ring_wait_s,
                    "pipeline_wait_s": outcome.pipeline_wait_s,
                    "sync_s": outcome.sync_s,
                    "ring_bytes": outcome.ring_bytes,
                    "offloaded_bytes": outcome.offloaded_bytes,
                    "places": step.share.num_slots,
                    "padding": step.share.num_padding,
                    "further_loss": sum(outcome.further_losses),
                    **dict(zip(loss_keys, outcome.source_losses, strict=True)),
                },
                maxima={
                    "makespan_s": outcome.until_sync_s,
                    "minus_least_busy_s": -outcome.busy_s,
                    "data_wait_s": data_wait_s,
                    "loaders": self.loaders.num_loaders or 0,
                    "minus_steps_ahead": -(self.loaders.steps_ahead or 0),
                    "host_bytes": outcome.host_bytes,
                    "positions": step.share.num_slots,
                    "encoding_s": self.items.encoding_s if self.items else 0.0,
                },
                device=compute_device(),
            )
        self._long_steps.check(job["makespan_s"], "took")
        efficiency = job["busy_s"] / ranks / job["makespan_s"]
        loss = job["loss_sum"] / self.place.num_tensor_ranks / max(amounts.loss_tokens, 1)
        return StepReport(
            **({"loss": loss} if judged is None else asdict(judged.figures)),
            tokens=amounts.tokens,
            squared_tokens=amounts.squared_tokens,
            seen_in_window=amounts.seen_in_window,
            loss_tokens=amounts.loss_tokens,
            sequences=totals.sequences,
            position_after=totals.after,
            micro_batches_min=totals.micro_batches_min,
            micro_batches_max=totals.micro_batches_max,
            num_positions=int(job["positions"]),
            padding_share=job["padding"] / job["places"],
            all_to_all_bytes=all_to_all_bytes(self.arguments, amounts.tokens),
            planned_efficiency=totals.efficiency,
            measured_efficiency=efficiency,
            makespan_s=job["makespan_s"],
            idle_share_max=1 + job["minus_least_busy_s"] / job["makespan_s"],
            idle_share_mean=1 - efficiency,
            ring_wait_s=job["ring_wait_s"] / ranks,
            pipeline_wait_s=job["pipeline_wait_s"] / ranks,
            sync_s=job["sync_s"] / ranks,
            ring_bytes=int(job["ring_bytes"]),
            offloaded_bytes=int(job["offloaded_bytes"]),
            host_bytes_max=int(job["host_bytes"]),
            planning_ms=totals.planning_ms,
            data_wait_ms=job["data_wait_s"] * 1e3,
            encoder_ms=job["encoding_s"] * 1e3 if self.items else None,
            loaders=int(job["loaders"]) if self._has_plane else None,
            steps_ahead=-int(job["minus_steps_ahead"]) if self._has_plane else None,
            skipped_documents=sum(self._left_out.num_skipped),
            planner_failures=self.num_planner_failures,
            mtp_loss=self._further.mean(job["further_loss"], max(amounts.loss_tokens, 1)),
            sources=figures_by_source(
                self.corpus,
                totals,
                amounts,
                [job[key] / self.place.num_tensor_ranks for key in loss_keys],
                self._left_out.num_skipped,
                None if judged is None else judged.by_source,
            ),
            non_finite=gather_words(non_finite) if job["num_non_finite"] else (),
        )

    def non_finite_gradients(self) -> tuple[str, ...]:
        """Names the latest step's micro-batches whose gradient was not finite at the embedding.

        None where a gradient became so in sums of a layer alone. Every rank must call this.
        """
        norms = torch.stack(list(self._gradient_norms)).tolist() if self._gradient_norms else []
        return gather_words(non_finite_of(self._ran(), self.corpus, "a gradient of norm", norms))

    def describe(self, use: str) -> list[str]:
        """Lines for the log on the ranks and the sequences, which are ``use``."""
        ranks = f"hybrid data parallelism over {self.place.num_hdp_ranks} ranks"
        lines = [f"{self.corpus.describe(i, use)}" for i in range(len(self.corpus.sources))]
        return [f"{ranks}, {lines[0]}", *lines[1:]]

    def draw_plan(self, path: Path, title: str) -> None:
        """Draws the latest step's plan, a lane a rank, and who encodes its items."""
        draw_step(self._ran(), self.planned_times(), path, title)

    def _ran(self) -> RankStep:
        assert self.latest is not None, "no step has run"
        return self.latest

    def planned_times(self) -> tuple[Plan, Evaluation]:
        """The latest step's plan, and when it expects what to run."""
        made = self.latest_plan()
        settings = self.planner.settings_at(self._ran().totals.before)
        return made, settings.times_of(made)

    def corrections(self) -> dict[str, Any] | None:
        """How the cost model was corrected that the latest step was planned by; None: it is not."""
        before = self._ran().totals.before
        return None if before.costs is None else before.costs.at(before.steps).to_record()

    def latest_plan(self) -> Plan:
        """The latest step's plan as a whole, made once more: a rank keeps its share alone."""
        totals = self._ran().totals
        if totals.failure is None:
            return self.planner.plan(totals.before).plan
        return self.planner.statically(totals.before, totals.failure).plan


def _for_plans(position: Position) -> Position:
    """The position without what no plan depends on: it may travel to a data plane."""
    costs = position.costs
    return position if costs is None else replace(position, costs=costs.for_plans())
