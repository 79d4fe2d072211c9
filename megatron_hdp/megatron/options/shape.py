"""The model that a run's options describe: its shape, its job on GPUs, and what a rank costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megatron_hdp.megatron.options.arguments import (
    TrainingArguments,
    head_sizes,
    num_model_chunks,
    planned_layers,
    stage_split,
    with_derived_defaults,
)
from megatron_hdp.megatron.options.checks import check_model
from megatron_hdp.megatron.options.hybrid import (
    ATTENDING,
    DENSE,
    EXPERTS,
    block_behind,
    blocks_of,
)
from megatron_hdp.megatron.options.layer_patterns import check_windows, expert_layers, layer_windows
from megatron_hdp.megatron.options.model_options import (
    MlaOptions,
    ModelOptions,
    MoeOptions,
    PositionOptions,
)
from megatron_hdp.megatron.options.parsing import build_parser
from megatron_hdp.megatron.options.position_checks import check_positions, layers_without_positions
from megatron_hdp.options import OptionError, check_values, from_namespace, yaml_to_argv
from megatron_hdp.planner import CostModel
from megatron_hdp.planner.memory import Job, input_share, kept_after_forward
from megatron_hdp.planner.network import Nccl, following
from megatron_hdp.planner.online import speeds_in
from megatron_hdp.planner.shape import (
    NO_ATTENTION,
    NO_MLP,
    Adapters,
    Attention,
    Layer,
    Mlp,
    ModelShape,
    Router,
    cost_model_of_shape,
)
from megatron_hdp.planner.stages import LayerCosts, stage_weights

_BYTE_VOCABULARY, _LLAMA_3_VOCABULARY = 257, 128_256


def model_shape(arguments: TrainingArguments, vocab_size: int) -> ModelShape:
    """The model, layer by layer; `arguments` have derived defaults, the vocabulary any padding."""
    norm_bias = arguments.normalization == "LayerNorm"

    def layer(
        skips_positions: bool | int, has_experts: bool, window: int | None, block: str
    ) -> Layer:
        attention = _attention(arguments, not skips_positions, window)
        has_attention = bool(set(block) & set(ATTENDING))
        has_mlp = bool(set(block) & {DENSE, EXPERTS})
        return Layer(
            hidden_size=arguments.hidden_size,
            attention=attention if has_attention else NO_ATTENTION,
            mlp=_mlp(arguments, has_experts) if has_mlp else NO_MLP,
            norm_bias=norm_bias,
            num_norms=has_attention + has_mlp,
        )

    skipped = layers_without_positions(arguments) or (0,) * arguments.num_layers
    experts, windows = expert_layers(arguments), layer_windows(arguments)
    behind = block_behind(arguments)
    blocks = blocks_of(arguments) or (behind,) * arguments.num_layers
    behind_has_experts = EXPERTS in behind or experts[-1]
    shape = ModelShape(
        layers=tuple(map(layer, skipped, experts, windows, blocks)),
        hidden_size=arguments.hidden_size,
        vocab_size=vocab_size,
        tied_embeddings=not arguments.untie_embeddings_and_output_weights,
        norm_bias=norm_bias,
        further=(layer(False, behind_has_experts, None, behind),) * (arguments.mtp_num_layers or 0),
    )
    adapters = None
    if arguments.lora_rank is not None:
        adapters = Adapters(arguments.lora_rank, arguments.lora_targets)
    return shape.training(arguments.hdp_frozen, adapters)


def _attention(
    arguments: TrainingArguments, knows_positions: bool, window: int | None
) -> Attention:
    """Of one layer."""
    turns = knows_positions and arguments.position_embedding_type != "none"
    qk_channels, v_channels = head_sizes(arguments)
    latent, turned = {}, arguments.kv_channels
    if arguments.multi_latent_attention:
        turned = arguments.qk_pos_emb_head_dim
        latent = {
            "kv_rank": arguments.kv_lora_rank,
            "q_rank": arguments.q_lora_rank or 0,
            "shared_channels": turned,
        }
    return Attention(
        num_heads=arguments.num_attention_heads,
        num_groups=arguments.num_query_groups,
        qk_channels=qk_channels,
        v_channels=v_channels,
        rotary_channels=int(turned * arguments.rotary_percent) if turns else 0,
        qkv_bias=(arguments.add_bias_linear or arguments.add_qkv_bias) and not latent,
        output_bias=arguments.add_bias_linear,
        qk_norm=arguments.qk_layernorm,
        norm_bias=arguments.normalization == "LayerNorm",
        window=window,
        has_sink=arguments.softmax_type == "learnable",
        **latent,
    )


def _mlp(arguments: TrainingArguments, has_experts: bool) -> Mlp:
    """A layer's MLP, or its mixture of experts."""
    gated = arguments.swiglu or arguments.quick_geglu
    if not has_experts:
        return Mlp(
            ffn_hidden_size=arguments.ffn_hidden_size, gated=gated, bias=arguments.add_bias_linear
        )
    experts = arguments.num_experts or 1
    return Mlp(
        ffn_hidden_size=arguments.moe_ffn_hidden_size or arguments.ffn_hidden_size,
        gated=gated,
        bias=arguments.add_bias_linear,
        num_experts=experts,
        experts_per_token=min(arguments.moe_router_topk, experts),
        router=Router(
            sigmoid=arguments.moe_router_score_function == "sigmoid",
            bias=arguments.moe_router_enable_expert_bias,
            groups=arguments.moe_router_num_groups is not None,
            float32=arguments.moe_router_dtype == "fp32",
        ),
        shared_ffn_hidden_size=arguments.moe_shared_expert_intermediate_size or 0,
        shared_gate=arguments.moe_shared_expert_gate,
    )


