"""A function that measurements and tests run in each process of the data plane before all else."""

from __future__ import annotations

import importlib
import os

VARIABLE = "MEGATRON_HDP_DATA_PLANE_HOOK"
"""``module:function``, in the environment of the processes; without it nothing happens."""


def run_hook() -> None:
    """Call the function that `VARIABLE` names.

    Raises:
        ValueError: it is not ``module:function``.
    """
    text = os.environ.get(VARIABLE, "")
    if not text:
        return
    module, _, function = text.partition(":")
    if not module or not function:
        raise ValueError(f"{VARIABLE}: found {text!r}, expected module:function")
    getattr(importlib.import_module(module), function)()
