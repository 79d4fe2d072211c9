"""Megatron's GPT with the parts that HDP replaces: attention, positions, norms, experts, loss.

Design: `docs/design/mtp.md`, `docs/design/moe.md`, `docs/design/mla.md`.
"""

from megatron_hdp.megatron.model.attention import HdpCoreAttention, HdpPackedSeqParams
from megatron_hdp.megatron.model.building import (
    SequenceParallelNorm,
    build_chunks,
    build_gpt,
    check_recomputation,
    model_dtype,
)
from megatron_hdp.megatron.model.encoder import add_encoder, add_up_gradients, encoder_of
from megatron_hdp.megatron.model.frozen import (
    choose_trained,
    require_trained,
    require_whole_layers,
)
from megatron_hdp.megatron.model.fused_loss import (
    EndsInLoss,
    FusedLossHybrid,
    FusedLossModel,
    head_gives_values,
)
from megatron_hdp.megatron.model.hybrid import attends, hybrid_class, require_known_blocks
from megatron_hdp.megatron.model.known import PASSES, give_megatrons_passes
from megatron_hdp.megatron.model.last_stage import LastStage
from megatron_hdp.megatron.model.lora import add_adapters
from megatron_hdp.megatron.model.mla import HdpMlaSelfAttention
from megatron_hdp.megatron.model.moe import (
    HdpMoeTransformerLayer,
    let_biases_be_added,
    without_shared_experts,
)
from megatron_hdp.megatron.model.mtp import FurtherTokens, HdpMtpLayer, further_layers
from megatron_hdp.megatron.model.rotary import (
    OwnPositionRotaryEmbedding,
    OwnPositionYarnEmbedding,
    at_own_positions,
    fused_kernel_can_count,
    fused_kernel_is_there,
    give_own_positions,
    turn_by_axes,
)
from megatron_hdp.megatron.model.router import HdpRouter
from megatron_hdp.megatron.model.rows import FIRST_MARK, require_layers, rows_for_marks
from megatron_hdp.megatron.model.taking import derived, require_own

__all__ = [
    "FIRST_MARK",
    "PASSES",
    "EndsInLoss",
    "FurtherTokens",
    "FusedLossHybrid",
    "FusedLossModel",
    "HdpCoreAttention",
    "HdpMlaSelfAttention",
    "HdpMoeTransformerLayer",
    "HdpMtpLayer",
    "HdpPackedSeqParams",
    "HdpRouter",
    "LastStage",
    "OwnPositionRotaryEmbedding",
    "OwnPositionYarnEmbedding",
    "SequenceParallelNorm",
    "add_adapters",
    "add_encoder",
    "add_up_gradients",
    "at_own_positions",
    "attends",
    "build_chunks",
    "build_gpt",
    "check_recomputation",
    "choose_trained",
    "derived",
    "encoder_of",
    "further_layers",
    "fused_kernel_can_count",
    "fused_kernel_is_there",
    "give_megatrons_passes",
    "give_own_positions",
    "head_gives_values",
    "hybrid_class",
    "let_biases_be_added",
    "model_dtype",
    "require_known_blocks",
    "require_layers",
    "require_own",
    "require_trained",
    "require_whole_layers",
    "rows_for_marks",
    "turn_by_axes",
    "without_shared_experts",
]
