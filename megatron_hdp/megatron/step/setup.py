"""What HDP needs before the first step: this rank's executor and the cost model of the run."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter

import torch._dynamo
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.utils import get_attr_wrapped_model, get_model_config

from megatron_hdp.megatron.execution import HdpExecutor
from megatron_hdp.megatron.model import model_dtype
from megatron_hdp.megatron.options import (
    TrainingArguments,
    check_dispatcher,
    check_fp8,
    cost_model_of_job,
    head_sizes,
    job_of,
    known_speeds,
    layer_windows,
)
from megatron_hdp.megatron.parallel import (
    RankPlace,
    compute_device,
    nccl_of_rings,
    new_gradient_group,
    new_ring_comm,
    rank_place,
    say,
)
from megatron_hdp.megatron.step.figures import over_all_ranks
from megatron_hdp.planner import CostModel
from megatron_hdp.planner.shape import ring_ways
from megatron_hdp.runtime.attention import (
    AttentionByLatent,
    RunShapes,
    Selection,
    select_attention,
    with_double_rings,
    with_float32_rings,
    with_latent_ring,
    with_own_ring,
    with_parts,
)
from megatron_hdp.runtime.clocks import clock_of
from megatron_hdp.runtime.cuda import numa, pci_address
from megatron_hdp.runtime.epochs import keys
from megatron_hdp.runtime.gathering import gathered, largest
from megatron_hdp.runtime.health import fingerprint
from megatron_hdp.runtime.ring import connect_counterparts, wide_type
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
            or ranks would take different ones; or the model has FP8 or a dispatcher of
            tokens that HDP does not know.
    """
    device = compute_device()
    if device.type == "cuda" and arguments.hdp_numa_binding:
        num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        say(f"CPUs: {numa.bind(pci_address(device.index), num_ranks)}")
    timeline.use(clock_of(device))
    allow_variants()
    config = get_model_config(chunks[0])
    check_fp8(config, arguments)
    check_dispatcher(config, arguments)
    place = rank_place(arguments, config)
    comm = new_ring_comm(arguments, timeline)
    shapes = _shapes_of(arguments, place)
    attention = select_attention(shapes, arguments.hdp_attention, comm)
    attention = with_float32_rings(attention, arguments.hdp_float32_rings_from, shapes)
    attention = with_own_ring(attention, shapes)
    in_parts = arguments.sequence_parts > 1 or arguments.streams
    if in_parts:
        attention = with_parts(attention, shapes)
    if arguments.double_rings:
        attention = with_double_rings(attention, comm, shapes)
    if arguments.multi_latent_attention:
        attention = with_latent_ring(attention, arguments.hdp_mla_ring, shapes)
    say(f"attention: {attention}")
    _require_one_attention(attention)
    in_parts = in_parts and place.num_stages > 1
    gradients = new_gradient_group(arguments) if len(chunks) > 1 or in_parts else None
    kind_of_loss = arguments.hdp_fused_loss
    how = comm, attention.backend, kind_of_loss, gradients
    # a pair of stages has one stream in a communicator, and what goes around another
    is_pair = in_parts and len(chunks) > 1 and place.num_stages == 2
    more = [new_gradient_group(arguments) for _ in range(2 * is_pair)]
    sums = wide_type if arguments.hdp_stream_sums == "float32" else attrgetter("dtype")
    return HdpExecutor(chunks, place, *how, runs_parts=in_parts, more_groups=more, stream_sums=sums)


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
        device=compute_device(),
        dtype=model_dtype(arguments),
        head_dim=head_dim,
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
    mark = fingerprint(str(attention).split("; ")[0]) >> 1  # it fits a signed number
    most, least = largest([mark, -mark], compute_device())
    if most == -least:
        return
    found = gathered(str(attention))
    names = [text.split("; ")[0] for text in found]
    other = next(rank for rank, name in enumerate(names) if name != names[0])
    raise ValueError(
        f"ranks would attend by different kernels: rank 0 by {found[0]}; rank {other} by "
        f"{found[other]}; expected one: install the same on all nodes, or choose one that all "
        "have with --hdp-attention"
    )


