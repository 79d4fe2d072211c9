"""Every gradient-equivalence case is a row here: a model, a layout and features, made small.

A row's gradients after one HDP step, under plans of strategies and plans that none would make,
equal those of one rank that saw the whole batch (`test_gradients.py`); with offload they have the
bits of a step without (`offloaded.py`). A new feature is a row. `QUICK` says which rows the default
suite runs.
"""

from functools import partial

from tests.gradient_equivalence.case import (
    ACROSS,
    LENGTHS,
    PP2,
    PUBLISHED,
    TP2,
    TP2_SP,
    Case,
    Published,
    joined,
    mixed,
    never_had_chat,
    on_the_fly,
    read_without_chat,
)
from tests.gradient_equivalence.frozen import frozen, with_adapters
from tests.gradient_equivalence.grouped_experts import GroupedLinear, grouped_experts
from tests.gradient_equivalence.on_gpus import on_gpus
from tests.gradient_equivalence.parted import double_rings, parted, recomputed, streams
from tests.gradient_equivalence.settings import (
    ALONE,
    BLOCK,
    EXPERT_MODELS,
    GQA,
    LONG,
    MHA,
    MQA,
    MTP,
    OFF_BY_ONE,
    PARTS,
    PP4,
    RECOMPUTE,
    SELECTIVE,
    SHARDED,
    SHORT,
    SINK,
    TIED,
    every,
    layers,
    virtual,
)
from tests.gradient_equivalence.taken_over import configured, taken_over
from tests.support.gradients import EXPERTS
from tests.support.mla import MLA


def _dense() -> dict[str, Case]:
    two, three = ("static", "dp-balance"), ("static", "naive", "pp-balance")
    everyone = (*two, "naive", "bytescale", "dynamic-cp", "pp-balance")
    rows = {
        f"{layout}/{model}": Case(ranks, joined(kind, settings, more), everyone)
        for layout, (ranks, settings) in {
            "tp2-sp": (4, TP2_SP),
            "pp2": (8, PP2),
            "pp4": (8, PP4 | layers(4)),
            "tp2-sp-pp2": (8, TP2_SP | PP2),
        }.items()
        for groups in [{"num_query_groups": settings.get("tensor_model_parallel_size", 1)}]
        for model, kind, more in (
            *(("gqa", GQA, {}), ("mha-tied-layernorm", MHA, {})),
            ("mqa-qknorm-qkvbias", MQA, groups),
        )
    }
    padded = {"make_vocab_size_divisible_by": 64}
    rows |= {
        "mqa-tp2-sp": Case(4, joined(MQA, TP2_SP, {"num_query_groups": 2}), ("dp-balance",)),
        "mha-tp2-sp-pp2": Case(8, joined(MHA, TP2_SP, PP2), ("pp-balance",)),
        "tensor-parallel": Case(4, TP2 | padded, two, 0),
        "overlap-grad-reduce": Case(3, {"overlap_grad_reduce": True}, two, 0),
        "distributed-optimizer": Case(3, SHARDED, two, 0),
        "distributed-optimizer-pipeline": Case(4, SHARDED | PP2, two, 0),
        "selective-recompute": Case(3, SELECTIVE, two, 0),
        "full-recompute": Case(4, RECOMPUTE, two, 0),
        "pipeline-overlap-recompute": Case(
            6, PP2 | RECOMPUTE | {"overlap_grad_reduce": True}, two, 0
        ),
        "pp2-v2": Case(4, joined(MHA, virtual(2), SHARDED, RECOMPUTE), three),
        **{"pp2-v3": Case(4, virtual(3), three), "pp4-v2": Case(4, virtual(2, 4) | ALONE, three)},
        "pp2-v2-tp2-sp": Case(4, virtual(2) | TP2_SP | ALONE, three),
        "pp4-v2-rings": Case(8, virtual(2, 4), three),
        "pp4-v3-rings": Case(8, virtual(3, 4), three),
        "pp2-v2-tp2-sp-rings": Case(8, virtual(2) | TP2_SP, three),
        "corrupt-alone": Case(1, ALONE, ("naive",), corrupt=(4, 7)),
        "corrupt": Case(3, ALONE, ("naive",), corrupt=(4, 7)),
    }
    return rows | {
        f"many-plans-v{chunks}": Case(4, virtual(chunks), (), 10, LENGTHS * 2) for chunks in (2, 3)
    }


