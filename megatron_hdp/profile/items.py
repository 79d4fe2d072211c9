"""What items cost in an encoder, measured: calls with blank ones of several sizes and numbers."""

from __future__ import annotations

import time

import numpy as np
import torch

from megatron_hdp.encoders import ItemEncoder
from megatron_hdp.media import ItemCostModel, LearntCost

_TIMES = 3
_IN_A_CALL = (1, 4)
"""Items."""


def measured_items(encoder: ItemEncoder, device: torch.device, budget_s: float) -> ItemCostModel:
    """Seconds of items while the encoder is trained: a forward, another one, and backward.

    Args:
        encoder: with its weights on the device.
        device: that runs it.
        budget_s: no larger items are begun behind it; two sizes are measured at least.
    """
    began, rows = time.perf_counter(), []
    for number, item in enumerate(encoder.samples()):
        patches = encoder.patches(item)
        if number > 1 and time.perf_counter() - began > budget_s:
            break
        if patches > encoder.patches_per_pack:
            break
        for count in _IN_A_CALL:
            if count * patches <= encoder.patches_per_pack:
                taken_s = [_call_s(encoder, [item] * count, device) for _ in range(1 + _TIMES)][1:]
                seconds = float(np.median(taken_s))
                rows.append([count * patches, count * patches**2, 1.0, seconds])
    learnt = LearntCost(ItemCostModel.from_encoder(encoder.shape), behind=0)
    learnt.observe(0, np.array(rows, dtype=np.float64))
    return learnt.of_step(0)


def _call_s(encoder: ItemEncoder, items: list[object], device: torch.device) -> float:
    started = _now(device)
    with torch.no_grad():
        encoder(items)
    with torch.enable_grad():
        rows = encoder(items)
    rows.backward(torch.ones_like(rows))
    return _now(device) - started


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
