"""Rows of other tables with frozen weights; gradients of the others stay as they are."""

from collections.abc import Mapping
from dataclasses import replace

from tests.gradient_equivalence.case import Case

LATENT = ("*.linear_kv_up_proj.*", "*.linear_q_down_proj.*")
ALL_BUT_NORMS = ("*embedding*", "output_layer.*", "*.linear_*")
ROWS = {
    "full-recompute": ("embedding.*", "*.linear_fc1.*"),
    "selective-recompute": ("*.self_attention.*",),
    "distributed-optimizer-pipeline": ("embedding.*", "decoder.layers.0.*"),  # a whole stage
    "mqa-tp2-sp": ("*.linear_qkv.*", "output_layer.*", "decoder.final_layernorm.*"),
    "pp2-v2": ("*embedding*", "*.linear_*"),  # its norms alone, with tied embeddings
    "overlap-grad-reduce": ("*.mlp.*",),
    "fused-sequence-parallel-pipeline-tied": ("embedding.*",),
    "fused-logits": ("output_layer.*",),
    "mla-latent-yarn": LATENT,
    "mla-kv-tp2-sp": ("*.linear_q_up_proj.*", "*.kv_layernorm.*"),
    "mla-latent-tp2-sp-full-recompute": LATENT,
    "mtp-rings": ("mtp.layers.0.*", "embedding.*"),
    "moe-two-groups": ("*.experts.*",),
    "moe-across-tensor-and-hdp-ranks": ("*.router.*", "*.local_experts.1.*"),
    "sink": ("*.softmax_offset",),
    "parts/pp2-mtp-recompute": ("embedding.*", "*.self_attention.*"),
    "parts/latent-queries": LATENT,
    "streams/selective": ("embedding.*", "*.linear_qkv.*"),
    "streams/latent": LATENT,
    "streams/experts-shared": ("*.local_experts.*",),
    "streams/pp2": ALL_BUT_NORMS,
    "recomputed/rings": ("embedding.*", "*.linear_proj.*"),
    "recomputed/pp2-parts": ALL_BUT_NORMS,
}


def frozen(cases: Mapping[str, Case]) -> dict[str, Case]:
    """Rows of a table that freeze weights."""
    return {
        f"frozen/{name}": replace(
            cases[name], settings=cases[name].settings | {"hdp_frozen": patterns}
        )
        for name, patterns in ROWS.items()
    }
