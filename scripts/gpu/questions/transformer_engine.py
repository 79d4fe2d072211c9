"""Which kernels TransformerEngine takes here, how often it chooses, and where the host waits.

Rings are tried by one process: its group has two ranks that never speak, and what is sent around
the ring comes back.
"""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache
from importlib import metadata
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from megatron_hdp.runtime.attention import RunShapes, Selection, select_attention
from megatron_hdp.runtime.ring import RingComm, TokenLayout
from questions import Answer, question

_TOO_OLD = Answer("not asked: this TransformerEngine is too old for rings, all are ours", True)
_HEAD_DIM = 128
_SHAPES = RunShapes(
    *(torch.device("cuda"), torch.bfloat16, _HEAD_DIM),
    heads=8,
    kv_heads=1,
    longest=65_536,
    tokens_per_rank=8192,
    num_ranks=2,
)


def _two_ranks() -> RingComm:
    if not dist.is_initialized():
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    return RingComm(dist.group.WORLD)


def _here() -> RunShapes:
    return replace(_SHAPES, device=torch.device("cuda", torch.cuda.current_device()))


def _selected() -> Selection:
    return select_attention(_here(), "transformer-engine", _two_ranks())


@cache
def _takes_rings() -> bool:
    """Older versions do not."""
    return bool(_selected().backend.takes_rings)


@contextmanager
def _variables(**values: int) -> Iterator[None]:
    with mock.patch.dict(os.environ, {f"NVTE_{name}_ATTN": str(x) for name, x in values.items()}):
        yield


def _version(package: str) -> str | None:
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None


@question(
    "TransformerEngine: kernels that it takes for rings and for whole sequences, bfloat16",
    "cuDNN's for both on Hopper and newer, and a trial of each is right",
)
def _kernels() -> Answer:
    selection = _selected()
    versions = f"cuDNN {torch.backends.cudnn.version()}, flash-attn {_version('flash-attn')}"
    wanted = "local by cuDNN, ring by cuDNN" if _takes_rings() else "local by cuDNN"
    return Answer(f"{selection} ({versions})", wanted in selection.notes)


@question(
    "TransformerEngine with flash-attn and cuDNN switched off",
    "it is refused: unfused kernels are not taken",
)
def _unfused() -> Answer:
    try:
        with _variables(FLASH=0, FUSED=0, UNFUSED=1):
            found = str(_selected())
    except ValueError as error:
        last = str(error).splitlines()[-2]
        return Answer(f"refused: {last}", "NVTE_FUSED_ATTN=0" in last)
    return Answer(found, False)


@question(
    "TransformerEngine on one token with one head of keys and values",
    "the value itself, and its gradient",
)
def _one_token() -> Answer:
    """As a layer gives it: values are a piece of what was projected to queries, keys and values."""
    attend, device = _selected().backend, torch.device("cuda")
    heads, d = _SHAPES.heads, _HEAD_DIM
    projected = torch.randn(1, 1, 1, (heads + 2) * d, device=device, dtype=torch.bfloat16)
    projected.requires_grad_()
    q, k, v = projected.split([heads * d, d, d], dim=3)
    q, k = q.reshape(1, 1, heads, d) * 2, k.contiguous() * 2
    layout = TokenLayout((0,), 0, (), (1,), device)
    out = attend(q.squeeze(1), k.squeeze(1), v.squeeze(1), layout, _two_ranks(), d**-0.5)
    out.sum().backward()
    error = float((out - v[0].expand_as(out)).detach().abs().max())
    error += float((projected.grad[..., -d:] - heads).abs().max())
    return Answer(f"largest error {error:.1g}", error == 0)


@question(
    "choices of kernels while calls for a ring and for whole sequences alternate",
    "none but the first of each",
)
def _alternating() -> Answer:
    from transformer_engine.pytorch.attention.dot_product_attention import utils

    from megatron_hdp.runtime.attention.trial import try_out, try_out_ring

    attend, takes_rings = _selected().backend, _takes_rings()
    choose = utils.get_attention_backend
    with mock.patch.object(utils, "get_attention_backend", wraps=choose) as counted:
        for _ in range(5):
            try_out(attend, _here())
            if takes_rings:
                try_out_ring(attend, _two_ranks(), _here())
    return Answer(f"{counted.call_count} choices in 10 calls", counted.call_count == 0)


@question(
    "TransformerEngine under deterministic algorithms, 65,536 tokens, 8 heads",
    "refused at the start up to Hopper without flash-attn, taken otherwise",
)
def _deterministic() -> Answer:
    capability, flash = torch.cuda.get_device_capability(), _version("flash-attn")
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        found, is_refused = str(_selected()), False
    except ValueError as error:
        found, is_refused = str(error).splitlines()[-2], True
    finally:
        torch.use_deterministic_algorithms(False)
    expected = capability <= (9, 0) and flash is None
    return Answer(f"sm{capability[0]}{capability[1]}: {found}", is_refused == expected)


@question(
    "FP8 layers with current and with blockwise scaling, 48 and 4,112 tokens",
    "within 10 % of bfloat16, forward and backward",
)
def _fp8_recipes() -> Answer:
    """Numbers of tokens that are multiples of 16 and of nothing more, as ranks have them."""
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import Float8BlockScaling, Float8CurrentScaling

    layer, errors = te.Linear(1024, 1024, params_dtype=torch.bfloat16), {}

    def results(x: torch.Tensor, recipe: Any) -> list[torch.Tensor]:
        layer.zero_grad()
        x = x.detach().requires_grad_()
        with te.fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe):
            out = layer(x)
        out.square().mean().backward()
        return [out.detach(), x.grad, layer.weight.grad.clone()]

    for kind in (Float8CurrentScaling, Float8BlockScaling):
        for tokens in (48, 4112):
            x = torch.randn(tokens, 1024, device="cuda", dtype=torch.bfloat16)
            pairs = zip(results(x, kind()), results(x, None), strict=True)
            worst = max(float((a - b).norm() / b.norm()) for a, b in pairs)
            errors[f"{kind.__name__} {tokens}"] = worst
    told = ", ".join(f"{name} {error:.1%}" for name, error in errors.items())
    return Answer(told, max(errors.values()) < 0.1)


def _waits() -> int:
    """How often the host waits in a ring's forward and backward, kernels being known."""
    from megatron_hdp.runtime.attention.trial import EchoComm

    attend, device = _selected().backend, _here().device
    echo, layout = EchoComm(dist.group.WORLD), TokenLayout((0, 1), 0, (512,), (), device)
    q, k, v, _ = _here().inputs(512)
    waits = 0
    for _ in range(2):  # the first time whatever is made once is made
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                attend(q, k, v, layout, echo, _HEAD_DIM**-0.5).sum().backward()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        waits = sum("synchronizing CUDA operation" in str(one.message) for one in caught)
    return waits


@question("waits of the host in a ring by cuDNN, forward and backward", "0")
def _waits_of_cudnn() -> Answer:
    if not _takes_rings():
        return _TOO_OLD
    with _variables(FLASH=0, FUSED=1):
        found = _waits()
    return Answer(f"{found} waits", found == 0)


@question("waits of the host in a ring by flash-attn, forward and backward", "3, all in backward")
def _waits_of_flash_attn() -> Answer:
    if _version("flash-attn") is None:
        return Answer("flash-attn is not installed", True)
    if not _takes_rings():
        return _TOO_OLD
    with _variables(FLASH=1, FUSED=0):
        found = _waits()
    return Answer(f"{found} waits", found == 3)
