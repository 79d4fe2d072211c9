"""A function that measurements and tests run in each process of the data plane before all else."""

from __future__ import annotations

import importlib
import os

VARIABLE = "MEGATRON_HDP_DATA_PLANE_HOOK"
"""``module:function``, in the environment of the processes; without it nothing happens."""


def run_hook() -> None:
    """Call the function that `VARIABLE` names."""
    if text := os.environ.get(VARIABLE):
        module, function = text.split(":")
        getattr(importlib.import_module(module), function)()
