"""Whether the plugin fits the Megatron-LM that Python finds: each patch, why, and what is wrong."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

from megatron_hdp.megatron.cpu import shim as cpu_shim
from megatron_hdp.megatron.lm.patches import PATCHES
from megatron_hdp.megatron.lm.releases import installed_version


@dataclass(frozen=True)
class PatchCheck:
    """A patch of the plugin, and what keeps it from being applied (None: it fits)."""

    target: str
    why: str
    problem: str | None


def check_patches() -> tuple[PatchCheck, ...] | None:
    """Compares every patch with the Megatron-LM that is found, and applies none.

    Returns:
        None if there is no ``megatron.training``.
    """
    if importlib.util.find_spec("megatron.training") is None:
        return None
    shim = cpu_shim.needed() and not cpu_shim.is_active()
    if shim:
        cpu_shim.apply()  # without a GPU Megatron's training modules import under it only
    try:
        return _compare(installed_version())
    finally:
        if shim:
            cpu_shim.revert()


def _compare(version: str) -> tuple[PatchCheck, ...]:
    patches = PATCHES.of(version) or PATCHES.patches
    whole = PATCHES.problem_of_all(version)
    return tuple(PatchCheck(p.target, p.why, whole or p.problem(version)) for p in patches)
