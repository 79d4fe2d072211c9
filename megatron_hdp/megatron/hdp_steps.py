"""One step under HDP: draw the global batch, plan it, agree on the plan, run this rank's part."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from megatron_hdp.data import (
    RankMicroBatch,
    SequenceTable,
    Step,
    StepSampler,
    TokenFile,
    padding_micro_batch,
    read_micro_batch,
)
from megatron_hdp.megatron.arguments import TrainingArguments
from megatron_hdp.megatron.executor import HdpExecutor, RankOutcome
from megatron_hdp.megatron.model import model_dtype
from megatron_hdp.megatron.non_finite import NonFinite, gather_words
from megatron_hdp.megatron.parallel import compute_device, hdp_rank, new_ring_comm, num_hdp_ranks
from megatron_hdp.megatron.step_report import StepReport
from megatron_hdp.planner import CostModel, Plan, evaluate, plan
from megatron_hdp.runtime.agreement import fingerprint, require_agreement
from megatron_hdp.runtime.kernels import select_kernel
from megatron_hdp.runtime.timeline import Timeline


def cost_model_of(arguments: TrainingArguments, num_parameters: int) -> CostModel:
    """The cost model of a run: measured (``--hdp-cost-model``) or from the model's shape."""
    if arguments.hdp_cost_model is not None:
        return CostModel.from_json(arguments.hdp_cost_model)
    attention_size = arguments.num_attention_heads * arguments.kv_channels
    kv_size = 2 * arguments.num_query_groups * arguments.kv_channels
    return CostModel.from_model_shape(
        num_layers=arguments.num_layers,
        hidden_size=attention_size,
        num_parameters=num_parameters,
        kv_bytes_per_token=arguments.num_layers * kv_size * model_dtype(arguments).itemsize,
    )


@dataclass(frozen=True)
class PlannedStep:
    """A global batch and its plan; equal on every rank."""

    step: Step
    plan: Plan
    num_loss_tokens: int


