"""Rows whose micro-batches run in parts, rows of streams, and of recomputed micro-batches."""

from dataclasses import replace

from megatron_hdp.runtime.offload.host_pool import HostPool
from tests.gradient_equivalence.case import (
    ACROSS,
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
    EXPERT_MODELS,
    IN_PARTS,
    LONG,
    MHA,
    MQA,
    MTP,
    NO_BIAS,
    OFF_BY_ONE,
    PP4,
    RECOMPUTE,
    SHARDED,
    SHORT,
    SINK,
    every,
    layers,
    recomputing,
    virtual,
)
from tests.support.gradients import EXPERTS
from tests.support.mla import MLA


class ReservedPool(HostPool):
    """Of small slabs; fails where a step wants more of the host than was reserved for it."""

    def __init__(self, pin):
        super().__init__(1 << 12, pin)

    def _note_late(self, wanted):
        raise AssertionError(f"{wanted} bytes beyond the {self.held_bytes} that were reserved")


RESERVED = (("megatron_hdp.runtime.offload.activation_offload.HostPool", ReservedPool),)
KEYS, QUERIES = (
    (("megatron_hdp.runtime.ring.dense.queries_travel", lambda *_, travel=travel: travel),)
    for travel in (False, True)
)
DOUBLE = (
    (
        "megatron_hdp.runtime.ring.comm.RingComm.group_size",
        lambda self, ring: {4: 2, 6: 3}.get(len(ring), 0),
    ),
)
"""Rings of four and six ranks are double, whatever their nodes are."""
MADE = (
    (
        "megatron_hdp.runtime.attention.several.AttentionByLatent.made_heads",
        lambda self, layout, num_heads: (sum(layout.ring_lengths) // 12) % num_heads,
    ),
)
"""Keys and values of some heads travel made, of other numbers in other rings."""
BY_STREAM = {"hdp_long_sequence": "stream"}
LATENT, KV = ({"hdp_mla_ring": way} for way in ("latent", "kv"))


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
        "windows": (6, joined(PP2, SHORT, SINK)),
        "some-windows": (6, joined(PP2, LONG, OFF_BY_ONE, every("2"), layers(4), RECOMPUTE)),
        "queries": (6, joined(MQA, PP2), QUERIES),
        "keys-tp2-sp": (8, joined(MHA, PP2, TP2_SP, SINK), KEYS),
        "kv-queries": (6, joined(MLA, PP2, KV), QUERIES),
        "kv-keys": (6, joined(MLA, PP2, KV), KEYS),
        "latent-queries": (6, joined(MLA, PP2, LATENT), QUERIES),
        "latent-keys": (8, joined(MLA, PP2, LATENT, TP2_SP, RECOMPUTE), KEYS),
        "latent-made": (6, joined(MLA, PP2, LATENT), KEYS, MADE),
        "latent-made-tp2-sp": (8, joined(MLA, PP2, LATENT, TP2_SP, RECOMPUTE), KEYS, MADE),
        "latent-made-double": (8, joined(MLA, PP2, LATENT), KEYS, MADE, DOUBLE),
        "double-queries": (8, joined(MQA, PP2), QUERIES, DOUBLE),
        "double-keys-recompute": (8, joined(MHA, PP2, RECOMPUTE, SINK), KEYS, DOUBLE),
    }
    stages = PP2 | layers(4) | {"moe_layer_freq": "[0]+[1]*3"}
    dense_last = layers(4) | {"moe_layer_freq": "[1,0]*2"}
    four = {"expert_model_parallel_size": 4, "expert_tensor_parallel_size": 1}
    rows |= {
        f"experts-{name}": (ranks, joined(EXPERTS, *settings))
        for name, (ranks, *settings) in {
            "rings": (6, PP2),
            "across": (4, EXPERT_MODELS["deepseek"], stages, ACROSS, SHARDED),
            "across-recompute": (8, EXPERT_MODELS["qwen2-moe"], dense_last, PP2, ACROSS, RECOMPUTE),
            "tensor": (8, EXPERT_MODELS["glm"], stages, TP2_SP, four, SHARDED),
        }.items()
    }
    rows |= {
        "virtual": (4, virtual(2)),
        "virtual-recompute-tp2-sp": (8, joined(MHA, virtual(3), TP2_SP, RECOMPUTE)),
        "virtual-stages-4": (8, joined(MQA, virtual(2, 4), SHARDED)),
        "virtual-experts": (4, joined(EXPERTS, EXPERT_MODELS["glm"], virtual(2), stages, ACROSS)),
    }
    cases = {
        f"parts/{name}": Case(
            *(ranks, settings | IN_PARTS, (), 4, LENGTHS * 2),
            around=emptied_outputs,
            patches=sum(patches, ()),
        )
        for name, (ranks, settings, *patches) in rows.items()
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
        "pp2": (4, joined(PP2, BY_STREAM)),
        "mtp": (2, joined(MTP)),
        "mtp-recompute": (2, joined(MTP, RECOMPUTE)),
        "windows": (2, joined(SHORT, SINK)),
        "some-windows": (3, joined(LONG, OFF_BY_ONE, every("2"), layers(4))),
        "latent": (2, joined(MLA, LATENT)),
        "kv": (2, joined(MLA, KV)),
        "experts": (2, joined(EXPERTS)),
        "sums-rings": (4, {"hdp_stream_sums": "model"} | BY_STREAM),
        "experts-shared": (2, joined(EXPERTS, EXPERT_MODELS["deepseek"])),
        "experts-across": (2, joined(EXPERTS, EXPERT_MODELS["deepseek"], ACROSS, BY_STREAM)),
        "experts-across-rings": (4, joined(EXPERTS, EXPERT_MODELS["glm"], ACROSS, BY_STREAM)),
        "experts-across-pp2": (8, joined(EXPERTS, PP2, ACROSS, BY_STREAM)),
        "pp2-virtual": (4, joined(virtual(2), BY_STREAM)),
        "pp4-recompute": (4, joined(PP4, layers(4), RECOMPUTE, BY_STREAM)),
        "pp2-mtp-sums": (4, joined(PP2, MTP, {"hdp_stream_sums": "model"}, BY_STREAM)),
        "pp2-tp2-sp": (8, joined(MHA, PP2, TP2_SP, BY_STREAM)),
        "pp2-latent": (6, joined(MLA, PP2, LATENT, BY_STREAM)),
        "pp2-windows": (4, joined(PP2, SHORT, SINK, BY_STREAM)),
        "pp2-virtual-4": (8, joined(virtual(2, 4), SHARDED, BY_STREAM)),
        "double": (4, {}, DOUBLE),
    }
    return {
        f"streams/{name}": Case(
            *(ranks, settings | {"hdp_tokens_per_rank": 32}),
            *(("auto", "static") if "across" in name else (), 3),
            lengths=LENGTHS,
            streams=16,
            patches=sum(patches, RESERVED),
        )
        for name, (ranks, settings, *patches) in rows.items()
    }


