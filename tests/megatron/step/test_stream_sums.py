"""What it changes to add up gradients of a stream's keys in the type of the model."""

from dataclasses import replace

import pytest
import torch

from megatron_hdp.megatron import parallel
from megatron_hdp.planner import Plan
from tests.support.gradients import hdp_steps_of, tiny_arguments, write_corpus

TOKENS, PARTS = 512, 16


def streamed(num_parts, ratio):
    """The plan of one sequence on one rank, whole or as a stream of some parts."""
    return Plan(
        num_ranks=1,
        tokens_per_rank=TOKENS,
        strategy="here",
        lengths=[TOKENS],
        rank_offsets=[0, 1],
        ranks=[0],
        sequence_offsets=[0, 1],
        sequences=[0],
        local_offsets=[0, 0],
        local_sequences=[],
        local_ranks=[],
        offload_ratios=[ratio],
        num_parts=[num_parts],
        streams=[num_parts > 1],
        summary={"makespan_s": 0.0, "efficiency": 1.0, "planning_ms": 0.0},
    )


def differences(arguments):
    """By the ratio on the host: of gradients with sums in bfloat16 from those in float32.

    And of the latter from gradients of the sequence as a whole, as shares of its norm.
    """
    parallel.initialise(arguments)

    def gradients(sums, num_parts, ratio):
        plan = streamed(num_parts, ratio)
        ((_, (chunk,)),) = hdp_steps_of(replace(arguments, hdp_stream_sums=sums), [plan])
        return torch.cat([one.main_grad.double().flatten() for one in chunk.parameters()])

    whole = gradients("float32", 1, 0.0)
    found = {}
    for ratio in (0.0, 0.5, 1.0):
        wide, narrow = (gradients(sums, PARTS, ratio) for sums in ("float32", "model"))
        found[ratio] = tuple(
            float((a - b).norm() / whole.norm()) for a, b in ((narrow, wide), (wide, whole))
        )
    return found


@pytest.mark.slow
def test_sums_in_bfloat16_change_gradients_less_than_parts_do(run_ranks, tmp_path):
    """Sixteen parts in bfloat16, keys on the device, half of them or all on the host."""
    arguments = tiny_arguments(
        write_corpus(tmp_path, [TOKENS]),
        fp64=False,
        bf16=True,
        num_layers=4,
        hdp_tokens_per_rank=TOKENS,
        hdp_long_sequence="stream",
        hdp_offload="auto",
        global_batch_size=1,
        **dict.fromkeys(("seq_length", "max_position_embeddings"), TOKENS),
    )
    found = run_ranks(1, differences, arguments)[0]
    for of_sums, of_parts in found.values():
        assert 0 < of_sums < min(0.01, of_parts / 4), found
