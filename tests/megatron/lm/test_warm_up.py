"""Megatron's warm-up of its fused functions: under HDP no activation of a whole context is made.

``python -m tests.megatron.lm.test_warm_up`` prints the elements of the largest tensors that it
makes in the checkout that PYTHONPATH names, without HDP and with it.
"""

import json
import os
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_hdp.megatron.cpu import shim
from megatron_hdp.megatron.lm.patches import PATCHES
from megatron_hdp.megatron.lm.patching import PatchSet
from megatron_hdp.megatron.lm.releases import RELEASES, WARM_UP, installed_release
from tests.megatron.lm.runs import CHECKOUT, ROOT
from tests.support.largest_tensor import LargestTensor

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
    patches = PatchSet([record], RELEASES)
    global_vars._GLOBAL_ARGS = SimpleNamespace(hybrid_data_parallel=hybrid_data_parallel, **ARGS)
    patches.apply(installed_release())
    try:
        with FakeTensorMode(), LargestTensor() as largest:
            initialize.set_jit_fusion_options()
    finally:
        patches.revert()
        global_vars._GLOBAL_ARGS = None
    return largest.elements


def stand_in(monkeypatch):
    """Modules of Megatron-LM as far as this patch sees them."""
    training = ModuleType("megatron.training")
    global_vars = ModuleType("megatron.training.global_vars")
    initialize = ModuleType("megatron.training.initialize")
    training.global_vars, training.initialize = global_vars, initialize
    global_vars._GLOBAL_ARGS = None

    def warm_up():
        args = global_vars._GLOBAL_ARGS
        torch.rand(args.seq_length // args.context_parallel_size, 1, args.ffn_hidden_size)

    takes_size = "tp_size" in WARM_UP[installed_release()]
    initialize._warmup_jit_function = (lambda tp_size=None: warm_up()) if takes_size else warm_up
    initialize.set_jit_fusion_options = lambda: initialize._warmup_jit_function()
    for module in (training, global_vars, initialize):
        monkeypatch.setitem(sys.modules, module.__name__, module)


def test_a_long_context_makes_no_activations_before_the_first_step(monkeypatch):
    stand_in(monkeypatch)
    assert largest_of_warm_up(hybrid_data_parallel=False) == TOKENS * FFN
    assert largest_of_warm_up(hybrid_data_parallel=True) == 0


@pytest.mark.megatron_lm
@pytest.mark.skipif(not CHECKOUT, reason="set MEGATRON_LM_PATH to a Megatron-LM checkout")
def test_nor_does_a_checkout():
    done = subprocess.run(
        [sys.executable, "-m", __name__],
        cwd=ROOT,
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join([CHECKOUT, str(ROOT)]), "TORCHDYNAMO_DISABLE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == [TOKENS * FFN, 0]


if __name__ == "__main__":
    shim.apply()
    print(json.dumps([largest_of_warm_up(False), largest_of_warm_up(True)]))