def double_rings() -> dict[str, Case]:
    """Whole micro-batches on double rings."""
    rows = {
        "alone": (4, {}),
        "six": (6, MQA),
        "latent": (4, joined(MLA, LATENT)),
        "experts-across-overlap": (4, joined(EXPERTS, ACROSS, SHARDED)),
    }
    return {
        f"double-rings/{name}": Case(*(ranks, settings, ("auto",), 3), patches=DOUBLE)
        for name, (ranks, settings) in rows.items()
    }


def recomputed() -> dict[str, Case]:
    """Every other micro-batch is recomputed."""
    selective = joined(NO_BIAS, recomputing("core_attn", "layernorm", "mlp"))
    rows = {
        "rings": (3, {}),
        "selective": (2, selective),
        "windows": (3, joined(SHORT, SINK)),
        "latent": (3, MLA | LATENT),
        "experts": (3, EXPERTS),
        "pp2-parts": (4, joined(PP2, IN_PARTS, SHARDED)),
        "pp2-parts-selective-tp2-sp": (8, joined(PP2, TP2_SP, IN_PARTS, selective)),
        "pp2-mtp": (4, joined(PP2, MTP)),
        "virtual-experts": (4, joined(EXPERTS, virtual(2))),
    }
    return {
        f"recomputed/{name}": Case(
            *(ranks, settings, (), 2, LENGTHS * 2), recomputes=True, around=emptied_outputs
        )
        for name, (ranks, settings) in rows.items()
    }
