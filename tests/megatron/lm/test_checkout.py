"""The doctor lists the plugin's patches where there is a Megatron-LM, and says which do not fit."""

import importlib.util
import json
import sys
from dataclasses import replace

import pytest

from megatron_hdp.cli.main import main
from megatron_hdp.megatron.cpu import shim
from megatron_hdp.megatron.doctor.doctor import _megatron_lm_lines
from megatron_hdp.megatron.doctor.surroundings import Checkout, current_folder_first, find_checkout
from megatron_hdp.megatron.lm.patches import PATCHES, check_patches
from megatron_hdp.megatron.lm.releases import installed_version
from tests.support import fake_megatron_lm
from tests.support.processes import run_script

DOCTOR = """
import os, sys
from megatron_hdp.cli.main import main
os.chdir({!r})
sys.exit(main(["doctor", *sys.argv[1:]]))
"""


def doctor(folder, script, *flags):
    """The command as its console script runs it: in `folder`, which Python does not look into."""
    script.mkdir()
    (script / "doctor.py").write_text(DOCTOR.format(str(folder)))
    return run_script(script / "doctor.py", *flags)


@pytest.mark.skipif(
    importlib.util.find_spec("megatron.training") is not None,
    reason="this megatron-core brings megatron.training along: there is a Megatron-LM",
)
def test_without_a_checkout_it_says_where_to_start(capsys):
    assert check_patches() is None
    assert main(["doctor"]) == 0
    assert "no Megatron-LM here for `python -m megatron_hdp run`" in capsys.readouterr().out
    assert not shim.is_active()


def test_every_patch_is_listed_with_its_reason_and_what_does_not_fit(tmp_path):
    changed = {
        "initialize": "",
        "arguments": "def add_megatron_arguments(parser, more): ...",
    }
    misfit = {
        "add_megatron_arguments": "expected the parameters (parser), found (parser, more)",
        "validate_args": "expected it to exist, found no validate_args",
        "_warmup_jit_function": "expected it to exist, found no _warmup_jit_function",
        "_initialize_distributed": "expected it to exist, found no _initialize_distributed",
    }
    checkout = fake_megatron_lm.write(tmp_path / "checkout", **changed)
    done = doctor(checkout, tmp_path / "script", "--json")
    assert done.returncode == 0, done.stderr  # our own command can train
    found = json.loads(done.stdout)
    release = installed_version()
    assert found["megatron_lm"] == {"folder": str(checkout), "release": release, "is_current": True}
    patches = found["patches"]
    assert [patch["target"] for patch in patches] == [
        patch.target for patch in PATCHES.of(installed_version())
    ]
    assert all(patch["why"] for patch in patches)
    problems = {patch["target"].split(":")[1]: patch["problem"] for patch in patches}
    for name, problem in problems.items():
        assert (problem is None) == (name not in misfit), (name, problem)
        assert misfit.get(name, "") in (problem or "")


def test_the_current_folder_goes_before_pythons_path(tmp_path, monkeypatch):
    here, other = (fake_megatron_lm.write(tmp_path / name) for name in ("here", "other"))
    monkeypatch.delitem(sys.modules, "megatron.training", raising=False)
    monkeypatch.syspath_prepend(str(other))
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    assert found_by_doctor() == Checkout(str(other), installed_version(), is_current=False)
    monkeypatch.chdir(here)
    assert found_by_doctor() == Checkout(str(here), installed_version(), is_current=True)
    assert sys.path == before


def found_by_doctor():
    with current_folder_first():
        return find_checkout()


def test_the_text_says_which_one_and_who_finds_it():
    there = Checkout("/lm", "0.19.1", is_current=True)
    text = "\n".join(_megatron_lm_lines(there, ()))
    assert "/lm (0.19.1)\n" in text and "the current folder" in text
    text = "\n".join(_megatron_lm_lines(replace(there, is_current=False), ()))
    assert "on Python's path" in text
