"""What ``check`` finds: degrees first, then the longest sequence, a planned step and memory."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from megatron_hdp.cli.checking.encoder import (
    EncoderForecast,
    encoder_of,
    encodes_in_gaps,
    fitting_rows,
    in_gaps,
    with_encoder,
    with_encoding,
)
from megatron_hdp.cli.checking.finding import Finding, Tried, best_of
from megatron_hdp.cli.checking.gpus import degree_refusals, job_of, training_refusals
from megatron_hdp.cli.checking.planned_step import (
    cost_model_of,
    plan_longest,
    plan_step,
    run_setting,
)
from megatron_hdp.megatron.options import parse_arguments, virtual_stage_choices
from megatron_hdp.options import PLANNER_FLAGS, OptionError, no_effect
from megatron_hdp.planner import CostModel, Plan, told_as
from megatron_hdp.planner.memory import (
    RESERVE,
    Job,
    copies_bytes,
    kept_of_stream,
    most_tokens_per_rank,
    shard_bytes,
    stage_memories,
    waiting_activations,
)
from megatron_hdp.simulator.execution import Setting

if TYPE_CHECKING:
    from megatron_hdp.megatron.options import TrainingArguments


def check(
    configs: Sequence[str],
    *,
    num_gpus: int,
    gpu_memory_bytes: float,
    preset: str,
    vocab_size: int | None = None,
    host_memory_bytes: float | None = None,
    gpus_per_node: int = 8,
    runtime_bytes: float | None = None,
    items: str | None = None,
) -> Finding:
    """Check one configuration of YAML files, of which later ones win, with a preset's lengths.

    The vocabulary's size is by default that of the tokenizer (byte) or LLaMA 3's; the memory of a
    node is checked if it is given. `runtime_bytes` are what CUDA, libraries and NCCL hold of a GPU:
    given, else those of the cost model, else assumed. `items` is a file with the sizes of a step's
    pictures.
    """
    found = Finding(
        configs=tuple(configs),
        num_gpus=num_gpus,
        gpu_memory_bytes=gpu_memory_bytes,
        host_memory_bytes=host_memory_bytes,
        gpus_per_node=gpus_per_node,
        runtime_bytes=runtime_bytes,
    )
    argv = [argument for path in configs for argument in ("--config", path)]
    try:
        # where the data lies is not part of what is checked
        arguments = parse_arguments([*argv, "--hybrid-data-parallel", "--data-path", "unused"])
    except OptionError as error:
        found.refusals.append(str(error))
        return found
    found.refusals += degree_refusals(arguments, num_gpus)
    if found.refusals:
        return found
    try:
        encoder = encoder_of(arguments)
    except ValueError as error:
        found.refusals.append(str(error))
        return found
    if encoder is None and items is not None:
        raise no_effect("--items", "--hdp-encoder")
    untouched = replace(found, context_tokens=arguments.seq_length)

    def examined(changed: "TrainingArguments") -> Finding:
        job, forecast, beside = job_of(changed, num_gpus, vocab_size), None, None
        if encoder is not None:
            job, forecast = with_encoder(job, changed, encoder, items, gpus_per_node)
            if items is not None and encodes_in_gaps(changed, job):
                beside = partial(in_gaps, forecast, job, changed, encoder, items, gpus_per_node)
        refusals = training_refusals(changed, job.shape, encoder)
        given = replace(untouched, job=job, encoder=forecast, refusals=refusals)
        return _examined(given, changed, job, preset, beside)

    found = examined(arguments)
    if found.job and found.step:
        own = found.job.model_chunks
        for number, changed in virtual_stage_choices(arguments).items():
            other = found if number == own else examined(changed)
            found.virtual_stages.append(_tried(other, number))
        found.best_virtual_stages = best_of(found.virtual_stages, own)
    return found


def _examined(
    given: Finding,
    arguments: "TrainingArguments",
    job: Job,
    preset: str,
    beside: Callable[[Plan, Setting], EncoderForecast] | None,
) -> Finding:
    """Plan and memory of a run whose degrees are right.

    `beside` says what an encoder adds to a step with this plan.
    """
    found = replace(given, stages=[], virtual_stages=[])
    cost_model = _plan(found, arguments, job, preset, beside)
    measured = found.runtime_bytes or (cost_model and cost_model.runtime_bytes)
    found.job = replace(job, runtime_bytes=measured or None)
    if arguments.copies_shards and job.hdp_ranks > 1:
        found.copies_bytes = copies_bytes(shard_bytes(job))
    _add_memory(found, found.job, cost_model)
    return found


def _tried(found: Finding, number: int) -> Tried:
    assert found.job is not None and found.memory is not None
    return Tried(
        virtual_stages=number,
        layers=tuple(sorted(set(found.job.split.layers))),
        needed_bytes=found.memory.total,
        fits=found.is_sound,
        efficiency=found.step.efficiency if found.step else None,
        step_s=found.step.step_s if found.step else None,
    )


def _plan(
    found: Finding,
    arguments: "TrainingArguments",
    job: Job,
    preset: str,
    beside: Callable[[Plan, Setting], EncoderForecast] | None,
) -> CostModel | None:
    """Plans a step; the cost model by which it did, unless that is refused."""
    cost_model = None
    try:
        with told_as(PLANNER_FLAGS):
            cost_model = cost_model_of(arguments, job)
            found.warning = cost_model.warning
            setting = run_setting(arguments, job, cost_model)
            longest = plan_longest(setting, arguments.hdp_strategy)
            host_parts = longest.host_parts_of(0)
            if longest.is_stream[0] and host_parts:
                of_parts = int(longest.lengths[0]) * host_parts // int(longest.parts_of_each[0])
                found.streamed_tokens = -(-of_parts // len(longest.ranks))
            made, found.step = plan_step(arguments, job, setting, preset)
        if beside is not None:
            found.encoder = beside(made, setting)
        if found.encoder is not None:
            found.step = with_encoding(found.step, found.encoder, job.num_gpus)
    except ValueError as error:
        found.refusals.append(
            f"--seq-length {arguments.seq_length:,} on {job.hdp_ranks:,} HDP ranks: {error}"
        )
    return cost_model


def _longest_stream(job: Job, cost_model: CostModel | None, of_gpu: float) -> float:
    """Tokens on a rank of the longest stream, with so many bytes of host memory a GPU.

    The device keeps keys and sums of others in half of the capacity: parts take the other half
    (`csrc/planner/base/stream.hpp`). On stages of a pipeline it also keeps what all parts came
    with.
    """
    on_host = of_gpu / kept_of_stream(job)
    if cost_model is None or not cost_model.activation_bytes_per_token:
        return on_host
    half, inputs = job.tokens_per_rank / 2, 0.0
    if job.stages > 1:
        inputs = job.model_chunks * cost_model.input_share / cost_model.num_layers
    if inputs * on_host > half:
        return half / inputs
    whole = replace(job, stages=1, model_chunks=1, stage_layers=())
    kept = kept_of_stream(whole, job.tokens_per_rank // 2) * job.tensor_ranks
    kept /= cost_model.activation_bytes_per_token
    return on_host + (half - inputs * on_host) / (kept + inputs)


def _add_memory(found: Finding, job: Job, cost_model: CostModel | None) -> None:
    most_tokens = max(job.tokens_per_rank, found.step.most_tokens if found.step else 0)
    found.stages = stage_memories(job, most_tokens)
    memory = found.memory = max(found.stages, key=lambda one: one.total)
    # what a micro-batch has above a capacity's worth waits on the host (equation 3)
    waiting = max(waiting_activations(job, stage) for stage in range(job.stages))
    found.host_bytes = max(
        waiting * (most_tokens - job.tokens_per_rank), kept_of_stream(job) * found.streamed_tokens
    )
    if job.streams and found.host_memory_bytes is not None:
        of_gpu = (1 - RESERVE) * found.host_memory_bytes / found.node_gpus
        of_gpu = max(0.0, of_gpu - found.copies_bytes - found.parked_bytes)
        held = _longest_stream(job, cost_model, of_gpu)
        found.longest_stream_tokens = int(held) * job.hdp_ranks
    _check_host(found, job)
    usable = found.gpu_memory_bytes - found.reserve_bytes
    if memory.total <= usable:
        return
    fitting = most_tokens_per_rank(job, usable)
    remedy = "raise --tensor-model-parallel-size or --pipeline-model-parallel-size"
    if not fitting and found.encoder is not None and memory.total - memory.pack < usable:
        patches = found.encoder.patches_per_pack
        fitting_patches = int(patches * (1 - (memory.total - usable) / memory.pack))
        remedy = f"--hdp-encoder-patches {fitting_patches:,} fits, if no picture has more"
    if not fitting and found.encoder is not None and memory.total - memory.rows < usable:
        rows = fitting_rows(found.encoder, usable - memory.total + memory.rows)
        remedy = f"--hdp-encoder-rows {rows:,} fits, if no micro-batch has more"
    if fitting >= job.tensor_ranks:
        remedy = (
            f"--hdp-tokens-per-rank {min(fitting, job.tokens_per_rank):,} fits"
            f"{'' if most_tokens == job.tokens_per_rank else ' without --hdp-offload'}, or {remedy}"
        )
    found.refusals.append(
        f"--hdp-tokens-per-rank {job.tokens_per_rank:,}: a GPU of stage {memory.stage} needs "
        f"{memory.total / 1e9:.1f} GB, expected at most {usable / 1e9:.1f} GB "
        f"({found.gpu_memory_bytes / 1e9:.1f} less {RESERVE:.0%} reserve): {remedy}"
    )


def _check_host(found: Finding, job: Job) -> None:
    """Refuses what a node's memory cannot hold; 5% of it are left to others, as of a GPU's."""
    if found.host_memory_bytes is None:
        return
    usable = (1 - RESERVE) * found.host_memory_bytes
    if found.node_host_bytes <= usable:
        return
    of_gpu = usable / found.node_gpus - found.copies_bytes - found.parked_bytes
    remedy = f"set --hdp-host-memory-gb {math.floor(of_gpu / 1e8) / 10}, or --hdp-offload off"
    of_stream = kept_of_stream(job) * found.streamed_tokens
    if found.longest_stream_tokens is not None and of_stream > of_gpu:
        remedy = f"lower --seq-length to {found.longest_stream_tokens:,}, or use more nodes"
    if of_gpu <= 0:
        remedy = "use more HDP ranks, or set --hdp-optimizer-copies off"
    copies = ["--hdp-optimizer-copies on"] if found.copies_bytes else []
    rows = ["--hdp-encoder-rows"] if found.parked_bytes else []
    what = " and ".join((["--hdp-offload auto"] if found.host_bytes else []) + rows + copies)
    found.refusals.append(
        f"{what}: {found.node_gpus} GPUs of a node x "
        f"{found.node_host_bytes / found.node_gpus / 1e9:.1f} GB = "
        f"{found.node_host_bytes / 1e9:,.1f} GB may lie in its memory, expected at most "
        f"{usable / 1e9:,.1f} GB ({found.host_memory_bytes / 1e9:,.1f} less {RESERVE:.0%} "
        f"reserve): {remedy}"
    )
