"""Sets what a run wants where the user has set nothing, and says what else it does, and why."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, MutableMapping
from dataclasses import replace

from megatron_hdp.runtime.cuda.device import EAGER, Capability, Run, loading_mode
from megatron_hdp.runtime.cuda.settings import (
    CUDNN,
    MEMORY,
    MODULES,
    SETTINGS,
    Wish,
    doubt,
    obstacle,
)


def prepare(run: Run, environment: MutableMapping[str, str] = os.environ) -> list[str]:
    """Sets variables that are not set, or not kept; call it before anything touches CUDA.

    Where PyTorch is imported already, as in scripts that import it before they call the plugin, its
    allocator is told directly. Where CUDA has started, what it has read cannot be changed.

    Args:
        run: what is known of it.
        environment: of this process.

    Returns:
        A line for each setting that is not what the run wants, or was not.

    Raises:
        ValueError: a variable is set to what CUDA does not take.
    """
    wishes = [wish for wanted in SETTINGS.values() if (wish := wanted(run)) is not None]
    mode = loading_mode() if run.capability is not None else None
    lines = [_prepare(wish, run, environment, mode) for wish in wishes]
    return [line for line in lines if line is not None]


def _prepare(
    wish: Wish, run: Run, environment: MutableMapping[str, str], mode: int | None
) -> str | None:
    name, found = wish.names[0], wish.found_in(environment)
    is_replaced = found is not None and wish.instead is not None
    if found is not None and environment[found] == wish.value:
        return None
    if found is not None and not is_replaced:
        return doubt(wish, found, environment[found])
    why_not = obstacle(wish, run, environment)
    if why_not is not None:
        return f"{wish.value} is left out, and fragments may cost memory: {why_not}"
    if name == MODULES and mode == EAGER:
        return None
    is_late = "transformer_engine" in sys.modules if name == CUDNN else mode is not None
    if is_late and name != MEMORY:
        reader = "TransformerEngine" if name == CUDNN else "CUDA"
        return (
            f"{reader} started before {name} could be set: export {name}={wish.value}, or start "
            f"with `python -m megatron_hdp run`: {wish.why}"
        )
    before, environment[name] = environment.get(name), wish.value
    if is_replaced:
        return f"{name}={before} is replaced by {wish.value}: {wish.why}; {wish.instead} keeps it"
    torch = sys.modules.get("torch")
    if name == MEMORY and torch is not None:  # it read the variable when it was imported
        tell = getattr(torch._C, "_accelerator_setAllocatorSettings", None)  # from 2.9 on
        (tell or torch.cuda.memory._set_allocator_settings)(wish.value)
    return None


def describe(
    capability: Capability | None, environment: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """For people: what a run under HDP will do on this machine, a line for each setting.

    Args:
        capability: of this machine's GPUs; None where there is none.
        environment: of this process.
    """
    if capability is None:
        return dict.fromkeys(SETTINGS, "no matter without a GPU")
    run, lines = Run(capability=capability, hybrid_data_parallel=True), {}
    for label, wanted in SETTINGS.items():
        wish, parallel = wanted(run), wanted(replace(run, tensor_parallel=True))
        if wish is None or parallel is None:
            lines[label] = "nothing to set"
            continue
        wants = f"{wish.value} with HDP"
        if parallel.value != wish.value:
            wants += f", {parallel.value} with tensor parallelism"
        found, why_not = wish.found_in(environment), obstacle(wish, run, environment)
        if found is not None:
            lines[label] = f"{environment[found]} is set and kept; a run would set {wants}"
            if wish.instead is not None and environment[found] != wish.value:
                lines[label] = f"{environment[found]} is set; a run replaces it by {wants}"
        elif why_not is not None:
            lines[label] = f"{wish.value} is left out: {why_not}"
            continue
        else:
            lines[label] = f"not set: a run sets {wants}"
        lines[label] += f": {wish.why}"
    return lines
