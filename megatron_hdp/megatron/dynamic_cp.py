"""The planner as the scheduler of Megatron-LM's dynamic context parallelism.

Megatron-LM's dev branch, and what builds on it, asks a scheduler which ranks run which sequences
and runs them by its own kernels. `install` puts ours in the place of its own; nothing else of this
package runs then.

Example::

    from megatron_hdp.megatron.dynamic_cp import install

    install()  # before the training script asks for its data
"""

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megatron_hdp.planner import LLAMA_7B, CostModel, Plan, plan
from megatron_hdp.planner.problem import told_as

SampleLengths = Sequence[tuple[int, int]]
"""Of each sample its id and its tokens."""

_NAMES = {"tokens_per_rank": "max_seqlen_per_dp_cp_rank"}


class RoundScheduler:
    """Deals the samples of a global batch over rounds, strategy *round-balance*.

    The arguments are those of Megatron-LM's ``DefaultDynamicCPScheduler``, in its order, but for
    the last.

    Args:
        max_seqlen_per_dp_cp_rank: tokens that a rank can hold in one micro-batch.
        cp_size: context-parallel size of the fixed mesh.
        dp_size: data-parallel size of the fixed mesh; both together are the ranks.
        microbatch_group_size_per_vp_stage: with virtual stages, what the number of rounds must be
            a multiple of.
        max_num_seqs: of a micro-batch; not supported, as in Megatron-LM's.
        min_cp_size: the least ranks of a group.
        cost_model: of one rank, or where it stands as JSON; LLaMA-7B at 400 TFLOP/s if not given.
            Only how attention, the rest and traffic compare counts.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        max_seqlen_per_dp_cp_rank: int,
        cp_size: int,
        dp_size: int,
        microbatch_group_size_per_vp_stage: int | None = None,
        max_num_seqs: int | None = None,
        *,
        min_cp_size: int = 1,
        cost_model: CostModel | str | os.PathLike[str] | None = None,
    ) -> None:
        ranks = cp_size * dp_size
        if max_num_seqs is not None:
            raise ValueError(
                f"max_num_seqs is {max_num_seqs}; expected None: round-balance does not limit the "
                "sequences of a micro-batch"
            )
        if min_cp_size < 1 or min_cp_size & (min_cp_size - 1) or ranks % min_cp_size:
            raise ValueError(
                f"min_cp_size is {min_cp_size} on {ranks} ranks; expected a power of two that "
                "divides them"
            )
        if cost_model is None:
            cost_model = LLAMA_7B
        elif not isinstance(cost_model, CostModel):
            cost_model = CostModel.from_json(cost_model)
        self._least = min_cp_size
        self._ranks = ranks // min_cp_size
        self._capacity = max_seqlen_per_dp_cp_rank * min_cp_size
        self._group = microbatch_group_size_per_vp_stage or 1
        self._cost_model = _of_several(cost_model, min_cp_size)

    def plan(self, lengths: Sequence[int]) -> Plan:
        """The plan of samples of these lengths; its ranks stand for `min_cp_size` each."""
        with told_as(_NAMES):
            return plan(
                lengths,
                strategy="round-balance",
                ranks=self._ranks,
                tokens_per_rank=self._capacity,
                cost_model=self._cost_model,
                pipeline_stages=self._group,  # rounds are a multiple of it with virtual stages
                virtual_stages=2 if self._group > 1 else 1,
            )

    def get_groups_and_subsamples(self, sample_id_seqlens: SampleLengths) -> list[list[list[int]]]:
        """Which samples each rank runs in each round; ranks with the same ones are a group.

        Args:
            sample_id_seqlens: id and tokens of each sample, at least one.

        Returns:
            ``[round][rank]``: ids of samples, at least one. Groups are aligned powers of two of
            ranks, and every sample stands in one round.

        Raises:
            ValueError: a sample does not fit on the greatest power of two of the ranks, or there
                are too few samples for that.
        """
        ids, lengths = zip(*sample_id_seqlens, strict=True)
        made = self.plan(lengths)
        rounds: list[list[list[int]]] = []
        done = [0] * self._ranks
        for number in range(made.num_micro_batches):
            micro_batch = made.micro_batch(number)
            samples = [ids[sequence] for sequence in micro_batch.sequences]
            for rank in micro_batch.ranks:
                if done[rank] == len(rounds):
                    rounds.append([[] for _ in range(self._ranks * self._least)])
                begin = rank * self._least
                for one in range(begin, begin + self._least):
                    rounds[done[rank]][one] = list(samples)
                done[rank] += 1
        if len(rounds) % self._group:
            raise ValueError(
                f"{len(lengths)} samples on {self._ranks * self._least} ranks make {len(rounds)} "
                f"rounds; expected a multiple of {self._group} (virtual stages): raise the global "
                "batch size"
            )
        return rounds


def install(cost_model: CostModel | str | os.PathLike[str] | None = None) -> None:
    """Puts `RoundScheduler` in the place of Megatron-LM's ``default_dynamic_cp``, in this process.

    What runs the rounds stays Megatron-LM's.

    Raises:
        RuntimeError: this Megatron-LM has no dynamic context parallelism.
    """
    from megatron.core.datasets import data_schedule

    theirs: Any = getattr(data_schedule, "DefaultDynamicCPScheduler", None)
    if theirs is None:
        raise RuntimeError(
            "megatron.core.datasets.data_schedule has no DefaultDynamicCPScheduler: expected "
            "Megatron-LM's dev branch, with --dynamic-context-parallel"
        )

    class HdpScheduler(theirs):
        """Runs like Megatron-LM's, schedules like ours."""

        def __init__(self, *mesh: Any, **options: Any) -> None:
            super().__init__(*mesh, **options)
            options["cost_model"] = cost_model
            self._rounds = RoundScheduler(*mesh, **options)

        def get_groups_and_subsamples(self, sample_id_seqlens: Any) -> list[list[list[int]]]:
            return self._rounds.get_groups_and_subsamples(sample_id_seqlens)

    data_schedule.DefaultDynamicCPScheduler = HdpScheduler
    known = getattr(data_schedule, "scheduler_map", {})
    if "default_dynamic_cp" in known:
        known["default_dynamic_cp"] = HdpScheduler


def _of_several(cost_model: CostModel, ranks: int) -> CostModel:
    """That of so many ranks that always run one micro-batch together."""
    return replace(
        cost_model,
        a=cost_model.a / ranks,
        b=cost_model.b / ranks,
        b_experts=cost_model.b_experts / ranks,
        attention_b=cost_model.attention_b / ranks,
        attention_points=tuple(
            (length, seconds / ranks) for length, seconds in cost_model.attention_points
        ),
        ranks_per_node=max(1, cost_model.ranks_per_node // ranks),
        rank_speeds=(),
    )
