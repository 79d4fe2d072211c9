"""The plugin's switch, and a check of its patches that changes nothing."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any

from megatron_hdp.megatron.cpu import shim as cpu_shim
from megatron_hdp.megatron.lm import replacements
from megatron_hdp.megatron.lm.patching import PatchSet
from megatron_hdp.megatron.lm.releases import TESTED, installed_version


def activate(make_outputs: Any) -> str | None:
    """Puts all patches in; on a machine without a GPU the CPU shim too. A second call does nothing.

    `make_outputs` makes what a run writes besides Megatron's logs, see `LmRun`. Returns a note if
    this version of Megatron was not tested.

    Raises:
        PatchError: Megatron-LM is not found, or not as expected; nothing is changed.
    """
    if PATCHES.is_applied:
        return None
    replacements.make_outputs = make_outputs
    shim = cpu_shim.needed() and not cpu_shim.is_active()
    if shim:
        cpu_shim.apply()  # before Megatron's training modules are imported
    try:
        return PATCHES.apply(installed_version())
    except BaseException:
        if shim:
            cpu_shim.revert()
        raise


def deactivate() -> None:
    """Takes all out again; does nothing when nothing is in.

    Raises:
        PatchError: somebody patched the same functions later.
    """
    if PATCHES.is_applied:
        from megatron_hdp.megatron.cpu import gpu_gaps

        PATCHES.revert()
        cpu_shim.revert()
        gpu_gaps.revert()


@dataclass(frozen=True)
class PatchCheck:
    """A patch of the plugin, and what keeps it from being applied (None: it fits)."""

    target: str
    why: str
    problem: str | None


def check_patches() -> tuple[PatchCheck, ...] | None:
    """Compares every patch with the Megatron-LM that Python finds, and applies none.

    Returns:
        None if there is no ``megatron.training``.
    """
    if importlib.util.find_spec("megatron.training") is None:
        return None
    shim = cpu_shim.needed() and not cpu_shim.is_active()
    if shim:
        cpu_shim.apply()  # without a GPU Megatron's training modules import under it only
    try:
        version = installed_version()
        patches = PATCHES.of(version) or PATCHES.patches
        whole = PATCHES.problem_of_all(version)
        return tuple(PatchCheck(p.target, p.why, whole or p.problem(version)) for p in patches)
    finally:
        if shim:
            cpu_shim.revert()


PATCHES = PatchSet(replacements.PATCHES, TESTED)
