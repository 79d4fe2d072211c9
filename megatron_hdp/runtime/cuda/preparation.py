"""Sets what a run wants where the user has set nothing, and says what it leaves alone, and why."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, MutableMapping
from typing import Any

from megatron_hdp.runtime.cuda import allocator
from megatron_hdp.runtime.cuda.device import EAGER, Capability, Run, Setting, loading_mode
from megatron_hdp.runtime.cuda.start import Connections, ModuleLoading


def prepare(run: Run, environment: MutableMapping[str, str] = os.environ) -> list[str]:
    """Sets the variables that are not set; call it before anything touches CUDA.

    Where PyTorch is imported already, as in scripts that import it before they call the plugin, its
    allocator is told directly. Where CUDA has started, what it has read cannot be changed.

    Args:
        run: what is known of it.
        environment: of this process.

    Returns:
        A line for each setting that is not what the run wants.

    Raises:
        ValueError: a variable is set to what CUDA does not take.
    """
    lines = []
    mode = loading_mode() if run.capability is not None else None
    for setting in (Connections, ModuleLoading):
        want, name = setting.wanted(run), setting.variable
        if want is None:
            continue
        if name in environment:
            lines.append(setting.doubt(want, environment))
        elif mode is None:
            environment[name] = want.value
        elif not (setting is ModuleLoading and mode == EAGER):
            lines.append(_too_late(name, want))
    lines.append(_prepare_allocator(run, environment))
    return [line for line in lines if line is not None]


def describe(
    capability: Capability | None, environment: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """For people: what a run under HDP will do on this machine, a line for each setting.

    Args:
        capability: of this machine's GPUs; None where there is none.
        environment: of this process.
    """
    labels = ("CUDA connections", "CUDA modules", "CUDA allocator")
    if capability is None:
        return dict.fromkeys(labels, "no matter without a GPU")
    run = Run(capability=capability, hybrid_data_parallel=True)
    lines = []
    for setting in (Connections, ModuleLoading):
        want = setting.wanted(run)
        assert want is not None
        lines.append(_words(environment.get(setting.variable), setting.values(run), want.why))
    want, name = allocator.wanted(run), allocator.found_in(environment)
    assert want is not None
    obstacle = allocator.obstacle(run, environment)
    if name is None and obstacle is not None:
        lines.append(f"{want.value} is left out: {obstacle}")
    else:
        found = None if name is None else environment[name]
        lines.append(_words(found, f"{want.value} with HDP", want.why))
    return dict(zip(labels, lines, strict=True))


def _words(found: str | None, wants: str, why: str) -> str:
    if found is None:
        return f"not set: a run sets {wants}: {why}"
    return f"{found} is set and kept; a run would set {wants}: {why}"


def _prepare_allocator(run: Run, environment: MutableMapping[str, str]) -> str | None:
    want = allocator.wanted(run)
    if want is None:
        return None
    if allocator.found_in(environment) is not None:
        return allocator.doubt(want, environment)
    obstacle = allocator.obstacle(run, environment)
    if obstacle is not None:
        return f"{want.value} is left out, and fragments may cost memory: {obstacle}"
    environment[allocator.VARIABLE] = want.value
    torch = sys.modules.get("torch")
    if torch is not None:
        _tell(torch, want.value)
    return None


def _tell(torch: Any, settings: str) -> None:
    """PyTorch reads the variable when it is imported; afterwards its allocator can be told."""
    tell = getattr(torch._C, "_accelerator_setAllocatorSettings", None)  # from 2.9 on
    (tell or torch.cuda.memory._set_allocator_settings)(settings)


def _too_late(name: str, want: Setting) -> str:
    return (
        f"CUDA started before {name} could be set: export {name}={want.value}, or start with "
        f"`python -m megatron_hdp run`: {want.why}"
    )
