"""Adds HDP to a stock Megatron-LM checkout, and removes it again.

Without ``--hybrid-data-parallel`` an active plugin adds flags and changes nothing else.
"""

import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class PluginError(ValueError):
    """The plugin cannot be activated: no script, no Megatron-LM, or an unknown release."""


def activate() -> None:
    """Adds ``--hybrid-data-parallel`` to the Megatron-LM that Python finds.

    A second call does nothing. On a machine without a GPU Megatron runs on the CPU. If the
    process's arguments have the flag, it first sets what CUDA and PyTorch's allocator read.

    Raises:
        PluginError: Megatron-LM is not found, or is a release that the plugin does not support; or
            a setting of CUDA's is wrong. Nothing is changed.
    """
    from megatron_hdp.runtime import cuda  # sets what must be set before torch is imported

    try:
        _print(cuda.prepare(cuda.run_of(sys.argv[1:])))
    except ValueError as error:
        raise PluginError(str(error)) from error
    from megatron_hdp.megatron.lm import patches
    from megatron_hdp.megatron.lm.patching import PatchError

    try:
        note = patches.activate(_make_outputs)
    except PatchError as error:
        raise PluginError(str(error)) from error
    _print([note] if note else [])


def deactivate() -> None:
    """Puts back what `activate` replaced; does nothing when nothing is.

    Raises:
        RuntimeError: somebody replaced the same functions later.
    """
    from megatron_hdp.megatron.lm import patches

    patches.deactivate()


def run(script: str, arguments: Sequence[str]) -> None:
    """Activates the plugin and runs a script of Megatron-LM as ``python script arguments`` would.

    Raises:
        PluginError: there is no such script, or see `activate`.
    """
    path = Path(script)
    if not path.is_file():
        raise PluginError(
            f"{script}: no such file, expected the pretrain_gpt.py of a Megatron-LM checkout: give "
            "its path, or run in its folder"
        )
    sys.argv = [script, *arguments]
    sys.path.insert(0, os.path.dirname(path.resolve()))
    activate()
    runpy.run_path(script, run_name="__main__")


def _print(lines: Sequence[str]) -> None:
    """Prints on the first rank."""
    for line in lines if os.environ.get("RANK", "0") == "0" else ():
        print(f"megatron_hdp: {line}", flush=True)


def _make_outputs(arguments: Any) -> Any:
    """What a run writes besides Megatron's logs."""
    from megatron_hdp.training.step_outputs import RunOutputs

    return RunOutputs(arguments)
