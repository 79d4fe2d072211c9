"""Warnings that megatron-core gives in every run are left out; all others are shown."""

import warnings

import megatron.core.models.backends
import megatron.core.optimizer
import megatron.core.transformer.transformer_config
import pytest

from megatron_hdp.megatron import known_warnings
from tests.support.processes import run_python

KNOWN = {
    megatron.core.optimizer: "Transformer Engine and Apex are not installed. Falling back to Torch",
    megatron.core.models.backends: "Apex is not installed. Falling back to Torch Norm",
    megatron.core.transformer.transformer_config: "full scope is deprecated. ",
}


def is_shown(text, module, category=UserWarning):
    with warnings.catch_warnings(record=True) as shown:
        warnings.resetwarnings()
        known_warnings.leave_out()
        warnings.warn_explicit(text, category, "file.py", 1, module=module)
    return bool(shown)


@pytest.mark.parametrize("module", KNOWN)
def test_they_are_what_megatron_says(module):
    with open(module.__file__) as file:
        assert KNOWN[module] in file.read()
    assert not is_shown(KNOWN[module] + " and more", module.__name__)


def test_others_are_shown():
    text = KNOWN[megatron.core.models.backends]
    assert is_shown("Apex is installed without its extensions", "megatron.core.optimizer")
    assert is_shown(text, "megatron_hdp.megatron.model.building")
    assert is_shown(text, "megatron.core.optimizer", DeprecationWarning)


_LOAD = """
import os, sys, torch
from pathlib import Path
from megatron_hdp.megatron import known_warnings
from tests.support.processes import run_python
if {quiet}:
    known_warnings.leave_out()
from megatron_hdp.megatron.cpu import shim
shim.apply()
from megatron.core.dist_checkpointing import ShardedTensor, load, save
dist = torch.distributed
where = Path({folder!r})
dist.init_process_group("gloo", init_method=f"file://{{where}}/store", rank=0, world_size=1)
(where / "saved").mkdir()
for work in (save, load):
    work({{"w": ShardedTensor.from_rank_offsets("w", torch.ones(4))}}, str(where / "saved"))
dist.all_gather_into_tensor(torch.ones(4), torch.ones(4))
dist.reduce_scatter_tensor(torch.ones(4), torch.ones(4))
print("loaded")
"""
DEPRECATED = [
    "`load_state_dict` is deprecated",
    "`torch.distributed.all_gather_into_tensor` is deprecated",
    "`torch.distributed.reduce_scatter_tensor` is deprecated",
]


@pytest.mark.slow
@pytest.mark.parametrize("quiet", [True, False])
def test_those_of_a_checkpoint_that_is_loaded(tmp_path, quiet):
    done = run_python("-c", _LOAD.format(quiet=quiet, folder=str(tmp_path)), PYTHONWARNINGS="")
    assert done.stdout == "loaded\n", done.stderr
    if quiet:
        assert "FutureWarning" not in done.stderr
    else:
        assert all(text in done.stderr for text in DEPRECATED), done.stderr


def test_others_of_a_checkpoint_are_shown():
    text = f"{DEPRECATED[0]} and will be removed"
    torchs, megatrons = "torch.distributed.checkpoint.api", "megatron.core.dist_checkpointing"
    assert not is_shown(text, megatrons, FutureWarning)
    assert is_shown(text, torchs, FutureWarning) and is_shown(text, megatrons)
    assert is_shown("Please use DTensor", torchs, FutureWarning)


_COMMAND = """
import sys, warnings
from megatron_hdp import pretrain_gpt
class Finder:
    def find_spec(name, path=None, target=None):
        if name.split(".")[0] in ("torch", "megatron"):
            warnings.warn_explicit({text!r}, UserWarning, "file.py", 1, module={module!r})
            sys.exit(f"at import {{name}}")
sys.meta_path.insert(0, Finder)
pretrain_gpt.main({flags!r}.split())
"""


@pytest.mark.parametrize(("python", "shown"), [([], 0), (["-W", "always"], 1)])
def test_the_command_leaves_them_out_before_it_imports_megatron(python, shown):
    flags = (
        "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --train-iters 1 "
        "--lr 1 --data-path nowhere --global-batch-size 1"
    )
    module = megatron.core.models.backends
    code = _COMMAND.format(text=KNOWN[module], module=module.__name__, flags=flags)
    done = run_python(*python, "-c", code, PYTHONWARNINGS="")
    assert "at import" in done.stderr, done.stderr
    assert done.stderr.count("UserWarning: Apex is not installed") == shown, done.stderr