YARN = {
    "position_embedding_type": "yarn",
    "kv_channels": 8,
    "rotary_base": 300,
    "rotary_scaling_factor": 4.0,
    "yarn_original_max_position_embeddings": 50,
    "yarn_beta_fast": 8.0,
}
INTERLEAVED = {"kv_channels": 8, "rotary_percent": 0.5, "rotary_interleaved": True}
INTERLEAVED |= {"rotary_seq_len_interpolation_factor": 4}
LLAMA3 = {"rotary_base": 500_000, "use_rope_scaling": True}


def _positions() -> dict[str, Case]:
    some = {"no_rope_freq": "[1,0]", "yarn_correction_range_round_to_int": False, "mscale": 0.7}
    every_third = {"num_layers": 4, "no_rope_freq": "[0,1,1,0]"}
    rows = {
        "llama3": Case(3, LLAMA3 | {"kv_channels": 8}),
        "llama3-32": Case(3, LLAMA3 | {"rope_scaling_factor": 32.0}),
        "yarn": Case(3, YARN),
        "yarn-some-layers": Case(3, YARN | some),
        "interleaved": Case(3, INTERLEAVED),
        "none": Case(3, {"position_embedding_type": "none"}),
        "some-layers-v2": Case(4, virtual(2) | every_third, ()),
    }
    of_layouts = {"tp2-sp": (4, TP2_SP), "pp2": (8, PP2), "pp4": (8, PP4)}
    of_layouts["tp2-sp-pp2"] = (8, TP2_SP | PP2)
    return rows | {
        f"yarn-{name}": Case(ranks, joined(settings, YARN, every_third))
        for name, (ranks, settings) in of_layouts.items()
    }


def _windows() -> dict[str, Case]:
    two = ("static", "pp-balance")
    v2 = joined(virtual(2), RECOMPUTE, SHARDED)
    return {
        "sink": Case(3, SINK, two),
        "off-by-one": Case(2, OFF_BY_ONE | SELECTIVE, two),
        "sink-tensor": Case(4, SINK | TP2_SP, two),
        "sink-virtual": Case(4, SINK | v2, two),
        "window": Case(3, SHORT, two),
        "alternating": Case(3, LONG | every("2") | layers(3), two),
        "own-token": Case(2, SINK | {"window_size": "0,0"}, two),
        "both-tensor": Case(4, joined(SHORT, SINK, TP2_SP, every("[1,0]")), two),
        "both-stages": Case(4, joined(LONG, SINK, PP2, every("[0,1]")), two),
        "both-virtual": Case(4, joined(SHORT, OFF_BY_ONE, v2, every("2")), two),
        "selective": Case(4, joined(LONG, SINK, SELECTIVE), two),
    }


def _configured() -> dict[str, Case]:
    """What Megatron's own attention takes from the configuration, and has no flag."""
    scale, layered = {"softmax_scale": 0.9}, {"apply_query_key_layer_scaling": True}
    plain = {"hdp_fused_loss": False}
    rows = {  # ranks, settings, around
        "scale": (3, SINK | every("[1,0]") | SHORT, partial(configured, **scale)),
        "layer-scaling": (2, SINK, partial(configured, **layered)),
        "taken-over-scale": (3, plain, partial(taken_over, **scale)),
        "taken-over-window": (2, SHORT | SINK | plain, partial(taken_over, **scale)),
        "taken-over-tensor": (4, joined(TP2_SP, SELECTIVE, plain), partial(taken_over, **scale)),
        "taken-over-stages": (4, PP2 | plain, partial(taken_over, **scale | layered)),
        "taken-over-latent": (2, MLA | plain, partial(taken_over, latent=True, **scale)),
    }
    return {name: Case(ranks, more, around=around) for name, (ranks, more, around) in rows.items()}


BIASED_EXPERTS = EXPERTS | {
    "moe_layer_freq": "[0,1]",
    "moe_shared_expert_intermediate_size": 10,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
}