def cost_model_of(arguments: TrainingArguments, executor: HdpExecutor) -> CostModel:
    """The cost model that a run begins with, as ``megatron-hdp check`` plans with it.

    But for two things, which the built model says: the activations that are to be offloaded, and
    whether its attention can pass latents on. Every rank must call this.

    Raises:
        ValueError: ``--hdp-cost-model`` or ``--hdp-rank-speeds`` cannot be used.
    """
    place = executor.place
    num_gpus = place.num_hdp_ranks * place.num_tensor_ranks * place.num_stages
    vocab_size = get_attr_wrapped_model(executor.chunks[0], "vocab_size")
    job = job_of(arguments, num_gpus, vocab_size)
    kept = None if arguments.hdp_offload == "off" else _kept_bytes_per_token(arguments, executor)
    is_changing = arguments.hdp_survive and arguments.hdp_rank_speeds is not None
    speeds = _speeds_of_gpus(arguments, place) if is_changing else None
    cost_model = cost_model_of_job(arguments, job, kept, nccl_of_rings(arguments), speeds)
    cost_model = _on_nodes(cost_model, place)
    if cost_model.double_rings:
        executor.comm.ranks_per_node = cost_model.ranks_per_node
        connect_counterparts(executor.comm.group, cost_model.ranks_per_node, compute_device())
    if cost_model.warning:
        say(cost_model.warning)
    if not isinstance(executor.attention, AttentionByLatent):
        return cost_model
    ways = ring_ways(
        job.shape,
        cost_model,
        value_bytes=job.value_bytes,
        tensor_ranks=job.tensor_ranks,
        some_made=arguments.hdp_mla_ring == "auto",
    )
    executor.attention.decide_by(
        lambda layout: ways.latent_is_faster(layout.ring_lengths, layout.ring),
        lambda layout: ways.made_share(layout.lengths_around, layout.earlier_in_ring, layout.ring),
    )
    return ways.latent  # where keys and values travel, that takes less


def _speeds_of_gpus(arguments: TrainingArguments, place: RankPlace) -> list[float]:
    """Known speeds in a job whose ranks come and go: a line is about a GPU, whoever runs there.

    The GPU of a spare has no line and counts as one of full speed.
    """
    ranks_of_stage = int(os.environ["WORLD_SIZE"]) // place.num_stages  # when the job began
    known = known_speeds(arguments, ranks_of_stage // place.num_tensor_ranks)
    mine, slot = 1.0, os.environ.get(keys.PLACE)
    if slot is not None:
        mine = known[int(slot) % ranks_of_stage // place.num_tensor_ranks]
    speeds = [math.inf] * place.num_hdp_ranks
    # an HDP rank may be made of several GPUs, and of other ones than in the beginning
    for hdp_rank, speed in gathered((place.hdp_rank, mine)):
        speeds[hdp_rank] = min(speeds[hdp_rank], speed)
    return speeds


def _on_nodes(cost_model: CostModel, place: RankPlace) -> CostModel:
    """The cost model of HDP ranks that lie apart: of several stages, by --use-tp-pp-dp-mapping.

    A node then holds fewer of them than its GPUs by the tensor ranks, which is what it says.
    """
    first, *others = dist.get_process_group_ranks(parallel_state.get_data_parallel_group())
    apart = others[0] - first if others else place.num_tensor_ranks
    if apart <= place.num_tensor_ranks:
        return cost_model
    known = cost_model.ranks_per_node
    gpus = int(os.environ.get("LOCAL_WORLD_SIZE", known * place.num_tensor_ranks))
    per_node = min(known, max(1, gpus // apart))
    say(f"neighbouring HDP ranks are {apart} GPUs apart: plans count {per_node} of them a node")
    return replace(cost_model, ranks_per_node=per_node)


def _kept_bytes_per_token(arguments: TrainingArguments, executor: HdpExecutor) -> float:
    """Bytes of activations of one token in all layers on all tensor ranks, counted as built."""
    layers = len(executor.layers)
    mine = {"bytes": executor.activation_bytes_per_token() * layers, "layers": float(layers)}
    total = over_all_ranks(mine, {}, compute_device())
    # a layer of the model lies on the tensor ranks of one stage
    of_all = arguments.num_layers * executor.place.num_tensor_ranks
    return total["bytes"] / total["layers"] * of_all


def allow_variants() -> None:
    """Raises PyTorch's limit to `MAX_VARIANTS` in every thread of this process.

    Megatron's fused functions are called with another number of tokens in every micro-batch.
    PyTorch makes sizes symbolic at the second call, so sizes alone cost two variants, times what
    else a variant is made for: gradients are recorded or not, as in recomputation; an input wants a
    gradient or not, as in a recomputed layer's two residual additions; there is a bias or none; an
    expert has no token, or one; a tensor has 2^31 elements or more, and indices need 64 bits.
    PyTorch's limit is 8; beyond it the function runs uncompiled, and only a warning says so.

    Since PyTorch 2.13 at the latest what is set counts in the thread that sets it, and a GPU's
    backward pass, which calls compiled functions too, runs in a thread of its own. So the default
    is raised as well.
    """
    config = torch._dynamo.config
    config.recompile_limit = MAX_VARIANTS
    config._config["recompile_limit"].default = MAX_VARIANTS
