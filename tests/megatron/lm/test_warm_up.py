"""Megatron's warm-up of its fused functions: under HDP no activation of a whole context is made.

``python -m tests.megatron.lm.test_warm_up`` prints the elements of the largest tensors that it
makes in the checkout that PYTHONPATH names, without HDP and with it.
"""

import json
from types import SimpleNamespace

import pytest
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_hdp.megatron.cpu import shim
from megatron_hdp.megatron.lm.patches import PATCHES
from megatron_hdp.megatron.lm.patching import PatchSet
from megatron_hdp.megatron.lm.releases import TESTED, installed_version
from tests.megatron.lm.runs import CHECKOUT
from tests.support import fake_megatron_lm
from tests.support.largest_tensor import LargestTensor
from tests.support.processes import run_python

TOKENS, FFN, HIDDEN = 2 * 2**20, 11008, 4096
ARGS = {
    "bf16": True,
    "fp16": False,
    "swiglu": True,
    "sequence_parallel": False,
    "seq_length": TOKENS,
    "context_parallel_size": 1,
    "tensor_model_parallel_size": 1,
    "micro_batch_size": 1,
    "ffn_hidden_size": FFN,
    "hidden_size": HIDDEN,
}


def largest_of_warm_up(hybrid_data_parallel):
    """Elements of the largest tensor that ``pretrain()``'s warm-up makes, the patch applied."""
    from megatron.training import global_vars, initialize

    (record,) = (one for one in PATCHES.patches if one.name == "_warmup_jit_function")
    patches = PatchSet([record], TESTED)
    global_vars._GLOBAL_ARGS = SimpleNamespace(hybrid_data_parallel=hybrid_data_parallel, **ARGS)
    patches.apply(installed_version())
    try:
        with FakeTensorMode(), LargestTensor() as largest:
            initialize.set_jit_fusion_options()
    finally:
        patches.revert()
        global_vars._GLOBAL_ARGS = None
    return largest.elements


def found_in(folder):
    """What this module prints of the Megatron-LM in a folder."""
    done = run_python("-m", __name__, path=[folder], TORCHDYNAMO_DISABLE="1")
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_a_long_context_makes_no_activations_before_the_first_step(tmp_path):
    assert found_in(fake_megatron_lm.write(tmp_path)) == [TOKENS * FFN, 0]


@pytest.mark.slow
@pytest.mark.megatron_lm
@pytest.mark.skipif(not CHECKOUT, reason="set MEGATRON_LM_PATH to a Megatron-LM checkout")
def test_nor_does_it_in_a_checkout():
    assert found_in(CHECKOUT) == [TOKENS * FFN, 0]


if __name__ == "__main__":
    shim.apply()
    print(json.dumps([largest_of_warm_up(False), largest_of_warm_up(True)]))
