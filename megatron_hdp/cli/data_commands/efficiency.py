"""How well the planner fills ranks with the steps that a run will draw: some of each phase."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import numpy as np

from megatron_hdp.arrays import Int64Array
from megatron_hdp.cli.data_commands.forecast import PhaseSums
from megatron_hdp.cli.shared.ranks import cost_model_of
from megatron_hdp.data.mixture import Corpus, Mixture
from megatron_hdp.planner import CostModel, Figures, figures, plan, told_as
from megatron_hdp.planner.pipeline import Pipeline

_FLAGS = {"tokens_per_rank": "--tokens-per-rank", "max_length": "--seq-length"}


@dataclass(frozen=True)
class Estimate:
    """Means over the planned steps of a phase."""

    num_planned: int
    efficiency: float
    """Compute over ranks over makespan."""
    makespan_s: float


@dataclass(frozen=True)
class Ranks:
    """What steps are planned for."""

    ranks: int
    tokens_per_rank: int
    pipeline: Pipeline
    seq_length: int
    cost_model: CostModel
    costs_of: str
    """What the cost model stands for, in words."""

    @classmethod
    def of(cls, arguments: argparse.Namespace, seq_length: int) -> Ranks | None:
        """Return what the flags say; None where they name no ranks.

        Raises:
            ValueError: only one of the ranks and their capacity, costs of no ranks, or costs that
                cannot be used.
        """
        ranks, tokens = arguments.ranks, arguments.tokens_per_rank
        if (ranks is None) != (tokens is None):
            found = "--ranks" if tokens is None else "--tokens-per-rank"
            raise ValueError(
                f"found {found} alone, expected --ranks N and --tokens-per-rank C for an estimate "
                "of efficiency: give both or none"
            )
        if ranks is None:
            _require_unused(arguments)
            return None
        cost_model, costs_of = cost_model_of(arguments)
        pipeline = Pipeline(
            arguments.pipeline_stages, arguments.virtual_stages, arguments.stage_weights or ()
        )
        return cls(ranks, tokens, pipeline, seq_length, cost_model, costs_of)

    def require_room(self, corpus: Corpus) -> None:
        """Refuse a longest sequence that fits on no number of ranks, as a run does at its start.

        Raises:
            ValueError: says what would make it fit.
        """
        self._figures(np.array([corpus.longest]))

    def estimate(self, mixture: Mixture, phase: PhaseSums) -> Estimate:
        """Plan some steps of a phase."""
        planned = [self._figures(mixture.step(one).lengths) for one in phase.samples]
        return Estimate(
            len(planned),
            float(np.mean([one.efficiency for one in planned])),
            float(np.mean([one.makespan_s for one in planned])),
        )

    def _figures(self, lengths: Int64Array) -> Figures:
        with told_as(_FLAGS):
            made = plan(
                lengths,
                ranks=self.ranks,
                tokens_per_rank=self.tokens_per_rank,
                max_length=self.seq_length,
                cost_model=self.cost_model,
                pipeline_stages=self.pipeline.stages,
                virtual_stages=self.pipeline.chunks,
                stage_weights=self.pipeline.weights or None,
            )
        pipeline = self.pipeline
        return figures(made, self.cost_model, pipeline.stages, pipeline.chunks, pipeline.weights)


def _require_unused(arguments: argparse.Namespace) -> None:
    """Refuse what would say nothing."""
    given = {
        "--model": arguments.model,
        "--cost-model": arguments.cost_model,
        "--ranks-per-node": arguments.ranks_per_node,
        "--rank-speeds": arguments.rank_speeds,
        "--pipeline-stages": arguments.pipeline_stages != 1,
        "--virtual-stages": arguments.virtual_stages != 1,
        "--stage-weights": arguments.stage_weights,
    }
    if found := [flag for flag, value in given.items() if value]:
        raise ValueError(
            f"found {found[0]} without --ranks, expected --ranks N and --tokens-per-rank C beside "
            "it: add them, or leave it out"
        )