def shape_in(path: Path) -> ModelShape:
    """The model that a YAML file of flags describes; keys that say nothing about it are left out.

    Its vocabulary is `vocab_size_of` without a tokenizer's size. Keys that are unknown, missing, or
    do not go together are an `OptionError`.
    """
    parser = build_parser()
    namespace = parser.parse_args(yaml_to_argv(path, parser, skip_others=True))
    namespace.seq_length = namespace.tensor_model_parallel_size = 1  # which a shape has not
    try:
        for group in (ModelOptions, PositionOptions, MlaOptions, MoeOptions):
            check_values(from_namespace(group, namespace))
        arguments = with_derived_defaults(from_namespace(TrainingArguments, namespace))
        check_model(arguments)
        check_positions(arguments)
        check_windows(arguments)
    except OptionError as error:
        raise OptionError(f"{path}: {error}") from None
    return model_shape(arguments, vocab_size_of(arguments))


def planned_weights(arguments: TrainingArguments, vocab_size: int) -> tuple[float, ...] | None:
    """Relative time of every virtual stage, the vocabulary padded; None where all do the same."""
    tokens = min(arguments.hdp_tokens_per_rank, arguments.seq_length)
    shape = model_shape(arguments, vocab_size)
    how = arguments.recompute_granularity, _recompute_modules(arguments)
    costs = LayerCosts.of_shape(shape, tokens, *how)
    return stage_weights(stage_split(arguments), costs)


