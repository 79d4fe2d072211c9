"""The compiled planner, `_core`: everything gets it here, or learns what to run to have it."""

import importlib.util
import sys
import sysconfig
from pathlib import Path

__all__ = ["_core"]

_NAME = "megatron_hdp.planner._core"


def _advice(reason: ImportError) -> str:
    """What was found in the place of the extension, what was expected, and the remedy."""
    folder = Path(__file__).parent
    expected = "_core" + sysconfig.get_config_var("EXT_SUFFIX")
    if importlib.util.find_spec(_NAME) is not None:
        found = f"one that does not load ({reason})"
    elif others := sorted(path.name for path in folder.glob("_core.*.*")):
        found = f"only {', '.join(others)}, of another Python"
    else:
        found = "none"
    source = folder.parents[1]
    what = f"-e {source}" if (source / "setup.py").is_file() else "--force-reinstall megatron-hdp"
    return (
        f"megatron_hdp needs its compiled planner: found {found}, expected {folder / expected}. "
        f"Build it with a C++17 compiler: {sys.executable} -m pip install {what}"
    )


try:
    from megatron_hdp.planner import _core
except ImportError as error:
    raise ImportError(_advice(error)) from None
