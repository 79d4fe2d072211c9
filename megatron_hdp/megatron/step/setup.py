"""What HDP needs before the first step: this rank's executor and the cost model of the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch._dynamo
from megatron.core.distributed import DistributedDataParallel

from megatron_hdp.megatron.execution import HdpExecutor
from megatron_hdp.megatron.model import model_dtype
from megatron_hdp.megatron.options import (
    TrainingArguments,
    head_sizes,
    layer_windows,
    model_shape,
    planned_layers,
    stage_split,
)
from megatron_hdp.megatron.parallel import (
    RankPlace,
    compute_device,
    new_gradient_group,
    new_ring_comm,
    num_parameters,
    rank_place,
    say,
)
from megatron_hdp.megatron.step.figures import over_all_ranks
from megatron_hdp.planner import CostModel
from megatron_hdp.planner.online import speeds_in
from megatron_hdp.planner.shape import ring_ways
from megatron_hdp.runtime.attention import (
    AttentionByLatent,
    RunShapes,
    Selection,
    select_attention,
    with_float32_rings,
    with_latent_ring,
    with_own_ring,
)
from megatron_hdp.runtime.clocks import clock_of
from megatron_hdp.runtime.gathering import gathered
from megatron_hdp.runtime.timeline import Timeline

MAX_VARIANTS = 64
"""Variants of a function: (static, symbolic, 64-bit, no token, one token) x (gradients recorded,
not recorded, not recorded and not wanted) x (bias, none) are 30, and as many again are room."""


def build_executor(
    arguments: TrainingArguments, chunks: Sequence[DistributedDataParallel], timeline: Timeline
) -> HdpExecutor:
    """The executor of this rank; every rank of the job must call this.

    Raises:
        ValueError: there is no attention for this device and these shapes, or not the chosen one,
            or ranks would take different ones.
    """
    device = compute_device()
    timeline.use(clock_of(device))
    allow_variants()
    place = rank_place(arguments)
    comm = new_ring_comm(arguments, timeline)
    head_dim, _ = head_sizes(arguments)
    kind = device, model_dtype(arguments), head_dim
    shapes = _shapes_of(arguments, place)
    attention = select_attention(*kind, arguments.hdp_attention, comm, shapes)
    attention = with_float32_rings(attention, arguments.hdp_float32_rings_from, *kind, shapes)
    attention = with_own_ring(attention, *kind, shapes)
    if arguments.multi_latent_attention:
        attention = with_latent_ring(attention, arguments.hdp_mla_ring, *kind, shapes)
    say(f"attention: {attention}")
    _require_one_attention(attention)
    gradients = new_gradient_group(arguments) if len(chunks) > 1 else None
    kind_of_loss = arguments.hdp_fused_loss
    return HdpExecutor(chunks, place, comm, attention.backend, kind_of_loss, gradients)


def _shapes_of(arguments: TrainingArguments, place: RankPlace) -> RunShapes:
    tokens = arguments.hdp_tokens_per_rank
    if arguments.hdp_offload != "off":  # a rank then holds more than its activations have room for
        tokens = max(tokens, arguments.seq_length)
    num_ranks, least = place.num_hdp_ranks, arguments.hdp_float32_rings_from
    if least is not None:  # longer rings are for another backend
        num_ranks = min(num_ranks, least - 1)
    head_dim, value_dim = head_sizes(arguments)
    windows, sink = layer_windows(arguments), arguments.softmax_type != "vanilla"
    return RunShapes(
        heads=arguments.num_attention_heads // place.num_tensor_ranks,
        kv_heads=max(1, arguments.num_query_groups // place.num_tensor_ranks),
        longest=arguments.seq_length,
        tokens_per_rank=tokens,
        num_ranks=num_ranks,
        windows=tuple(sorted({window for window in windows if window is not None})),
        sink=sink,
        plain_layers=not sink and None in windows,
        value_dim=value_dim if value_dim != head_dim else None,
    )


def _require_one_attention(attention: Selection) -> None:
    """Members of a ring must use one kernel; ranks may differ in what is installed."""
    found = gathered(str(attention))
    names = [text.split("; ")[0] for text in found]
    if len(set(names)) > 1:
        other = next(rank for rank, name in enumerate(names) if name != names[0])
        raise ValueError(
            f"ranks would attend by different kernels: rank 0 by {found[0]}; rank {other} by "
            f"{found[other]}; expected one: install the same on all nodes, or choose one that all "
            "have with --hdp-attention"
        )


def cost_model_of(arguments: TrainingArguments, executor: HdpExecutor) -> CostModel:
    """The cost model that a run begins with: measured (``--hdp-cost-model``) or from the model's
    shape, with the speeds of ``--hdp-rank-speeds``.

    Every rank must call this.

    Raises:
        ValueError: layers count (activations are to be offloaded, or the file has figures of one
            layer), and the file is about other layers; or a speed is no number, or not one a rank.
    """
    found = _with_speeds(arguments, executor, _cost_model_at_full_speed(arguments, executor))
    if not isinstance(executor.attention, AttentionByLatent):
        return found
    ways = ring_ways(
        model_shape(arguments, vocab_size=0),
        found,
        value_bytes=model_dtype(arguments).itemsize,
        tensor_ranks=executor.place.num_tensor_ranks,
    )
    executor.attention.decide_by(
        lambda layout: ways.latent_is_faster(
            [tokens * layout.degree for tokens in layout.ring_slices], layout.ring
        )
    )
    return ways.latent  # where keys and values travel, that takes less


def _with_speeds(
    arguments: TrainingArguments, executor: HdpExecutor, found: CostModel
) -> CostModel:
    if arguments.hdp_rank_speeds is None:
        return found
    path, num_ranks = arguments.hdp_rank_speeds, executor.place.num_hdp_ranks
    text = path.read_text(encoding="utf-8-sig", errors="replace")
    lines = ((number, line.strip()) for number, line in enumerate(text.split("\n"), 1))
    speeds = speeds_in(
        (one for one in lines if one[1]), path, num_ranks, f"the run's {num_ranks} HDP ranks"
    )
    return replace(found, rank_speeds=speeds)


def _cost_model_at_full_speed(arguments: TrainingArguments, executor: HdpExecutor) -> CostModel:
    planned, most = planned_layers(arguments), stage_split(arguments).most
    counted = executor.activation_bytes_per_token() if arguments.hdp_offload != "off" else None
    if arguments.cost_model_file is None:
        shape = _cost_model_of_shape(arguments, executor, counted)
        return replace(shape, num_layers=planned)
    measured = CostModel.from_json(arguments.cost_model_file)
    if arguments.hdp_offload == "off" and not measured.counts_layers:
        return measured
    if measured.num_layers != most:
        raise ValueError(
            f"--hdp-offload {arguments.hdp_offload}: {arguments.cost_model_file} says num_layers "
            f"{measured.num_layers}, a rank of this run has {most}: measure the cost model "
            "again, or correct num_layers (layers of one pipeline stage, the most if they differ)"
        )
    return replace(measured, num_layers=planned)


def _cost_model_of_shape(
    arguments: TrainingArguments, executor: HdpExecutor, counted: float | None
) -> CostModel:
    """`counted`: bytes of activations of one token in a layer, if they are to be offloaded."""
    others: dict[str, float] = {}
    if counted is not None:
        layers = len(executor.layers)
        mine = {"bytes": counted * layers, "layers": float(layers)}
        total = over_all_ranks(mine, {}, compute_device())
        # a layer of the model lies on the tensor ranks of one stage
        of_all = arguments.num_layers * executor.place.num_tensor_ranks
        per_token = total["bytes"] / total["layers"] * of_all
        others = {"activation_bytes_per_token": per_token}
    parameters = num_parameters(executor.chunks)
    shape = model_shape(arguments, vocab_size=0)
    return CostModel.of_tensor_ranks(
        executor.place.num_tensor_ranks,
        num_layers=arguments.num_layers,
        hidden_size=shape.attention_width / shape.num_layers,
        num_parameters=sum(parameters),
        expert_parameters=parameters.experts,
        **shape.ring_costs(model_dtype(arguments).itemsize),
        **others,
    )


def allow_variants() -> None:
    """Raises PyTorch's limit to `MAX_VARIANTS` in every thread of this process.

    Megatron's fused functions are compiled one by one and called with another number of tokens in
    every micro-batch. PyTorch makes sizes symbolic at the second call, so sizes alone cost two
    variants. Each of these is multiplied by what else a variant is made for: gradients are recorded
    or not, as in recomputation; an input wants a gradient or not, as in a recomputed layer's two
    residual additions; there is a bias or none; an expert has no token, or one; a tensor has 2^31
    elements or more, as 64K tokens of a wide MLP have, and indices need 64 bits. PyTorch's limit is
    8; beyond it the function runs uncompiled, and only a warning says so.

    Since PyTorch 2.13 at the latest what is set counts in the thread that sets it, and a GPU's
    backward pass, which calls compiled functions too, runs in a thread of its own. So the default
    is raised as well.
    """
    config = torch._dynamo.config
    config.recompile_limit = MAX_VARIANTS
    config._config["recompile_limit"].default = MAX_VARIANTS
