"""A package whose C++ parts are not compiled says what to run."""

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "megatron_hdp"
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
PARTS = {
    "planner": ("_core", "planner"),
    "data": ("_order", "order of the data"),
    "media": ("_items", "planner of items"),
}


@pytest.fixture(scope="module")
def source_tree(tmp_path_factory):
    """The package without the extension of a room."""

    def made(stem):
        root = tmp_path_factory.mktemp("source")
        without = shutil.ignore_patterns(f"{stem}.*.so", f"{stem}.*.pyd")
        shutil.copytree(PACKAGE, root / "megatron_hdp", ignore=without)
        (root / "setup.py").touch()
        return root

    return made


def started(root, *words):
    return subprocess.run(
        [sys.executable, *words], cwd=root, env={"PATH": ""}, capture_output=True, text=True
    )


@pytest.mark.parametrize("room", PARTS)
def test_it_says_what_is_there_and_what_to_run(source_tree, room):
    stem, name = PARTS[room]
    root = source_tree(stem)
    place = root / "megatron_hdp" / room / f"{stem}{SUFFIX}"
    other = place.with_name(f"{stem}.cpython-399-there.so")
    for there, content, found in (
        (None, b"", "none"),
        (other, b"", f"only {other.name}, of another Python"),
        (place, b"no machine code", "one that does not load ("),
    ):
        if there is not None:
            there.write_bytes(content)
        done = started(root, "-c", f"import megatron_hdp.{room}")
        line = done.stderr.splitlines()[-1]
        expected = f"ImportError: megatron_hdp needs its compiled {name}: found"
        assert line.startswith(f"{expected} {found}")
        assert f"expected {place}" in line
        assert line.endswith(f"{sys.executable} -m pip install -e {root}")
        assert "circular" not in done.stderr


def test_a_command_says_so_in_one_line(source_tree):
    words = ("plan", "--lengths", "preset:github", "--ranks", "2", "--tokens-per-rank", "1024")
    done = started(source_tree("_core"), "-m", "megatron_hdp.cli.main", *words)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("megatron-hdp plan: error: megatron_hdp needs its compiled plan")
