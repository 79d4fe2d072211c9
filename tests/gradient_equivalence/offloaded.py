"""Rows with offload: a step has the bits of one without."""

from tests.gradient_equivalence.case import (
    ACROSS,
    PP2,
    TP2_SP,
    Case,
    emptied_outputs,
    joined,
)
from tests.gradient_equivalence.grouped_experts import GroupedLinear, grouped_experts
from tests.gradient_equivalence.settings import (
    EVERY_MODULE,
    IN_PARTS,
    LONG,
    MHA,
    MTP,
    NO_BIAS,
    PARTS,
    RECOMPUTE,
    SELECTIVE,
    SHARDED,
    SHARED_EXPERTS,
    SHORT,
    SINK,
    every,
    layers,
    recomputing,
)
from tests.support.gradients import EXPERTS
from tests.support.mla import MLA


def _offload() -> dict[str, Case]:
    four, v2 = layers(4), {"num_virtual_stages_per_pipeline_rank": 2}
    dense_first = {"moe_layer_freq": "[0]+[1]*3", "moe_router_score_function": "sigmoid"}
    dense_first, kv = dense_first | SHARED_EXPERTS | ACROSS, {"hdp_mla_ring": "kv"}
    windowed, latent = SINK | every("2") | four, MLA | four | {"hdp_mla_ring": "latent"}
    rows = {
        "plain": (3, four),
        "distributed-optimizer": (3, four | SHARDED),
        "selective-recompute": (2, four | SELECTIVE),
        "full-recompute": (2, four | RECOMPUTE),
        "layernorm-mlp": (2, joined(four, MHA, NO_BIAS, recomputing("mlp", "layernorm"))),
        "layernorm-tp2-sp": (4, joined(four, TP2_SP, recomputing("layernorm", "core_attn"))),
        "layernorm-experts": (2, joined(EXPERTS, four, dense_first, recomputing("layernorm"))),
        "every-module": (2, joined(EXPERTS, four, dense_first, recomputing(*EVERY_MODULE))),
        "layernorm-pp2-virtual": (4, joined(layers(8), PP2, v2, recomputing("layernorm"))),
        "layernorm-mtp": (2, joined(four, MTP, recomputing("layernorm"))),
        "mtp": (2, joined(four, MTP)),
        "pp2-parts-mtp": (4, joined(layers(8), PP2, IN_PARTS, MTP)),
        "pp2-parts-mtp-full-recompute": (4, joined(layers(8), PP2, IN_PARTS, MTP, RECOMPUTE)),
        "mla-latent-layernorm": (2, joined(latent, recomputing("layernorm"))),
        "mla-kv-every-module": (
            2,
            joined(EXPERTS, latent, kv, SHARED_EXPERTS, recomputing(*EVERY_MODULE)),
        ),
        "tp2-sp": (4, four | TP2_SP),
        "pp2": (4, layers(8) | PP2),
        "pp2-parts": (4, joined(layers(8), PP2, IN_PARTS)),
        "pp2-parts-layernorm-tp2-sp": (
            8,
            joined(layers(8), PP2, TP2_SP, IN_PARTS, recomputing("layernorm", "core_attn")),
        ),
        "pp2-parts-full-recompute": (4, joined(layers(8), PP2, IN_PARTS, RECOMPUTE)),
        "pp2-virtual": (4, layers(8) | PP2 | v2),
        "pp2-virtual-full-recompute": (4, joined(layers(8), PP2, v2, RECOMPUTE)),
        "pp2-full-recompute": (4, joined(layers(8), PP2, RECOMPUTE)),
        "experts": (2, joined(EXPERTS, four, ACROSS)),
        "experts-of-todays-models": (2, joined(EXPERTS, four, dense_first)),
        "window-short": (2, SHORT | windowed),
        "window-long": (2, LONG | windowed),
        "mla-latent": (2, latent),
        "mla-kv": (2, latent | kv),
        "mla-latent-tp2-sp": (4, latent | TP2_SP),
        "mla-latent-experts": (2, EXPERTS | latent),
        "uneven": (4, joined(layers(7), PP2, {PARTS: "Et*3|t*4L"})),
        "uneven-virtual": (4, joined(layers(8), PP2, {PARTS: "E|tt|t*4|tt,L"})),
        "uneven-recompute": (4, joined(layers(8), PP2, RECOMPUTE, {PARTS: "Et*3|t*5L"})),
    }
    cases = {
        name: Case(ranks, settings, around=emptied_outputs)
        for name, (ranks, settings) in rows.items()
    }
    grouped, around = joined(EXPERTS, four, ACROSS), grouped_experts(GroupedLinear)
    for name, modules in {"moe-act": (), "every-module": EVERY_MODULE}.items():
        settings = grouped | recomputing("moe_act", *modules)
        cases[f"grouped-{name}"] = Case(2, settings, around=around)
    return cases


OFFLOAD = _offload()
QUICK_OFFLOAD = {"mla-latent"}  # stages: tests/megatron/step/test_offload.py
