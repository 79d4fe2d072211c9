"""Rows of other tables with frozen weights, or adapters: gradients of what is trained."""

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


ADAPTERS = {"lora_rank": 3, "lora_alpha": 6.0}
OF_LATENTS = ADAPTERS | {
    "lora_targets": (
        *("linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj"),
        *("linear_proj", "linear_fc1", "linear_fc2"),
    )
}
WITH_ADAPTERS = (
    *("tensor-parallel", "mqa-tp2-sp", "tp2-sp-pp2/mha-tied-layernorm", "full-recompute"),
    *("selective-recompute", "distributed-optimizer-pipeline", "pp2-v2", "overlap-grad-reduce"),
    *("mtp-rings", "some-layers-v2", "fused-logits", "corrupt", "uneven-virtual-empty"),
    *("moe-two-groups", "moe-shared-and-across", "moe-distributed-optimizer", "moe-corrupt"),
    *("moe-within-tensor-ranks", "moe-shared-by-tensor-ranks", "overlap-gate"),
    *("moe-across-tensor-and-hdp-ranks", "moe-allgather", "gpt-oss-20b-tensor"),
    *("parts/pp2-mtp-recompute", "recomputed/pp2-parts", "streams/pp2", "streams/tp2-sp"),
)
BIAS_STAYS = ADAPTERS | {"moe_router_bias_update_rate": 0.0}
OF_BIASED_EXPERTS = ("parts/experts-across", "streams/experts-shared")
WITH_ADAPTERS_OF_LATENTS = (
    *("mla-latent-yarn", "mla-kv-tp2-sp", "mla-latent-tp2-sp", "mla-latent-tp2-without-norms"),
    *("mla-latent-tp2-sp-full-recompute", "parts/latent-queries", "streams/latent"),
)


def with_adapters(cases: Mapping[str, Case]) -> dict[str, Case]:
    """Rows of a table that train adapters alone, beside every linear layer."""
    return {
        f"adapters/{name}": replace(cases[name], settings=cases[name].settings | more)
        for names, more in (
            (WITH_ADAPTERS, ADAPTERS),
            (OF_BIASED_EXPERTS, BIAS_STAYS),
            (WITH_ADAPTERS_OF_LATENTS, OF_LATENTS),
        )
        for name in names
    }
