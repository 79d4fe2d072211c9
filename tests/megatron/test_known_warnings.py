"""Warnings that megatron-core gives in every run are left out; all others are shown."""

import subprocess
import sys
import warnings

import megatron.core.models.backends
import megatron.core.optimizer
import megatron.core.transformer.transformer_config
import pytest

from megatron_hdp.megatron import known_warnings

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
    assert is_shown(text, "megatron_hdp.megatron.model.norm")
    assert is_shown(text, "megatron.core.optimizer", DeprecationWarning)


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
    done = subprocess.run(
        [sys.executable, *python, "-c", code],
        env={"PYTHONPATH": ":".join(p for p in sys.path if p), "PATH": ""},
        capture_output=True,
        text=True,
    )
    assert "at import" in done.stderr, done.stderr
    assert done.stderr.count("UserWarning: Apex is not installed") == shown, done.stderr
