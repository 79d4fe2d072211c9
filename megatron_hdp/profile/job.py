"""One profile in a job that was joined: build the model, time the cases, fit, give the results."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import torch

from megatron_hdp.data.tokenizers import build_tokenizer
from megatron_hdp.encoders import load_encoder
from megatron_hdp.media import ItemCostModel
from megatron_hdp.megatron import parallel
from megatron_hdp.megatron.execution import HdpExecutor
from megatron_hdp.megatron.model import build_gpt, model_dtype
from megatron_hdp.megatron.options import (
    TrainingArguments,
    stage_split,
    tokenizer_of,
    without_virtual_stages,
)
from megatron_hdp.megatron.step import build_executor, cost_model_of
from megatron_hdp.planner import CostModel
from megatron_hdp.profile.cases import Room, cases_of
from megatron_hdp.profile.fitting import Fit, Measured, Shape, coefficients_of, warnings_of
from megatron_hdp.profile.items import measured_items
from megatron_hdp.profile.measuring import Bench
from megatron_hdp.profile.passes import Fitted, Progress, fitted
from megatron_hdp.runtime.gpu_memory import runtime_bytes
from megatron_hdp.runtime.health import Heartbeat
from megatron_hdp.runtime.timeline import START, Timeline

_COPIES, _CASES = 1, 2  # what the heartbeat calls steps
_UNBOUNDED_BYTES_PER_S = 1e15


@dataclass(frozen=True)
class Profile(Fitted):
    """What was found; the same on every rank."""

    cost_model: CostModel
    room: Room
    place: str
    """Device and ranks, in words."""
    backend: str
    """Whose attention kernels ran."""
    notes: tuple[str, ...]
    """What was not measured, and what stands in its place."""
    items: ItemCostModel | None = None
    """What items cost, of a run with an encoder."""

    def of(self, kind: str, is_held_out: bool) -> list[Measured]:
        """What was measured of one kind of case."""
        kinds = [one for one in self.measured if one.case.kind == kind]
        return [one for one in kinds if one.case.is_held_out == is_held_out]


def run_profile(
    arguments: TrainingArguments, budget_s: float, progress: Progress, *, force: bool = False
) -> Profile:
    """Profiles in a job that was joined (`parallel.join_job`); every rank must call this.

    Args:
        arguments: of the run; hybrid data parallelism is on.
        budget_s: seconds for the measurements, without building the model.
        progress: see `passes.Progress`.
        force: use times that are too noisy, and say so in the cost model.

    Raises:
        ValueError: the configuration does not go with the ranks, or there are too few
            cases to fit, or their times are too noisy.
        RankFailure: communication failed; names the rank to blame.
    """
    # What a rank computes of a micro-batch is the same in one part. What latents that travel cost
    # is added to what is measured here, where a run begins. MTP layers cost what the others do.
    arguments = without_virtual_stages(arguments)
    arguments = replace(arguments, hdp_mla_ring="kv", mtp_num_layers=None)
    timeline = Timeline()
    heartbeat = Heartbeat.of_job(
        timeline,
        stall_timeout_s=arguments.stall_timeout_seconds,
        slow_timeout_s=60.0 * arguments.distributed_timeout_minutes,
    )
    with heartbeat:
        with timeline.span(START):
            parallel.initialise(arguments)
            parallel.set_seeds(arguments.seed)
            tokenizer = build_tokenizer(tokenizer_of(arguments) or arguments.tokenizer_type)
            model = build_gpt(arguments, tokenizer.vocab_size)
            executor = build_executor(arguments, [model], timeline)
        bench = Bench(arguments, executor, tokenizer.vocab_size)
        heartbeat.begin_step(_COPIES)
        host_bytes_per_s = bench.host_bytes_per_s()
        heartbeat.begin_step(_CASES)
        profile = _profiled(arguments, bench, executor, host_bytes_per_s, budget_s, progress, force)
        profile = replace(profile, items=_items(arguments, budget_s))
    parallel.finish()
    return profile


def _profiled(
    arguments: TrainingArguments,
    bench: Bench,
    executor: HdpExecutor,
    host_bytes_per_s: float,
    budget_s: float,
    progress: Progress,
    force: bool,
) -> Profile:
    # bytes and layers are counted; seconds are replaced by what is measured
    plain = replace(
        arguments, hdp_offload="auto", hdp_cost_model=None, hdp_rank_speeds=None, hdp_online=False
    )
    # layers of a stage, of the one with most: runs put in what they plan with
    counted = replace(cost_model_of(plain, executor), num_layers=stage_split(arguments).most)
    layers = arguments.num_layers
    room = _room_of(arguments, counted, layers)
    found = fitted(
        *(bench, cases_of(room), Shape(layers, counted), budget_s, progress),
        on_any_rank=bench.on_any_rank,
        force=force,
    )
    cost_model, notes = _cost_model(
        *(replace(counted, host_bytes_per_s=host_bytes_per_s, doubt=found.doubt), found.fit),
        *(room, arguments),
    )
    cost_model = replace(cost_model, runtime_bytes=runtime_bytes(parallel.compute_device()))
    if found.measurements > 1:
        notes += (f"the times were noisy: measured {found.measurements} times",)
    if cost_model.is_free:
        raise ValueError(f"{found.doubt}: tokens cost nothing, which nobody can plan by")
    if found.doubt:
        notes += (f"written by --force, which every reader of the file says: {found.doubt}",)
    return Profile(
        **vars(found),
        cost_model=cost_model,
        room=room,
        place=_place(room, executor.place.num_tensor_ranks, executor.place.num_stages),
        backend=executor.attention.name,
        notes=(*notes, *warnings_of(found.fit)),
    )


def _items(arguments: TrainingArguments, budget_s: float) -> ItemCostModel | None:
    if arguments.hdp_encoder is None:
        return None
    encoder = load_encoder(
        arguments.hdp_encoder,
        dtype=model_dtype(arguments),
        patches_per_pack=arguments.hdp_encoder_patches,
    )
    device = parallel.compute_device()
    return measured_items(encoder.to(device), device, budget_s / 4)


def _room_of(arguments: TrainingArguments, counted: CostModel, layers: int) -> Room:
    place = parallel.rank_place(arguments)
    of_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return Room(
        tokens_per_rank=arguments.hdp_tokens_per_rank,
        longest=arguments.seq_length,
        ranks=place.num_hdp_ranks,
        ranks_per_node=max(1, of_node // place.num_tensor_ranks),
        multiple=arguments.hdp_slice_multiple * place.token_multiple,
        kv_bytes_per_layer=max(1, round(counted.kv_bytes_per_token / layers)),
        has_experts=arguments.num_experts is not None,
    )


def _cost_model(
    counted: CostModel, found: Fit, room: Room, arguments: TrainingArguments
) -> tuple[CostModel, tuple[str, ...]]:
    """The coefficients, and what was not measured among them."""
    coefficients = coefficients_of(found)
    changes: dict[str, float | int] = dict(coefficients)
    notes = []
    for where in ("intra", "inter"):
        name = f"{where}_node_bytes_per_s"
        if f"{where}_node_hop_s" in coefficients and name not in coefficients:
            changes[name] = _UNBOUNDED_BYTES_PER_S
            notes.append(f"{name} is as good as unbounded: rings took no longer for their bytes")
    if "intra_node_hop_s" not in coefficients:
        notes.append("one rank has no rings: their coefficients are defaults")
    elif "inter_node_hop_s" not in coefficients:
        notes.append("one node: the coefficients between nodes are those within the node")
        changes["inter_node_hop_s"] = changes["intra_node_hop_s"]
        changes["inter_node_bytes_per_s"] = changes["intra_node_bytes_per_s"]
    if room.ranks > 1:
        changes["ranks_per_node"] = room.ranks_per_node
    else:
        notes.append(f"ranks_per_node is the default, {counted.ranks_per_node}")
    ranks, cores = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), len(os.sched_getaffinity(0))
    if parallel.compute_device().type == "cpu" and ranks > cores:
        notes.append(
            f"{ranks} ranks share {cores} cores: one takes up to {ranks / cores:.3g} times as long "
            "while the others work"
        )
    nccl = parallel.nccl_of_rings(arguments) if room.ranks > 1 else None
    channels = nccl.channels(room.ranks, room.ranks_per_node) if nccl is not None else 0
    measured = replace(counted, channels=channels, slowed="", **changes)  # type: ignore[arg-type]
    return measured, tuple(notes)


def _place(room: Room, tensor_ranks: int, stages: int) -> str:
    device, cores = parallel.compute_device(), len(os.sched_getaffinity(0))
    name = f"CPU, {cores} cores, {torch.get_num_threads()} threads a rank"
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    of_devices = f" of {tensor_ranks} x {stages} devices" if tensor_ranks * stages > 1 else ""
    return f"{name}; {room.ranks} HDP rank{'s' * (room.ranks > 1)}{of_devices}"
