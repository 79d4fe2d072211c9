"""Compiled and fused functions: variants, rotation, warm-up, the loss, the routers' messages."""

import importlib
import random
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from common import peak_bytes, seconds_of
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from megatron_hdp.runtime.loss import linear_cross_entropy
from questions import Answer, question

GB = 1e9


@question(
    "variants of fused functions over random numbers of tokens",
    "none uncompiled, limit 64 in backward's thread",
)
def _compilations() -> Answer:
    """Random numbers of tokens, recomputation, an evaluation, and one tensor beyond 2^31 values."""
    from megatron.core.fusions import fused_bias_dropout, fused_bias_swiglu

    from megatron_hdp.megatron.step.setup import MAX_VARIANTS, allow_variants

    allow_variants()
    torch._dynamo.reset()
    counters.clear()
    limits: set[int] = set()

    def layer(hidden: torch.Tensor, add: Callable[..., torch.Tensor]) -> torch.Tensor:
        hidden = add((hidden * 2, None), hidden, 0.1)
        wide = hidden.repeat(1, 1, 2)
        narrow = fused_bias_swiglu.bias_swiglu_impl(wide, None)
        return add((narrow, None), hidden, 0.1)

    training = fused_bias_dropout.get_bias_dropout_add(training=True, fused=True)
    evaluating = fused_bias_dropout.get_bias_dropout_add(training=False, fused=True)
    generator = random.Random(0)
    width, few = 16384, [generator.randint(2, 4000) for _ in range(20)]
    for tokens in [*few, 1, 2**31 // (2 * width) + 8]:  # the last one's wide tensor is beyond 2^31
        hidden = torch.ones(tokens, 1, width, device="cuda", dtype=torch.bfloat16)
        hidden.requires_grad_()
        hidden.register_hook(lambda _: limits.add(torch._dynamo.config.recompile_limit))
        out = checkpoint(layer, hidden, training, use_reentrant=True)
        out.sum().backward()
        with torch.no_grad():
            layer(hidden, evaluating)
        del hidden, out
    frames = counters["frames"]
    eager = frames["total"] - frames["ok"]
    return Answer(
        f"{frames['ok']} variants of all functions, {eager} uncompiled; limit in backward "
        f"{sorted(limits)}",
        eager == 0 and frames["ok"] <= 40 and limits == {MAX_VARIANTS},
    )


def _median_ms(run: Callable[[], Any]) -> float:
    return 1e3 * median(seconds_of(run, "cuda") for _ in range(7))


@question(
    "rotary positions by TransformerEngine's kernel, 64K x 32 heads",
    "nearer to float32 than unfused, and faster",
)
def _rotation() -> Answer:
    """64K tokens of packed sequences, positions up to 2M, 32 heads of 128; forward and backward."""
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_hdp.megatron.model import OwnPositionRotaryEmbedding, fused_kernel_is_there

    if not fused_kernel_is_there():
        return Answer("no TransformerEngine here", False)
    tokens, heads, width = 65536, 32, 128
    positions = torch.arange(tokens, device="cuda") % 10_000
    positions[tokens // 2 :] += 2**21 - 10_000
    embedding = RotaryEmbedding(kv_channels=width, rotary_percent=1.0)
    angles = OwnPositionRotaryEmbedding.like(embedding)(positions)
    query = torch.randn(tokens, 1, heads, width, device="cuda", dtype=torch.bfloat16)

    def config(fused: bool) -> TransformerConfig:
        return TransformerConfig(
            num_layers=1,
            hidden_size=heads * width,
            num_attention_heads=heads,
            apply_rope_fusion=fused,
        )

    def turn(given: torch.Tensor, fused: bool) -> tuple[torch.Tensor, torch.Tensor]:
        leaf = given.detach().requires_grad_()
        out = rope_utils.apply_rotary_pos_emb(leaf, angles, config(fused), cp_group=object())
        out.backward(given)
        return out.detach(), leaf.grad

    few = slice(tokens - 2048, tokens)
    exact = [one[few] for one in turn(query.float(), False)]
    errors, times = [], []
    for fused in (False, True):
        found = turn(query, fused)
        pairs = [(a[few].float(), b) for a, b in zip(found, exact, strict=True)]
        errors.append(max(float((a - b).norm() / b.norm()) for a, b in pairs))
        times.append(_median_ms(lambda fused=fused: turn(query, fused)))
    return Answer(
        f"from float32 {errors[1]:.1e} (unfused {errors[0]:.1e}); {times[1]:.2f} ms "
        f"(unfused {times[0]:.2f} ms)",
        errors[1] <= errors[0] and errors[1] < 0.01 and times[1] < times[0],
    )


@question("memory of Megatron's warm-up, left out under HDP", "above 46 GB at 2M tokens")
def _warm_up() -> Answer:
    """Megatron's warm-up of its first function, at 64K tokens instead of 2M."""
    from megatron.core.fusions.fused_bias_swiglu import bias_swiglu

    tokens, width = 65536, 11008
    how = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
    bias = torch.rand(width, **how)

    def warm_up() -> None:
        given = torch.rand(tokens, 1, width, **how)
        for _ in range(5):
            out = bias_swiglu(given, bias)
        del out

    before = torch.cuda.memory_allocated()
    peak = peak_bytes(warm_up) - before
    at_2m = peak / tokens * 2**21 / GB
    return Answer(f"{at_2m:.0f} GB at 2M tokens of a 7B model", at_2m > 46)


@question(
    "peak of the fused loss with DDP's buffer",
    "a chunk of logits and gradients of hidden states, 1.5 GB",
)
def _loss_peak() -> Answer:
    """16K tokens, 128K entries, BF16: what is held above inputs, with DDP's buffer and without."""
    tokens, vocabulary, width = 16384, 131072, 4096
    bf16 = {"device": "cuda", "dtype": torch.bfloat16}
    weight = (0.02 * torch.randn(vocabulary, width, **bf16)).requires_grad_()
    buffer = torch.zeros(vocabulary, width, device="cuda")
    labels = torch.randint(vocabulary, (tokens,), device="cuda")
    mask = torch.ones(tokens, dtype=torch.bool, device="cuda")
    hidden = torch.randn(tokens, width, **bf16).requires_grad_()
    peaks, gradients = [], []
    for main_grad in (buffer, None):
        hidden.grad = weight.grad = None
        loss = partial(linear_cross_entropy, hidden, weight, labels, mask, main_grad=main_grad)
        before = torch.cuda.memory_allocated()
        peaks.append((peak_bytes(lambda loss=loss: loss().backward()) - before) / GB)
        gradients.append(buffer if main_grad is not None else weight.grad)
    rounded = gradients[0].bfloat16()
    error = float((rounded - gradients[1]).norm() / gradients[1].norm())
    most = (2**30 + 2 * tokens * width * 2) / GB + 0.2  # a chunk of logits, hidden states' gradient
    return Answer(
        f"{peaks[0]:.2f} GB (without the buffer {peaks[1]:.2f} GB), gradients differ by "
        f"{error:.0e}",
        peaks[0] < most and peaks[1] - peaks[0] > 1.9 and error < 0.01,
    )


@question(
    "weights' gradients by apex's kernel, where it is, three micro-batches", "in float32: 1e-4"
)
def _fused_weight_gradients() -> Answer:
    if find_spec("fused_weight_gradient_mlp_cuda") is None:
        return Answer("not asked: apex is not built with its kernel", True)
    kernel = importlib.import_module("fused_weight_gradient_mlp_cuda")
    found, exact = torch.zeros(2, 512, 1024, device="cuda").unbind()
    for tokens in (37, 4096, 0):  # a rank's expert may have none
        given = torch.randn(tokens, 1024, device="cuda", dtype=torch.bfloat16)
        gradient = torch.randn(tokens, 512, device="cuda", dtype=torch.bfloat16)
        kernel.wgrad_gemm_accum_fp32(given, gradient, found)
        exact += gradient.float().T @ given.float()
    error = float((found - exact).norm() / exact.norm())
    return Answer(f"{error:.0e}", error < 1e-4)


@question(
    "routers' counts around a ring of 64: one way or one a layer",
    "above 5 us a hop, so 32 ways cost above 10 ms",
)
def _small_message() -> Answer:
    """One small operation of NCCL with its launch: no hop around a ring takes less."""
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        counts = torch.zeros(32 * 8, dtype=torch.int64, device="cuda")

        def hops() -> None:
            for _ in range(63):
                dist.all_reduce(counts)
                counts.add_(1)

        milliseconds = _median_ms(hops)
    finally:
        dist.destroy_process_group()
    return Answer(
        f"63 hops {milliseconds:.1f} ms; a way for each of 32 layers {32 * milliseconds:.0f} ms",
        milliseconds > 0.3,
    )
