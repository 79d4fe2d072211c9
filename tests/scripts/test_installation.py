"""The scripts' installation says what it does in a few lines; the rest is in a log."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "_env.sh"
# A Python whose pip says much, and fails on what the variable BREAKS names
FAKE_PYTHON = """#!/usr/bin/env bash
case "$*" in
    *"pip "*"--version") exit 0 ;;
    *"pip "*)
        seq 1 500
        if [[ -n ${{BREAKS:-}} && $* == *$BREAKS* ]]; then
            echo "no such thing: $BREAKS" >&2
            exit 1
        fi ;;
    *sys.prefix*) echo {prefix} ;;
    *"import megatron_hdp"*) [[ -n ${{LOADS:-}} ]] ;;
    *) exec {python} "$@" ;;
esac
"""


@pytest.fixture
def tree(tmp_path):
    """A source tree that can be installed, and a Python to install it into."""
    for name in ("scripts", "csrc", "prefix"):
        (tmp_path / name).mkdir()
    shutil.copy(SCRIPT, tmp_path / "scripts" / "_env.sh")
    for name in ("pyproject.toml", "setup.py"):
        (tmp_path / name).write_text("")
    python = tmp_path / "python"
    python.write_text(FAKE_PYTHON.format(prefix=tmp_path / "prefix", python=sys.executable))
    python.chmod(0o755)
    return tmp_path


def installed(tree, **environment):
    return subprocess.run(
        ["bash", "-c", "set -euo pipefail; source scripts/_env.sh; echo done"],
        env={"PATH": "/usr/bin:/bin", "PYTHON": str(tree / "python")} | environment,
        cwd=tree,
        capture_output=True,
        text=True,
        timeout=570,
    )


def test_pip_is_quiet_and_its_log_is_named(tree):
    result = installed(tree, LOADS="1")
    assert (result.returncode, result.stderr) == (0, "")
    first, *others = result.stdout.splitlines()
    assert first.startswith(f"installing into {tree}/prefix") and first.endswith(
        "build/install.log"
    )
    assert others == [
        "  tools that build it",
        "  megatron_hdp: its dependencies, its C++ parts",
        "done",
    ]
    log = (tree / "build" / "install.log").read_text()
    assert log.count("\n500\n") == 2 and "pip" in log.splitlines()[0]
    assert installed(tree, LOADS="1").stdout == "done\n"


def test_a_failure_shows_the_end_of_the_log_and_its_path(tree):
    result = installed(tree, LOADS="1", BREAKS="--no-build-isolation")
    assert result.returncode == 1 and "done" not in result.stdout
    *end, said, last = result.stderr.splitlines()
    assert said == "no such thing: --no-build-isolation" and end == [
        str(n) for n in range(482, 501)
    ]
    assert last == (
        "error: megatron_hdp: its dependencies, its C++ parts: the installation failed, see the "
        f"lines above; all of them are in {tree}/build/install.log"
    )
    assert "== " in (tree / "build" / "install.log").read_text()
    assert installed(tree, LOADS="1").stdout.startswith("installing into")  # it is tried again


def test_parts_that_do_not_load(tree):
    result = installed(tree)
    assert result.returncode == 1
    assert result.stderr.startswith("error: the C++ parts do not load after their installation")
    assert result.stderr.endswith(f"{tree}/build/install.log\n")
