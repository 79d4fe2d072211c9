"""A package whose planner is not compiled says what to run."""

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "megatron_hdp"
FILE = "_core" + sysconfig.get_config_var("EXT_SUFFIX")


@pytest.fixture(scope="module")
def source_tree(tmp_path_factory):
    """The package without its extension."""
    root = tmp_path_factory.mktemp("source")
    shutil.copytree(PACKAGE, root / "megatron_hdp", ignore=shutil.ignore_patterns("*.so", "*.pyd"))
    (root / "setup.py").touch()
    return root


def started(root, *words):
    return subprocess.run(
        [sys.executable, *words], cwd=root, env={"PATH": ""}, capture_output=True, text=True
    )


@pytest.mark.parametrize(
    ("there", "found"),
    [
        ({}, "none"),
        ({"_core.cpython-399-there.so": b""}, "only _core.cpython-399-there.so, of another Python"),
        ({FILE: b"no machine code"}, "one that does not load ("),
    ],
)
def test_it_says_what_is_there_and_what_to_run(source_tree, there, found):
    folder = source_tree / "megatron_hdp/planner"
    for name, content in there.items():
        (folder / name).write_bytes(content)
    try:
        done = started(source_tree, "-c", "import megatron_hdp.planner")
    finally:
        for name in there:
            (folder / name).unlink()
    line = done.stderr.splitlines()[-1]
    assert line.startswith(f"ImportError: megatron_hdp needs its compiled planner: found {found}")
    assert f"expected {folder / FILE}" in line
    assert line.endswith(f"{sys.executable} -m pip install -e {source_tree}")
    assert "circular" not in done.stderr


def test_a_command_says_so_in_one_line(source_tree):
    words = ("plan", "--lengths", "preset:github", "--ranks", "2", "--tokens-per-rank", "1024")
    done = started(source_tree, "-m", "megatron_hdp.cli.main", *words)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("megatron-hdp plan: error: megatron_hdp needs its compiled plan")
