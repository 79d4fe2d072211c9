"""One step under HDP: agree on the prepared plan, run this rank's part, report."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from megatron_hdp.data import LATEST_ORDER, DataOrder, TokenReader
from megatron_hdp.data.index_file import Int64Array
from megatron_hdp.data.one_ahead import OneAhead
from megatron_hdp.data.tables import SequenceTable, open_source
from megatron_hdp.megatron.options import TrainingArguments
from megatron_hdp.megatron.parallel import compute_device, say
from megatron_hdp.megatron.step.contents import contents_of
from megatron_hdp.megatron.step.corrupt_documents import CorruptDocuments
from megatron_hdp.megatron.step.executor import HdpExecutor, RankOutcome
from megatron_hdp.megatron.step.non_finite import NonFinite, gather_words
from megatron_hdp.megatron.step.preparation import PreparedStep, StepPreparation
from megatron_hdp.megatron.step.report import StepReport, over_all_ranks
from megatron_hdp.planner import CostModel, Evaluation, Plan, evaluate
from megatron_hdp.runtime.health import fingerprint, largest, require_agreement
from megatron_hdp.runtime.timeline import AGREEMENT


class PlannerError(RuntimeError):
    """The planner failed in two steps in a row."""


def source_of(arguments: TrainingArguments, documents: range) -> tuple[SequenceTable, TokenReader]:
    """The sequences that a split's documents give, and the reader of their tokens.

    Raises:
        ValueError: a document is longer than the context, which the flags do not allow.
    """
    return open_source(
        arguments.data_path[0],
        max_length=arguments.seq_length,
        long_sequence=arguments.hdp_long_sequence,
        documents=documents,
        say=say,
    )


def data_order(
    arguments: TrainingArguments, table: SequenceTable, contents: int | None = None
) -> DataOrder:
    """What decides which of the table's sequences form a step, and what stands in them."""
    return DataOrder(
        hybrid_data_parallel=True,
        seed=arguments.seed,
        seq_length=arguments.seq_length,
        long_sequence=arguments.hdp_long_sequence,
        num_sequences=len(table),
        corpus=table.corpus,
        contents=contents,
        version=LATEST_ORDER,
    )


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
        documents: range,
        vocab_size: int,
    ) -> None:
        self.arguments = arguments
        self.executor = executor
        self.place = executor.place
        self.cost_model = cost_model
        self.table, reader = source_of(arguments, documents)
        self.preparation = StepPreparation(
            arguments, self.place, cost_model, self.table, reader, vocab_size
        )
        self.latest: PreparedStep | None = None
        self.num_planner_failures = 0
        self._failed_before = False
        self._ahead = OneAhead(self.preparation.prepare)
        self._corrupt = CorruptDocuments(
            self.table, reader.prefix, vocab_size, arguments.hdp_corrupt_limit
        )
        self.order = self._agreed_order(reader)
        # what cannot be planned is refused now, not when it is drawn
        self.preparation.plan(np.array([self.table.longest]))

    def _agreed_order(self, reader: TokenReader) -> DataOrder:
        """The order of the data, whose ranks read the same tokens."""
        with self._agreement():
            contents = contents_of(reader, self.place)
            order = data_order(self.arguments, self.table, contents)
            facts = {"corpus": order.corpus, "tokens in the .bin of --data-path": contents}
            require_agreement(facts, compute_device())
        return order

    def follow(self, order_version: int) -> None:
        """Draws in the version of the order that the run began with; before its first step here."""
        assert self.latest is None, "a step has run in another order"
        self.order = replace(self.order, version=order_version)
        self.preparation.follow(order_version)

    def run(self, consumed: int, forward_only: bool = False) -> StepReport:
        """Runs the step after `consumed` sequences; leaves gradients in the DDP buffers.

        Raises:
            DisagreementError: ranks planned different things.
            PlannerError: the planner failed in two steps in a row.
            ValueError: too many corrupt documents in a row.
        """
        started = time.perf_counter()
        prepared = self._ahead.get(consumed)
        exposed_s = time.perf_counter() - started
        prepared = self.latest = self._agree(prepared)
        trained = self._without_corrupt(prepared)
        num_loss_tokens = int(self.table.num_labels(trained).sum())
        self._ahead.expect(prepared.step.consumed_after)
        self._share_tokens(prepared)
        self._seed_dropout(prepared.step.consumed_before)
        outcome = self.executor.run(prepared.micro_batches, num_loss_tokens, forward_only)
        return self._report(prepared, outcome, trained, exposed_s)

    def close(self) -> None:
        """Ends the preparation of steps that will not run."""
        self._ahead.close()

    def _agree(self, prepared: PreparedStep) -> PreparedStep:
        """The step as every rank will run it: under the static plan if one of them failed to plan.

        Ranks compare the plan before anything else is communicated.
        """
        with self._agreement():
            (failed,) = largest([prepared.failure is not None], compute_device())
        if failed:
            failure = prepared.failure or "another rank's planner failed"
            if prepared.failure is None:
                prepared = self.preparation.prepare_statically(prepared, failure)
            self._note_planner_failure(failure)
        self._failed_before = bool(failed)
        step = prepared.step
        facts = {
            "corpus": self.order.corpus,
            "consumed sequences": step.consumed_before,
            "sequences of the step": fingerprint(step.sequences.tobytes()),
            "sequence lengths": fingerprint(prepared.plan.lengths.tobytes()),
            "cost model": fingerprint(self.cost_model.to_json()),
            "plan": prepared.plan.fingerprint(),
        }
        with self._agreement():
            require_agreement(facts, compute_device())
        return prepared

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

    def _without_corrupt(self, prepared: PreparedStep) -> Int64Array:
        """Takes corrupt sequences out of the step; returns the rows that are left of the table."""
        num_found = sum(len(one.corrupt_ids) for one in prepared.micro_batches)
        with self._agreement():
            (anywhere,) = largest([num_found], compute_device())
        rows = prepared.step.sequences
        if not anywhere:
            self._corrupt.none_found()
            return rows
        return rows[~np.isin(rows, self._corrupt.drop(prepared))]

    def _share_tokens(self, prepared: PreparedStep) -> None:
        """Gives the tensor-parallel ranks of the first and last stage what their first one read."""
        place = self.place
        if place.num_tensor_ranks == 1 or not (place.is_first_stage or place.is_last_stage):
            return
        arrays = [array for one in prepared.micro_batches for array in (one.tokens, one.labels)]
        packed = torch.from_numpy(np.concatenate(arrays)).to(compute_device())
        with self._agreement():
            dist.broadcast(
                packed,
                parallel_state.get_tensor_model_parallel_src_rank(),
                parallel_state.get_tensor_model_parallel_group(),
            )
            parts = packed.cpu().split([len(array) for array in arrays])
        for array, part in zip(arrays, parts, strict=True):
            array[:] = part.numpy()

    def _seed_dropout(self, consumed: int) -> None:
        """Makes dropout a function of seed, data position and rank: no RNG state to save."""
        if not self.arguments.hidden_dropout:
            return  # nothing else draws; seeding costs a small step on a CPU a tenth of its time
        place = self.place
        seed = fingerprint(self.arguments.seed, consumed, place.hdp_rank, place.stage) % 2**31
        model_parallel_cuda_manual_seed(seed)

    def _report(
        self,
        prepared: PreparedStep,
        outcome: RankOutcome,
        trained: Int64Array,
        exposed_s: float,
    ) -> StepReport:
        """Sums and maxima over all ranks; tensor-parallel ranks hold the same loss."""
        ranks = dist.get_world_size()
        non_finite = self._non_finite(prepared, "loss", outcome.losses)
        lengths = self.table.lengths(trained)
        num_loss_tokens = int(self.table.num_labels(trained).sum())
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
                },
                maxima={
                    "makespan_s": outcome.until_sync_s,
                    "minus_least_busy_s": -outcome.busy_s,
                    "exposed_s": exposed_s,
                    "host_bytes": outcome.host_bytes,
                },
                device=compute_device(),
            )
        efficiency = job["busy_s"] / ranks / job["makespan_s"]
        counts = np.bincount(prepared.plan.ranks, minlength=prepared.plan.num_ranks)
        return StepReport(
            loss=job["loss_sum"] / self.place.num_tensor_ranks / max(num_loss_tokens, 1),
            tokens=int(lengths.sum()),
            squared_tokens=int((lengths**2).sum()),
            loss_tokens=num_loss_tokens,
            sequences=len(prepared.step.sequences),
            consumed_after=prepared.step.consumed_after,
            micro_batches_min=int(counts.min()),
            micro_batches_max=int(counts.max()),
            planned_efficiency=prepared.plan.summary["efficiency"],
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
            planning_ms=prepared.plan.summary["planning_ms"],
            planning_exposed_ms=job["exposed_s"] * 1e3,
            skipped_documents=self._corrupt.num_skipped,
            planner_failures=self.num_planner_failures,
            non_finite=gather_words(non_finite) if job["num_non_finite"] else (),
        )

    def non_finite_gradients(self) -> tuple[str, ...]:
        """Names the latest step's micro-batches whose gradient was not finite at the embedding.

        None where a gradient became so in sums of a layer alone. Every rank must call this.
        """
        assert self.latest is not None, "no step has run"
        norms = [norm.item() for norm in self.executor.gradient_norms]
        return gather_words(self._non_finite(self.latest, "a gradient of norm", norms))

    def _non_finite(
        self, prepared: PreparedStep, name: str, values: Sequence[float]
    ) -> list[NonFinite]:
        """This rank's micro-batches of which `name`'s value, given in order, is not finite."""
        found = []
        for micro_batch, value in zip(prepared.micro_batches, values, strict=False):
            if not math.isfinite(value):
                what = f"{name} {value}"
                rows = micro_batch.sequence_ids
                documents = tuple(self.table.documents(np.array(rows, np.int64)).tolist())
                found.append(NonFinite(micro_batch.index, what, rows, documents))
        return found

    def describe(self, use: str) -> str:
        """One line for the log on the ranks and the sequences, which are ``use``."""
        table = self.table
        return (
            f"hybrid data parallelism over {self.place.num_hdp_ranks} ranks, {len(table):,} "
            f"sequences {use} (documents: {table.num_empty:,} empty and skipped, "
            f"{table.num_truncated:,} truncated, {table.num_split:,} split)"
        )

    def draw_plan(self, path: Path, title: str) -> None:
        """Draws the latest step's plan as a Gantt chart, a lane a rank."""
        from megatron_hdp.simulator.plot import plot_plan

        plot_plan(*self.planned_times(), path, title=title)

    def planned_times(self) -> tuple[Plan, Evaluation]:
        """The latest step's plan, and when it expects what to run."""
        assert self.latest is not None, "no step has run"
        made = self.latest.plan
        return made, evaluate(made, self.cost_model, self.place.num_stages)