def _mtp() -> dict[str, Case]:
    one_layer = TIED | {"mtp_num_layers": 1, "normalization": "LayerNorm"}
    scaled = {"position_embedding_type": "yarn", "rotary_scaling_factor": 4.0}
    uneven = {"decoder_first_pipeline_num_layers": 1}
    apart = {"expert_tensor_parallel_size": 1}
    rows = {  # settings, plans
        "rings": (3, {}, 1),
        "tied-one": (2, one_layer, 1),
        "tensor": (4, TP2_SP, 1),
        "tensor-alone": (4, TP2, 1),
        "stages": (4, PP2, 1),
        "buckets-recompute": (4, joined(SHARDED, PP2, RECOMPUTE, scaled), 1),
        "experts": (2, BIASED_EXPERTS, 1),
        "experts-apart": (4, BIASED_EXPERTS | ACROSS, 0),
        "experts-stages": (4, joined(BIASED_EXPERTS, PP2, ACROSS, uneven), 0),
        "latent": (2, MLA | BIASED_EXPERTS, 1),
        "latent-tensor": (4, joined(MLA, BIASED_EXPERTS, TP2_SP, ACROSS, apart), 0),
    }
    return {
        f"mtp-{name}": Case(ranks, MTP | more, plans=plans)
        for name, (ranks, more, plans) in rows.items()
    }


NO_QUERY_LATENT = {"q_lora_rank": None, "qk_layernorm": False, "rope_type": "rope"}
NO_QUERY_LATENT |= {"rotary_scaling_factor": 1.0, "mscale_all_dim": 0.0}
SHARED_EXPERT = {"moe_shared_expert_intermediate_size": 8}


def _latent_attention() -> dict[str, Case]:
    apart = joined(EXPERTS, ACROSS, SHARED_EXPERT, {"moe_layer_freq": "[0,1]"})
    rows = {
        "yarn": (3, {}, 2),
        "no-query-latent": (3, NO_QUERY_LATENT, 2),
        "tp2-without-norms": (4, TP2 | {"qk_layernorm": False}, 2),
        "tp2-sp": (4, TP2_SP, 2),
        "tp2-sp-no-query-latent": (4, TP2_SP | NO_QUERY_LATENT, 2),
        "pp2": (4, PP2, 2),
        "pp2-v2-full-recompute": (4, virtual(2) | RECOMPUTE, 2),
        "tp2-sp-full-recompute": (4, TP2_SP | RECOMPUTE, 2),
        "experts-apart": (4, apart, 0),
        "selective-recompute": (3, SELECTIVE, 2),
        "distributed-optimizer": (3, SHARDED, 2),
    }
    return {
        f"mla-{way}-{name}": Case(ranks, joined(MLA, more, {"hdp_mla_ring": way}), plans=plans)
        for name, (ranks, more, plans) in rows.items()
        for way in ("kv", "latent")
    }


def _uneven_stages() -> dict[str, Case]:
    two = ("static", "pp-balance")
    loss = {"account_for_loss_in_pipeline_split": True}
    embedding = {"account_for_embedding_in_pipeline_split": True}
    v2 = {"num_virtual_stages_per_pipeline_rank": 2}
    rows = {  # ranks, stages, layers, the rest
        "first": (4, 2, 3, {"decoder_first_pipeline_num_layers": 1}),
        "virtual-empty": (4, 2, 4, {PARTS: "E|t|tt|tL"} | SHARDED | RECOMPUTE),
        "empty": (4, 4, 3, ALONE | {PARTS: "Et||tt|L"} | SHARDED | MHA),
        "last-only-output": (2, 2, 2, ALONE | {PARTS: "Ett|L"} | BLOCK),
        "last": (4, 2, 3, {"decoder_last_pipeline_num_layers": 1} | BLOCK),
        "first-virtual": (4, 2, 6, {"decoder_first_pipeline_num_layers": 2} | v2),
        "counted": (4, 4, 6, joined(ALONE, MQA, loss, embedding)),
        "counted-virtual": (4, 4, 7, joined(ALONE, loss, v2)),
        "virtual-4": (4, 4, 6, joined(ALONE, MHA, {PARTS: "E|t|t|tt||t|t|L"})),
        "virtual-3": (4, 2, 5, {PARTS: "Et|t||tt|t|L"}),
        "tensor": (4, 2, 3, ALONE | TP2_SP | {PARTS: "E|t*3L"}),
        "experts": (4, 2, 3, {PARTS: "Et|ttL"} | EXPERTS),
        "rings-4": (8, 4, 5, {PARTS: "E|tt||tttL"}),
        "rings-4-virtual": (8, 4, 6, {PARTS: "E|t|t|tt||t|t|L"}),
    }
    return {
        f"uneven-{name}": Case(
            ranks, layers(number) | {"pipeline_model_parallel_size": stages} | more, two
        )
        for name, (ranks, stages, number, more) in rows.items()
    }


