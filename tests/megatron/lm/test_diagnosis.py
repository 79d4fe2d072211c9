"""The doctor lists the plugin's patches where there is a Megatron-LM, and says which do not fit."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_hdp.cli.main import main
from megatron_hdp.megatron.cpu import shim
from megatron_hdp.megatron.lm.diagnosis import check_patches
from megatron_hdp.megatron.lm.patches import PATCHES
from megatron_hdp.megatron.lm.releases import installed_release
from tests.support import fake_megatron_lm

ROOT = Path(__file__).parents[3]
DOCTOR = "import sys; from megatron_hdp.cli.main import main; sys.exit(main(['doctor', *{}]))"


def doctor(folder, *flags):
    path = os.pathsep.join([str(ROOT), str(folder), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-c", DOCTOR.format(list(flags))],
        env=os.environ | {"PYTHONPATH": path, "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.mark.skipif(
    importlib.util.find_spec("megatron.training") is not None,
    reason="this megatron-core brings megatron.training along: there is a Megatron-LM",
)
def test_without_a_checkout_it_says_where_to_start(capsys):
    assert check_patches() is None
    assert main(["doctor"]) == 0
    assert "no Megatron-LM here for `python -m megatron_hdp run`" in capsys.readouterr().out
    assert not shim.is_active()


@pytest.mark.parametrize(
    "changed, misfit",
    [
        ({}, {}),
        (
            {"initialize": "", "arguments": "def add_megatron_arguments(parser, more): ..."},
            {
                "add_megatron_arguments": "expected the parameters (parser), found (parser, more)",
                "validate_args": "expected it to exist, found no validate_args",
            },
        ),
    ],
    ids=["all-fit", "two-do-not"],
)
def test_every_patch_is_listed_with_its_reason(tmp_path, changed, misfit):
    done = doctor(fake_megatron_lm.write(tmp_path, **changed), "--json")
    assert done.returncode == 0, done.stderr  # our own command can train
    patches = json.loads(done.stdout)["patches"]
    assert [patch["target"] for patch in patches] == [
        patch.target for patch in PATCHES.of(installed_release())
    ]
    assert all(patch["why"] for patch in patches)
    problems = {patch["target"].split(":")[1]: patch["problem"] for patch in patches}
    for name, problem in problems.items():
        assert (problem is None) == (name not in misfit), (name, problem)
        assert misfit.get(name, "") in (problem or "")