class HdpSteps:
    """The steps over one split of the data.

    Raises:
        ValueError: the longest sequence fits on no number of ranks.
    """

    def __init__(
        self,
        arguments: TrainingArguments,
        executor: HdpExecutor,
        cost_model: CostModel,
        token_file: TokenFile,
        documents: range,
        vocab_size: int,
    ) -> None:
        self.arguments = arguments
        self.executor = executor
        self.cost_model = cost_model
        self.token_file = token_file
        self.vocab_size = vocab_size
        self.table = SequenceTable.build(
            token_file.lengths,
            max_length=arguments.seq_length,
            long_sequence=arguments.hdp_long_sequence,
            documents=documents,
        )
        self.sampler = StepSampler(
            self.table.length,
            seed=arguments.seed,
            global_batch_size=arguments.global_batch_size,
            global_batch_tokens=arguments.hdp_global_batch_tokens,
        )
        self.planned: PlannedStep | None = None  # of the latest step
        self._corpus = fingerprint(self.table.length.tobytes())
        self._plan_lengths(self.table.length.max(keepdims=True))  # refused now, not when drawn

    def run(self, consumed: int, forward_only: bool = False) -> StepReport:
        """Runs the step after `consumed` sequences; leaves gradients in the DDP buffers.

        Raises:
            DisagreementError: ranks planned different things.
            ValueError: a token outside the vocabulary.
        """
        planned = self.planned = self._plan(consumed)
        self._require_same_plan(planned)
        mine = planned.plan.micro_batches_of(hdp_rank())
        self._seed_dropout(planned.step.consumed_before)
        outcome = self.executor.run(
            self._read(planned, mine),
            max(len(mine), 1),
            planned.num_loss_tokens,
            forward_only=forward_only,
        )
        return self._report(planned, mine, outcome)

    def _plan(self, consumed: int) -> PlannedStep:
        step = self.sampler.step(consumed)
        step_plan = self._plan_lengths(self.table.length[step.sequences])
        return PlannedStep(step, step_plan, int(self.table.num_labels[step.sequences].sum()))

    def _plan_lengths(self, lengths: np.ndarray) -> Plan:
        arguments = self.arguments
        return plan(
            lengths,
            ranks=num_hdp_ranks(),
            tokens_per_rank=arguments.hdp_tokens_per_rank,
            strategy=arguments.hdp_strategy,
            max_length=arguments.seq_length,
            slice_multiple=arguments.hdp_slice_multiple,
            cost_model=self.cost_model,
            ranks_per_node=self.cost_model.ranks_per_node,
        )

    def _require_same_plan(self, planned: PlannedStep) -> None:
        step = planned.step
        facts = {
            "corpus": self._corpus,
            "consumed sequences": step.consumed_before,
            "sequences of the step": fingerprint(step.sequences.tobytes()),
            "sequence lengths": fingerprint(planned.plan.lengths.tobytes()),
            "cost model": fingerprint(self.cost_model.to_json()),
            "plan": planned.plan.fingerprint(),
        }
        require_agreement(facts, compute_device())

    def _read(self, planned: PlannedStep, mine: np.ndarray) -> Iterator[RankMicroBatch]:
        if not len(mine):
            yield padding_micro_batch(hdp_rank())
        for m in mine.tolist():
            micro_batch = read_micro_batch(
                planned.plan, m, hdp_rank(), planned.step.sequences, self.table, self.token_file
            )
            self._check_vocabulary(micro_batch)
            yield micro_batch

    def _check_vocabulary(self, micro_batch: RankMicroBatch) -> None:
        largest = max(micro_batch.tokens.max(), micro_batch.labels.max())
        if largest >= self.vocab_size:
            raise ValueError(
                f"sequences {micro_batch.sequence_ids} hold token id {largest}, the tokenizer has "
                f"{self.vocab_size} entries: train with the tokenizer that made the data"
            )

    def _seed_dropout(self, consumed: int) -> None:
        """Makes dropout a function of seed, data position and rank: no RNG state to save."""
        seed = fingerprint(self.arguments.seed, consumed, hdp_rank()) % 2**31
        model_parallel_cuda_manual_seed(seed)

    def _report(self, planned: PlannedStep, mine: np.ndarray, outcome: RankOutcome) -> StepReport:
        """Sums and maxima over all ranks; tensor-parallel ranks hold the same loss."""
        non_finite = self._non_finite(planned, mine, outcome)
        sums = torch.tensor(
            [sum(outcome.losses), outcome.busy_s, outcome.ring_bytes, len(non_finite)],
            dtype=torch.float64,
            device=compute_device(),
        )
        until_sync = torch.tensor(outcome.until_sync_s, device=compute_device())
        dist.all_reduce(sums)
        dist.all_reduce(until_sync, dist.ReduceOp.MAX)
        loss_sum, busy_s, ring_bytes, num_non_finite = sums.tolist()
        replicas = dist.get_world_size() // num_hdp_ranks()
        counts = np.bincount(planned.plan.ranks, minlength=planned.plan.num_ranks)
        return StepReport(
            loss=loss_sum / replicas / max(planned.num_loss_tokens, 1),
            tokens=planned.step.tokens,
            loss_tokens=planned.num_loss_tokens,
            sequences=len(planned.step.sequences),
            consumed_after=planned.step.consumed_after,
            micro_batches_min=int(counts.min()),
            micro_batches_max=int(counts.max()),
            planned_efficiency=planned.plan.summary["efficiency"],
            measured_efficiency=busy_s / dist.get_world_size() / until_sync.item(),
            ring_bytes=int(ring_bytes),
            planning_ms=planned.plan.summary["planning_ms"],
            non_finite=gather_words(non_finite) if num_non_finite else (),
        )

    def _non_finite(
        self, planned: PlannedStep, mine: np.ndarray, outcome: RankOutcome
    ) -> list[NonFinite]:
        """This rank's micro-batches whose loss is NaN or infinite."""
        found = []
        for m, loss in zip(mine.tolist(), outcome.losses, strict=False):  # padding has no loss
            if not math.isfinite(loss):
                micro_batch = planned.plan.micro_batch(m)
                here = micro_batch.sequences + micro_batch.local.get(hdp_rank(), ())
                rows = planned.step.sequences[list(here)]
                documents = self.table.document[rows]
                found.append(NonFinite(m, loss, tuple(rows.tolist()), tuple(documents.tolist())))
        return found

    def draw_plan(self, path: Path, title: str) -> None:
        """Draws the latest step's plan as a Gantt chart, a lane a rank."""
        from megatron_hdp.simulator.plot import plot_plan

        assert self.planned is not None, "no step has run"
        evaluation = evaluate(self.planned.plan, self.cost_model)
        plot_plan(self.planned.plan, evaluation, path, title=title)


def build_executor(
    arguments: TrainingArguments, model: DistributedDataParallel, timeline: Timeline
) -> HdpExecutor:
    """The executor of this rank; every rank of the job must call this."""
    comm = new_ring_comm(arguments.distributed_timeout_minutes, timeline)
    return HdpExecutor(model, comm, select_kernel(compute_device()))
