"""A micro-batch that is recomputed keeps the inputs of its layers, and others keep all."""

from dataclasses import replace

import pytest

from megatron_hdp.cli.checking import job_of
from megatron_hdp.data.steps import padding_micro_batch
from megatron_hdp.megatron import parallel
from megatron_hdp.megatron.model import building
from megatron_hdp.megatron.step import setup
from megatron_hdp.planner.memory import input_share
from megatron_hdp.runtime.timeline import Timeline
from tests.gradient_equivalence.settings import recomputing
from tests.megatron.step.test_offload import LiveMemory
from tests.support.gradients import VOCABULARY, tiny_arguments, write_corpus

TOKENS = 512


def held(arguments):
    """What a layer saves of a token, and the peaks of a recomputed micro-batch and one that is not.

    The latter runs behind the former, whose settings have gone.
    """
    parallel.initialise(arguments)
    gpt = building.build_gpt(arguments, VOCABULARY)
    executor = setup.build_executor(arguments, [gpt], Timeline())
    saved = executor.activation_bytes_per_token()
    there = [one for parameter in gpt.parameters() for one in (parameter, parameter.main_grad)]
    peaks = []
    for is_recomputed in (True, False):
        micro_batch = replace(padding_micro_batch(0, TOKENS), is_recomputed=is_recomputed)
        micro_batch.loss_mask[:] = True
        with LiveMemory(there) as memory:
            executor.run([micro_batch], TOKENS)
        peaks.append(memory.peak)
    return saved, peaks


@pytest.mark.parametrize(
    "kind",
    [pytest.param({}, marks=pytest.mark.slow), recomputing("core_attn")],
    ids=["plain", "selective"],
)
def test_it_frees_all_but_the_inputs_and_a_layer(run_ranks, tmp_path, kind):
    shape = {"num_layers": 8, "hidden_size": 64, "ffn_hidden_size": 160, "kv_channels": 16}
    shape |= dict.fromkeys(("seq_length", "max_position_embeddings"), TOKENS)
    arguments = tiny_arguments(write_corpus(tmp_path, [64]), **shape | kind)
    saved, (recomputed, whole) = run_ranks(1, held, arguments)[0]
    freed = (whole - recomputed) / TOKENS
    inputs = 8 * arguments.hidden_size
    assert freed == pytest.approx(7 * (saved - inputs), rel=0.06)
    # what plans count with is no less than what is held
    share = input_share(job_of(arguments, 1, VOCABULARY), 8) + 1 / 8
    assert (8 * saved - freed) / (8 * saved) <= share * 1.05
