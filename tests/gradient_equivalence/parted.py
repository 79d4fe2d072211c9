"""Rows whose micro-batches run in parts, and rows of streams."""

from dataclasses import replace

from tests.gradient_equivalence.case import (
    LENGTHS,
    PP2,
    TP2,
    TP2_SP,
    Case,
    emptied_outputs,
    joined,
)
from tests.gradient_equivalence.settings import (
    BLOCK,
    IN_PARTS,
    MHA,
    MQA,
    MTP,
    NO_BIAS,
    PP4,
    RECOMPUTE,
    SHARDED,
    layers,
    recomputing,
)


def parted() -> dict[str, Case]:
    rows = {
        "pp2": (4, PP2),
        "pp2-tp2-sp": (8, joined(MHA, PP2, TP2_SP)),
        "pp2-overlap-recompute": (4, joined(PP2, SHARDED, RECOMPUTE)),
        "pp4-mqa": (8, joined(MQA, PP4, layers(4))),
        "pp2-full-recompute-tp2": (8, joined(PP2, TP2, RECOMPUTE)),
        "pp2-block": (4, joined(PP2, layers(4), BLOCK)),
        "pp2-modules": (4, joined(PP2, NO_BIAS, recomputing("core_attn", "layernorm", "mlp"))),
        "pp2-mtp": (4, joined(PP2, MTP)),
        "pp2-mtp-recompute": (4, joined(PP2, MTP, RECOMPUTE)),
        "pp2-mtp-tp2-sp-modules": (8, joined(PP2, MTP, TP2_SP, recomputing("layernorm"))),
        "pp2-logits": (4, joined(PP2, {"hdp_fused_loss": False})),
    }
    cases = {
        f"parts/{name}": Case(
            *(ranks, settings | IN_PARTS, (), 4, LENGTHS * 2), around=emptied_outputs
        )
        for name, (ranks, settings) in rows.items()
    }
    return cases | {"parts/pp2-corrupt": replace(cases["parts/pp2"], corrupt=(4, 7, 11))}


def streams() -> dict[str, Case]:
    """Sequences of up to 16 capacities of 32 tokens, which no ring of the row holds."""
    rows = {
        "alone": (1, {}),
        "rings": (4, {}),
        "tp2-sp": (4, joined(MHA, TP2_SP)),
        "recompute-distributed-optimizer": (2, joined(SHARDED, RECOMPUTE)),
        "selective": (2, recomputing("core_attn")),
        "logits-tied": (2, joined(MHA, {"hdp_fused_loss": False})),
        "pp2": (4, joined(PP2, {"hdp_sequence_parts": 2})),
    }
    return {
        f"streams/{name}": Case(
            *(ranks, settings | {"hdp_tokens_per_rank": 32}, (), 3), lengths=LENGTHS, streams=16
        )
        for name, (ranks, settings) in rows.items()
    }
