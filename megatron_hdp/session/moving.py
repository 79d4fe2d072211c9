"""What a session has of its place in a job: made when it enters one, dropped when it leaves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_hdp.data.steps import PlanSettings, Reader
from megatron_hdp.megatron import parallel
from megatron_hdp.megatron.execution import HdpExecutor
from megatron_hdp.megatron.optimizer import build_optimizer
from megatron_hdp.megatron.options import TrainingArguments
from megatron_hdp.megatron.step import FurtherLosses, cost_model_of, plan_settings, reader_of
from megatron_hdp.megatron.world import World
from megatron_hdp.planner import CostModel
from megatron_hdp.runtime.health import fingerprint, require_agreement
from megatron_hdp.runtime.timeline import Timeline


@dataclass(frozen=True)
class SessionPlace:
    """What plans and steps of a session are made by, at its place in a job."""

    executor: HdpExecutor
    cost_model: CostModel
    settings: PlanSettings
    reader: Reader
    further: FurtherLosses

    @classmethod
    def of(
        cls, arguments: TrainingArguments, executor: HdpExecutor, vocab_size: int
    ) -> SessionPlace:
        """Every rank of the job must call this.

        Raises:
            DisagreementError: ranks would plan by different cost models.
        """
        place = executor.place
        cost_model = cost_model_of(arguments, executor)
        facts = {
            "cost model": fingerprint(cost_model.to_json()),
            "layout and capacity": fingerprint(arguments.hdp_tokens_per_rank, arguments.seq_length),
            "vocabulary": vocab_size,
        }
        require_agreement(facts, parallel.compute_device())
        settings = plan_settings(arguments, place, cost_model, vocab_size)
        depths, factor = arguments.mtp_num_layers or 0, arguments.mtp_loss_scaling_factor
        reader = reader_of(place, vocab_size, broadcast_at=(), num_further=depths)
        return cls(executor, cost_model, settings, reader, FurtherLosses(depths, factor, place))


def world_of(arguments: TrainingArguments, chunks: Sequence[Any], timeline: Timeline) -> World:
    """What a session leaves its job by.

    Raises:
        ValueError: the session was made of a model, whose framework holds groups of its own.
    """
    if arguments.lr is None:
        raise ValueError(
            "found a session of a model that a framework built, expected one of "
            "HdpSession.from_flags: the framework keeps process groups that a session does not know"
        )
    if arguments.use_distributed_optimizer:
        raise ValueError(
            "found --use-distributed-optimizer, expected an optimizer whose state every HDP rank "
            "has whole: a rank that leaves would take its part with it. Leave it out"
        )
    return World(arguments, timeline, chunks, lambda parts: build_optimizer(arguments, parts))
