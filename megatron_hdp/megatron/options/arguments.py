"""All options of a training run, and what follows from them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_hdp.megatron.options.groups import (
    DataOptions,
    OptimizationOptions,
    ParallelOptions,
    RunOptions,
)
from megatron_hdp.megatron.options.model_options import (
    MlaOptions,
    ModelOptions,
    MoeOptions,
    MtpOptions,
    PositionOptions,
)
from megatron_hdp.options import HdpOptions, MediaOptions, OptionError, PreferenceOptions
from megatron_hdp.planner.parts import auto_parts
from megatron_hdp.planner.stages import StageSplit, parts_of, waiting_passes
from megatron_hdp.strategies import AUTO, STRATEGIES

ON_PIPELINES = (AUTO, *(one.name for one in STRATEGIES if one.on_pipelines))
"""Strategies whose plans run on pipeline stages as they are, without padding."""


@dataclass(frozen=True, kw_only=True)
class TrainingArguments(
    HdpOptions,
    MediaOptions,
    PreferenceOptions,
    RunOptions,
    DataOptions,
    ParallelOptions,
    OptimizationOptions,
    MlaOptions,
    MoeOptions,
    MtpOptions,
    PositionOptions,
    ModelOptions,
):
    """All options of the training command, checked, defaults that depend on others filled in."""

    @property
    def copies_shards(self) -> bool:
        """Whether each rank's shard of the optimizer has a copy at another rank."""
        is_spread = self.hdp_survive and self.use_distributed_optimizer
        return is_spread and self.hdp_optimizer_copies == "on"

    @property
    def host_memory_bytes(self) -> float | None:
        """That a micro-batch may fill on all stages of an HDP rank, with as many others as wait."""
        if self.hdp_host_memory_gb is None:
            return None
        chunks, stages = num_model_chunks(self), self.pipeline_model_parallel_size
        num_gpus = stages * self.tensor_model_parallel_size
        alive = waiting_passes(0, stages, chunks) / chunks
        return 1e9 * self.hdp_host_memory_gb * num_gpus / alive

    @property
    def sequence_parts(self) -> int:
        """The most parts of a micro-batch; 1 where none may run in parts."""
        if self.hdp_sequence_parts is not None:
            return self.hdp_sequence_parts
        if self.hdp_strategy not in ON_PIPELINES:
            return 1
        return auto_parts(self.pipeline_model_parallel_size)

    @property
    def double_rings(self) -> bool:
        """Whether rings over several nodes are double."""
        if self.hdp_double_rings == "auto":
            return self.sequence_parts > 1
        return self.hdp_double_rings == "on"


GROUPS = (
    HdpOptions,
    MediaOptions,
    PreferenceOptions,
    ModelOptions,
    PositionOptions,
    MtpOptions,
    MlaOptions,
    MoeOptions,
    OptimizationOptions,
    ParallelOptions,
    DataOptions,
    RunOptions,
)

_TOKENIZERS = {
    "HuggingFaceTokenizer": "hf:",
    "SFTTokenizer": "hf:",
    "TikTokenizer": "tiktoken:",
}


