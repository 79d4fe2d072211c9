"""A package whose order of the data is not compiled says what to run."""

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "megatron_hdp"
FILE = "_order" + sysconfig.get_config_var("EXT_SUFFIX")


def test_it_says_what_is_there_and_what_to_run(tmp_path):
    without = shutil.ignore_patterns("_order.*.so", "_order.*.pyd")
    shutil.copytree(PACKAGE, tmp_path / "megatron_hdp", ignore=without)
    (tmp_path / "setup.py").touch()
    place = tmp_path / "megatron_hdp" / "data" / FILE
    other = place.with_name("_order.cpython-399-there.so")
    for there, content, found in (
        (None, b"", "none"),
        (other, b"", f"only {other.name}, of another Python"),
        (place, b"no machine code", "one that does not load ("),
    ):
        if there is not None:
            there.write_bytes(content)
        done = subprocess.run(
            [sys.executable, "-c", "import megatron_hdp.data"],
            cwd=tmp_path,
            env={"PATH": ""},
            capture_output=True,
            text=True,
        )
        line = done.stderr.splitlines()[-1]
        expected = "ImportError: megatron_hdp needs its compiled order of the data: found"
        assert line.startswith(f"{expected} {found}")
        assert f"expected {place}" in line
        assert line.endswith(f"{sys.executable} -m pip install -e {tmp_path}")
        assert "circular" not in done.stderr