def padded_vocab_size(vocab_size: int, arguments: TrainingArguments) -> int:
    """`vocab_size` rounded up so that every tensor-parallel rank has an equal share.

    Megatron's multiple grows with the tensor-parallel size. Under HDP it does not unless it must,
    so that a run may continue on another layout as the same model.

    Raises:
        ValueError: ``--vocab-size`` is less than `vocab_size`.
    """
    entries = arguments.vocab_size or vocab_size
    if entries < vocab_size:
        raise ValueError(
            f"--vocab-size {entries}: expected at least the {vocab_size} entries of the tokenizer: "
            "raise it or leave it out"
        )
    numbers = arguments.make_vocab_size_divisible_by, arguments.tensor_model_parallel_size
    multiple = math.lcm(*numbers) if arguments.hybrid_data_parallel else math.prod(numbers)
    return -(-entries // multiple) * multiple


def vocab_size_of(arguments: TrainingArguments, vocab_size: int | None = None) -> int:
    """Rows of the embedding before any tokenizer is loaded: LLaMA 3's where nothing gives them.

    `vocab_size` are the tokenizer's entries, where they are known; see `padded_vocab_size`.
    """
    entries = vocab_size or arguments.vocab_size
    if entries is None:
        entries = _BYTE_VOCABULARY if arguments.tokenizer_type == "byte" else _LLAMA_3_VOCABULARY
    return padded_vocab_size(entries, arguments)


def job_of(arguments: TrainingArguments, num_gpus: int, vocab_size: int) -> Job:
    """The job of a run on so many GPUs; the vocabulary is padded, derived defaults filled in."""
    return Job(
        shape=model_shape(arguments, vocab_size),
        num_gpus=num_gpus,
        tensor_ranks=arguments.tensor_model_parallel_size,
        sequence_parallel=arguments.sequence_parallel,
        stages=arguments.pipeline_model_parallel_size,
        model_chunks=num_model_chunks(arguments),
        stage_layers=stage_split(arguments).layers,
        expert_ranks=arguments.expert_model_parallel_size,
        expert_tensor_ranks=arguments.expert_tensor_parallel_size if arguments.num_experts else 1,
        bf16=arguments.bf16,
        fp64=arguments.fp64,
        distributed_optimizer=arguments.use_distributed_optimizer,
        fused_loss=arguments.hdp_fused_loss,
        recompute=arguments.recompute_granularity,
        recompute_modules=_recompute_modules(arguments),
        recompute_method=arguments.recompute_method,
        recompute_num_layers=arguments.recompute_num_layers or 1,
        tokens_per_rank=arguments.hdp_tokens_per_rank,
        streams=arguments.streams,
        stream_sums_wide=arguments.hdp_stream_sums == "float32",
        keeps_latents=arguments.multi_latent_attention and arguments.hdp_mla_ring != "kv",
        runs_parts=arguments.sequence_parts > 1,
        double_rings=arguments.double_rings and _ranks_per_node(arguments) > 1,
    )


def _ranks_per_node(arguments: TrainingArguments) -> int:
    """HDP ranks of a node, as the cost model says that the run plans with."""
    if arguments.cost_model_file is not None:
        return CostModel.from_json(arguments.cost_model_file).ranks_per_node
    return max(1, CostModel.ranks_per_node // arguments.tensor_model_parallel_size)


def _recompute_modules(arguments: TrainingArguments) -> tuple[str, ...]:
    """Those of selective recomputation; without the flag Megatron's default."""
    given = arguments.recompute_modules
    return ("core_attn",) if given is None else tuple(given)


def cost_model_of_job(
    arguments: TrainingArguments,
    job: Job,
    activation_bytes_per_token: float | None = None,
    nccl: Nccl | None = None,
    rank_speeds: Sequence[float] | None = None,
) -> CostModel:
    """The cost model that a run plans with, as if keys and values travelled.

    Measured (``--hdp-cost-model``) or counted from the shape, with the speeds of
    ``--hdp-rank-speeds``, unless `rank_speeds` are given. `activation_bytes_per_token`, of all
    layers on all tensor ranks, were counted on the model as it was built; else the formula of
    `planner.memory` gives them. With `nccl`, which sends around rings, bandwidths follow the
    channels that it gives them.

    Raises:
        ValueError: the measured file is about other layers; or a speed is no number, or not one a
            rank.
    """
    if arguments.cost_model_file is not None:
        found = _with_layers(CostModel.from_json(arguments.cost_model_file), arguments, job)
    else:
        kept = activation_bytes_per_token
        if kept is None:
            kept = kept_after_forward(job) * job.shape.num_layers * job.tensor_ranks
        found = cost_model_of_shape(
            job.shape,
            value_bytes=job.value_bytes,
            tensor_ranks=job.tensor_ranks,
            recomputed_attention=1.0
            if "core_attn" in job.recomputed_modules
            else job.recomputed_share,
            recomputed_layers=job.recomputed_share,
            recomputed_modules=job.recomputed_modules,
            activation_bytes_per_token=kept,
        )
        found = replace(found, num_layers=planned_layers(arguments))
    keeps_inputs = arguments.hdp_recompute == "auto" or (arguments.streams and job.stages > 1)
    if keeps_inputs and not found.input_share:
        found = replace(found, input_share=input_share(job, found.num_layers))
    found = replace(found, sum_ratio=job.stream_sum_ratio)
    found = following(found, nccl, job.hdp_ranks, job.tensor_ranks)
    found = replace(found, double_rings=arguments.double_rings)
    speeds = known_speeds(arguments, job.hdp_ranks) if rank_speeds is None else rank_speeds
    return replace(found, rank_speeds=tuple(speeds))


def known_speeds(arguments: TrainingArguments, hdp_ranks: int) -> tuple[float, ...]:
    """The speeds of ``--hdp-rank-speeds``, which must be one a rank; empty: it is not given.

    Raises:
        ValueError: a speed is no number, or not one a rank.
    """
    path = arguments.hdp_rank_speeds
    if path is None:
        return ()
    text = path.read_text(encoding="utf-8-sig", errors="replace")
    lines = ((number, line.strip()) for number, line in enumerate(text.split("\n"), 1))
    ranks = f"the run's {hdp_ranks} HDP ranks"
    return speeds_in((line for line in lines if line[1]), path, hdp_ranks, ranks)


def _with_layers(measured: CostModel, arguments: TrainingArguments, job: Job) -> CostModel:
    """A measured cost model with the layers that plans count; 1 layer counts as not given."""
    is_given = measured.num_layers != 1 or arguments.hdp_offload != "off"
    if not is_given and not measured.counts_layers:
        return measured
    if measured.num_layers != job.split.most:
        raise ValueError(
            f"--hdp-cost-model {arguments.cost_model_file} has num_layers {measured.num_layers}, "
            f"expected the {job.split.most} layers of a pipeline stage of this model (of the "
            "largest stage, if they differ): measure the cost model again, or correct num_layers"
        )
    return replace(measured, num_layers=planned_layers(arguments))
