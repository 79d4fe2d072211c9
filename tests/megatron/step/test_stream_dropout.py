"""Dropout in a stream: backward computes each part again with the masks of its forward."""

from dataclasses import replace

import pytest

from megatron_hdp.megatron import parallel
from megatron_hdp.megatron.execution import parts
from tests.megatron.step.test_stream_sums import PARTS, TOKENS, streamed
from tests.support.gradients import hdp_steps_of, tiny_arguments, write_corpus


def losses_of_parts(arguments):
    """Each part's loss in forward, and in backward, with and without dropout."""
    parallel.initialise(arguments)
    found = []
    with pytest.MonkeyPatch.context() as patch:
        output_of = parts._Run._output_of

        def noted(run, part, step):
            output, num_tokens = output_of(run, part, step)
            found[-1].append(float(output.detach()))
            return output, num_tokens

        patch.setattr(parts._Run, "_output_of", noted)
        for share in (0.3, 0.0):
            found.append([])
            list(hdp_steps_of(replace(arguments, hidden_dropout=share), [streamed(PARTS, 0.5)]))
    return found


def test_parts_are_computed_again_with_their_masks(run_ranks, tmp_path):
    arguments = tiny_arguments(
        write_corpus(tmp_path, [TOKENS]),
        hdp_tokens_per_rank=TOKENS,
        hdp_long_sequence="stream",
        hdp_offload="auto",
        global_batch_size=1,
        **dict.fromkeys(("seq_length", "max_position_embeddings"), TOKENS),
    )
    dropped, whole = run_ranks(1, losses_of_parts, arguments)[0]
    for losses in (dropped, whole):
        assert len(losses) == 2 * PARTS and losses[PARTS:] == losses[PARTS - 1 :: -1]
    assert not set(dropped) & set(whole)