TENSOR = TP2_SP | {"expert_tensor_parallel_size": 1}
UNEVEN = PP2 | {"decoder_first_pipeline_num_layers": 1}


def _experts() -> dict[str, Case]:
    four = {"expert_model_parallel_size": 4}
    gathered = {"moe_token_dispatcher_type": "allgather"}
    no_loss = {"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0}
    top_1 = {"moe_router_topk": 1, "moe_router_pre_softmax": True, "overlap_grad_reduce": True}
    rows = {
        "every-expert-on-every-rank": (3, {}),
        "across-all-ranks": (2, ACROSS),
        "two-groups": (4, ACROSS),
        "an-expert-a-rank": (4, four | {"moe_router_topk": 3}),
        "within-tensor-ranks": (4, TENSOR | ACROSS),
        "shared-by-tensor-ranks": (4, TENSOR | {"expert_tensor_parallel_size": 2}),
        "across-tensor-and-hdp-ranks": (4, TENSOR | four),
        "shared-and-across": (4, TENSOR | ACROSS | {"expert_tensor_parallel_size": 2}),
        "all-gathered-within-tensor-ranks": (4, TENSOR | ACROSS | gathered),
        "stages": (4, PP2 | ACROSS),
        "virtual-stages": (4, virtual(2)),
        "virtual-stages-across-ranks": (4, virtual(2) | ACROSS),
    }
    cases = {f"moe-{name}": Case(ranks, EXPERTS | more) for name, (ranks, more) in rows.items()}
    features = {
        "recompute": ACROSS | RECOMPUTE,
        "top-1-overlapped": ACROSS | top_1,
        "allgather": gathered | no_loss,
        "distributed-optimizer": ACROSS | SHARDED,
    }
    cases |= {f"moe-{name}": Case(2, EXPERTS | more, ()) for name, more in features.items()}
    # a padding token reaches two experts, the hooks of the other two's gradients fire as well
    few = {"lengths": (5, 3), "strategies": ("naive",), "plans": 0}
    small = EXPERTS | {"overlap_grad_reduce": True, "ddp_bucket_size": 1}
    cases |= {
        "moe-without-a-token": Case(4, small, **few),
        "moe-without-a-token-across": Case(4, small | ACROSS, **few),
        "moe-corrupt": Case(2, EXPERTS, (), corrupt=(4, 7)),
    }
    grouped = grouped_experts(GroupedLinear)
    cases |= {
        "grouped-together": Case(3, EXPERTS, (), around=grouped),
        "grouped-two-groups": Case(4, EXPERTS | ACROSS, (), around=grouped),
        "grouped-without-a-token": Case(4, small | ACROSS, **few, around=grouped),
    }
    layouts = {
        "alone": (3, {}),
        "across": (2, ACROSS),
        "stages": (2, UNEVEN | ALONE),
        "stages-across": (4, UNEVEN | ACROSS),
        "virtual-stages-across": (4, virtual(2) | ACROSS | {"moe_layer_freq": "[0]+[1]*3"}),
        "tensor": (4, TENSOR | ACROSS),
        "tensor-across": (4, TENSOR | four),
    }
    return cases | {
        f"{model}-{layout}": Case(ranks, joined(EXPERTS, kind, more))
        for model, kind in EXPERT_MODELS.items()
        for layout, (ranks, more) in layouts.items()
    }


READ_STEP = "megatron_hdp.data.steps.loaders.read_step"
LOGITS_BYTES = "megatron_hdp.runtime.loss.fused_cross_entropy.LOGITS_BYTES"
TEN_TOKENS = 10 * 320 // 2 * 8  # bytes of their float64 logits on one of two tensor-parallel ranks
FUSED = {"seq_length": 100}
FUSED_LENGTHS = (1, 30, 100, 64, 65, 7)
PADDED_TP2 = TP2 | {"make_vocab_size_divisible_by": 64}
PADDED_TP2_SP = PADDED_TP2 | {"sequence_parallel": True}


def _fused_loss() -> dict[str, Case]:
    chunks = ((LOGITS_BYTES, {"cpu": TEN_TOKENS}),)
    logits = (("megatron_hdp.megatron.model.last_stage.linear_cross_entropy", None),)
    rows = {
        "tensor-parallel-tied": (2, PADDED_TP2 | TIED, chunks),
        "sequence-parallel": (2, PADDED_TP2_SP, chunks),
        "sequence-parallel-pipeline-tied": (4, joined(PADDED_TP2_SP, TIED, PP2), chunks),
        # no fused loss runs
        "logits": (4, joined(PADDED_TP2_SP, PP2, {"hdp_fused_loss": False}), logits),
    }
    return {
        f"fused-{name}": Case(ranks, FUSED | more, plans=0, lengths=FUSED_LENGTHS, patches=patches)
        for name, (ranks, more, patches) in rows.items()
    }


def _data() -> dict[str, Case]:
    tensor = TP2_SP | {"hdp_tokens_per_rank": 128}
    cut = {"hdp_data": "schedule: [{from: 0, max-length: 24}]"}
    rows = {
        "mixture-rings": (3, {}),
        "mixture-tp2-sp": (2, tensor),
        "mixture-pp2": (4, PP2),
        "mixture-logits": (2, {"hdp_fused_loss": False}),
        "mixture-split": (2, cut | {"hdp_long_sequence": "split"}),
        "mixture-truncate": (2, cut | {"hdp_long_sequence": "truncate"}),
    }
    cases = {
        name: Case(ranks, more, plans=0, arguments_of=mixed) for name, (ranks, more) in rows.items()
    }
    lost = {"patches": ((READ_STEP, read_without_chat),), "around": never_had_chat}
    cases |= {
        "mixture-lost-source": Case(3, {}, plans=0, arguments_of=mixed, **lost),
        "mixture-lost-source-pp2": Case(4, PP2, plans=0, arguments_of=mixed, **lost),
    }
    return cases | {"on-the-fly": Case(2, {}, plans=0, arguments_of=on_the_fly)}


def _published() -> dict[str, Case]:
    v2 = PP2 | {"num_virtual_stages_per_pipeline_rank": 2}
    layouts = {"rings": (2, {}), "stages": (4, v2), "tensor": (4, TP2_SP)}
    return {
        f"{model}-{layout}": Case(ranks, more, arguments_of=Published(model))
        for model in PUBLISHED
        for layout, (ranks, more) in layouts.items()
    }


CASES: dict[str, Case] = {
    name: case
    for rows in (
        *(_dense(), _positions(), _windows(), _configured(), _mtp(), _latent_attention()),
        *(_uneven_stages(), _experts(), on_gpus(), _fused_loss(), _data(), _published()),
        *(parted(), streams(), recomputed(), double_rings()),
    )
    for name, case in rows.items()
}
CASES |= frozen(CASES) | with_adapters(CASES)

SMOKE = "yarn-some-layers"
# each model, layout and feature once, briefly; the other rows are slow. Latent attention is in
# `offloaded.QUICK_OFFLOAD`, virtual stages in tests/session, a published model in tests/convert.
QUICK = {
    *("parts/pp2-mtp", "streams/pp2", "double-rings/alone"),
    *("frozen/full-recompute", "corrupt", "adapters/mqa-tp2-sp"),
    *(SMOKE, "layer-scaling", "taken-over-window", "uneven-last-only-output"),
    *("moe-shared-and-across", "moe-distributed-optimizer"),
    *("fp8-experts", "flex-recompute", "overlap-gate", "accumulated-experts"),
    *("grouped-without-a-token", "moe-corrupt", "deepseek-across"),
    "fused-sequence-parallel-pipeline-tied",
    *("mixture-rings", "mixture-split", "on-the-fly", "mixture-lost-source"),
}