def expert_domain_size(args: TrainingArguments) -> int:
    """HDP ranks that enter every exchange of tokens together; 1 where experts stay inside one.

    Ranks ``k * size`` to ``k * size + size - 1`` of the HDP dimension form a domain: they must run
    equally many micro-batches, layer by layer in step.
    """
    ranks = args.expert_model_parallel_size * args.expert_tensor_parallel_size
    return max(1, ranks // args.tensor_model_parallel_size)


def head_sizes(args: TrainingArguments) -> tuple[int, int]:
    """Channels of a head: of queries and keys, and of values."""
    if args.multi_latent_attention:
        return args.qk_head_dim + args.qk_pos_emb_head_dim, args.v_head_dim
    return args.kv_channels, args.kv_channels


def num_model_chunks(args: TrainingArguments) -> int:
    """Parts of the model on each pipeline rank (virtual stages); 1 under the plain schedule."""
    stages = args.pipeline_model_parallel_size
    if args.pipeline_model_parallel_layout is not None:
        return max(1, len(parts_of(args.pipeline_model_parallel_layout)) // stages)
    if args.num_virtual_stages_per_pipeline_rank is not None:
        return args.num_virtual_stages_per_pipeline_rank
    if args.num_layers_per_virtual_pipeline_stage is None:
        return 1
    return max(1, counted_layers(args) // stages // args.num_layers_per_virtual_pipeline_stage)


def counted_layers(args: TrainingArguments) -> int:
    """Layers of the model, with embedding and loss where flags say that they count as one each."""
    ends = args.account_for_embedding_in_pipeline_split + args.account_for_loss_in_pipeline_split
    return (args.num_layers or 1) + ends


def stage_split(args: TrainingArguments) -> StageSplit:
    """Layers of every virtual stage; an `OptionError` if the flags describe none."""
    return StageSplit.of(
        args.num_layers or 1,
        args.pipeline_model_parallel_size,
        num_model_chunks(args),
        first=args.decoder_first_pipeline_num_layers,
        last=args.decoder_last_pipeline_num_layers,
        embedding=args.account_for_embedding_in_pipeline_split,
        loss=args.account_for_loss_in_pipeline_split,
        layout=args.pipeline_model_parallel_layout,
    )


def without_virtual_stages(args: TrainingArguments) -> TrainingArguments:
    """The same run with each stage's layers in one part, under the plain schedule."""
    layout = args.pipeline_model_parallel_layout
    if layout is not None:
        layers = stage_split(args).of_stages
        layout = f"E{'|'.join('t' * number for number in layers)}L"
    return replace(
        args,
        num_layers_per_virtual_pipeline_stage=None,
        num_virtual_stages_per_pipeline_rank=None,
        pipeline_model_parallel_layout=layout,
    )


def planned_layers(args: TrainingArguments) -> int:
    """Layers of a rank that plans count with: one number on all ranks, however stages differ.

    The most that a stage has. With offload the fewest: equation 3 keeps two layers' activations on
    the device, the greatest share where layers are few, so what fits there fits everywhere. (Two
    or fewer are refused; a profile, which offloads nothing, may have a stage of none.)
    """
    split = stage_split(args)
    return split.most if args.hdp_offload == "off" else max(1, split.fewest)


def tokenizer_of(args: TrainingArguments) -> str | None:
    """The run's tokenizer as `data.build_tokenizer` names it; None if it is another kind."""
    if args.tokenizer_type == "byte":
        return "byte"
    prefix = _TOKENIZERS.get(args.tokenizer_type)
    return None if prefix is None else f"{prefix}{args.tokenizer_model}"


def with_derived_defaults(args: TrainingArguments) -> TrainingArguments:
    """Fill in what Megatron derives from other flags, in Megatron's way."""
    hidden, heads = args.hidden_size or 0, args.num_attention_heads or 1
    if args.kv_channels is None and hidden % heads:
        raise OptionError(
            f"--hidden-size {hidden} is not a multiple of --num-attention-heads {heads}: "
            "change one of them or give --kv-channels"
        )
    ffn_hidden_size = hidden * 8 // 3 // 64 * 64 if args.swiglu else 4 * hidden
    grouped = args.group_query_attention or args.num_query_groups is not None
    decay_iters = args.lr_decay_iters or args.train_iters or 1
    moe_ffn_hidden_size = args.moe_ffn_hidden_size
    if args.num_experts is not None and moe_ffn_hidden_size is None:
        moe_ffn_hidden_size = args.ffn_hidden_size or max(ffn_hidden_size, 64)
    warmup_iters = args.lr_warmup_iters or int((args.lr_warmup_fraction or 0) * decay_iters)
    return replace(
        args,
        ffn_hidden_size=args.ffn_hidden_size or max(ffn_hidden_size, 64),
        kv_channels=args.kv_channels or hidden // heads,
        group_query_attention=grouped,
        num_query_groups=(args.num_query_groups or 1) if grouped else heads,
        max_position_embeddings=args.max_position_embeddings or args.seq_length,
        lr_decay_iters=decay_iters,
        lr_warmup_iters=warmup_iters,
        stall_timeout_seconds=args.stall_timeout_seconds or 60.0 * args.distributed_timeout_minutes,
        moe_ffn_hidden_size=moe_ffn_hidden_size,
        expert_tensor_parallel_size=(
            args.expert_tensor_parallel_size or args.tensor_model_parallel_size
        ),
        sequence_parallel=args.sequence_parallel and args.tensor_model_parallel_size > 1,
    )
