"""What to run where a compiled part of the package is not built, or not for this Python."""

import importlib.util
import sys
import sysconfig
from pathlib import Path


def advice(name: str, what: str, reason: ImportError) -> str:
    """Return what was found in the place of an extension, what was expected, and the remedy.

    Its name is one such as ``megatron_hdp.data._order``; ``what`` it is, in words.
    """
    *rooms, file = name.split(".")[1:]
    folder = Path(__file__).parent.joinpath(*rooms)
    expected = file + sysconfig.get_config_var("EXT_SUFFIX")
    if importlib.util.find_spec(name) is not None:
        found = f"one that does not load ({reason})"
    elif others := sorted(path.name for path in folder.glob(f"{file}.*.*")):
        found = f"only {', '.join(others)}, of another Python"
    else:
        found = "none"
    source = Path(__file__).parents[1]
    install = (
        f"-e {source}" if (source / "setup.py").is_file() else "--force-reinstall megatron-hdp"
    )
    return (
        f"megatron_hdp needs its compiled {what}: found {found}, expected {folder / expected}. "
        f"Build it with a C++17 compiler: {sys.executable} -m pip install {install}"
    )
