"""The plugin goes in and out in any order of imports; refusals change nothing."""

import subprocess

import pytest

from megatron_hdp.megatron.lm.releases import installed_version, release_of
from tests.support import fake_megatron_lm
from tests.support.forked_python import forked_python
from tests.support.processes import run_python

MEGATRON_FIRST = """
import argparse, sys, types
import megatron.training.training as training, megatron.training.initialize as initialize
import megatron.training.arguments as arguments, megatron.core.pipeline_parallel as core
names = ("get_model", "build_train_valid_test_data_iterators", "get_forward_backward_func",
         "num_floating_point_operations", "training_log")
def state(): return [getattr(training, n) for n in names] + [
    arguments.add_megatron_arguments, arguments.validate_args, initialize.validate_args]
stock = state()
from megatron_hdp import plugin
assert state() == stock, "importing changed something"
plugin.deactivate()
plugin.activate(); once = state(); plugin.activate()
assert state() == once
assert all(now is not before for now, before in zip(once, stock))
assert initialize.validate_args is arguments.validate_args  # the copy by value too
assert core.get_forward_backward_func is stock[2]  # megatron.core keeps its own
parser = arguments.add_megatron_arguments(argparse.ArgumentParser())
text = parser.format_help()
assert "Hybrid data parallelism:" in text and "theirs:" in text and "--hdp-strategy" in text
import megatron.training.global_vars as global_vars
args = global_vars._ARGS = parser.parse_args([])  # the flag is absent
args.global_batch_size, args.attention_dropout, args.train_iters = 8, 0.1, 4
assert initialize.validate_args(args).validated
assert training.pretrain(None) == "trained"
assert training.get_model(lambda: "model") == ["model"]
assert training.save_checkpoint(3, None) == "saved"
assert training.load_checkpoint(None, None) == (3, 4)
assert training.build_train_valid_test_data_iterators(None) == (1, 2, 3)
assert training.num_floating_point_operations(args, 5) == 5
assert training.training_log(*range(11)) == 5
plugin.deactivate(); plugin.deactivate()
assert state() == stock
plugin.activate(); plugin.deactivate()
assert state() == stock
from megatron_hdp.megatron.cpu import shim
assert not shim.is_active()
print("fine")
"""
PLUGIN_FIRST = """
from megatron_hdp import plugin
plugin.activate()
from megatron.training.initialize import validate_args
from megatron.training.arguments import add_megatron_arguments
assert add_megatron_arguments.__wrapped__ and validate_args.__wrapped__
import megatron.training.training as training
theirs, training.get_model = training.get_model, None
try:
    plugin.deactivate()
except RuntimeError as error:
    assert "megatron.training.training.get_model changed after" in str(error), error
else:
    raise AssertionError("somebody else's patch was thrown away")
training.get_model = theirs
plugin.deactivate()
print("fine")
"""


@pytest.mark.slow  # in one process: tests/megatron/lm/test_patching.py
@pytest.mark.parametrize("code", [MEGATRON_FIRST, PLUGIN_FIRST], ids=["megatron", "plugin"])
def test_whichever_is_imported_first(tmp_path, code):
    done = run_python("-c", code, path=[fake_megatron_lm.write(tmp_path)])
    assert done.stdout.strip() == "fine", done.stderr


def test_a_script_runs_with_the_plugin_in_and_its_folder_on_the_path(tmp_path):
    fake_megatron_lm.write(tmp_path)
    (tmp_path / "neighbour.py").write_text("NAME = 'neighbour'")
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, neighbour, megatron.training.arguments as theirs\n"
        "print(__name__, sys.argv[1:], neighbour.NAME, theirs.validate_args.__module__)"
    )
    (tmp_path / "python").mkdir()
    with forked_python(tmp_path / "python") as python:
        command = [python, "-m", "megatron_hdp", "run", script, "--theirs", "4"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    expected = "__main__ ['--theirs', '4'] neighbour megatron.training.arguments"
    assert (done.returncode, done.stdout.strip()) == (0, expected), done.stderr


@pytest.mark.slow
def test_another_megatron_lm_is_refused_whole(tmp_path):
    changed = fake_megatron_lm.FILES["arguments.py"].replace("(args, defaults={})", "(args)")
    fake_megatron_lm.write(tmp_path, arguments=changed)
    (tmp_path / "script.py").write_text("raise AssertionError('the script ran')")
    done = run_python("-m", "megatron_hdp", "run", str(tmp_path / "script.py"))
    assert done.returncode == 2
    assert "megatron.training.arguments:validate_args: expected the parameters" in done.stderr
    assert "nothing was patched" in done.stderr and "Traceback" not in done.stderr


OTHER_VERSION = """
import megatron.core.package_info as info
from megatron_hdp.plugin import PluginError, activate
for version in ("0.99.0", "{}.99"):
    info.__version__ = version
    try:
        activate()
    except PluginError as error:
        print(error)
"""


@pytest.mark.slow
def test_a_version_that_was_not_tested_is_a_note(tmp_path):
    release = release_of(installed_version())
    done = run_python("-c", OTHER_VERSION.format(release), path=[fake_megatron_lm.write(tmp_path)])
    note = f"megatron_hdp: megatron-core {release}.99 was not tested, only {release}"
    assert note in done.stdout, done.stderr
    assert "found megatron-core 0.99.0, expected a version of 0.16" in done.stdout, done.stderr


def test_without_a_checkout_it_says_so(tmp_path):
    (tmp_path / "script.py").write_text("")
    missing = run_python("-m", "megatron_hdp", "run", str(tmp_path / "gone.py"))
    assert missing.returncode == 2 and "gone.py: no such file" in missing.stderr
    assert run_python("-m", "megatron_hdp").returncode == 2
