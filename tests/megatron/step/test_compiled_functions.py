"""Whatever runs the steps, our own command or a checkout, compiled functions have room before."""

import torch

from megatron_hdp.megatron import parallel
from megatron_hdp.megatron.model import building
from megatron_hdp.megatron.step import setup
from megatron_hdp.runtime.compilation import MAX_VARIANTS
from megatron_hdp.runtime.timeline import Timeline
from tests.support.gradients import VOCABULARY, tiny_arguments, write_corpus


def limits_of_a_run(arguments):
    """PyTorch's limit of variants before the executor is built and after."""
    parallel.initialise(arguments)
    gpt = building.build_gpt(arguments, VOCABULARY)
    before = torch._dynamo.config.recompile_limit
    setup.build_executor(arguments, [gpt], Timeline())
    return before, torch._dynamo.config.recompile_limit


def test_compiled_functions_have_room_for_their_variants(run_ranks, tmp_path):
    arguments = tiny_arguments(write_corpus(tmp_path, [64]))
    before, after = run_ranks(1, limits_of_a_run, arguments)[0]
    assert before < after == MAX_VARIANTS
