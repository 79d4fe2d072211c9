"""Cases of what users of large GPUs switch on, over stand-ins for the libraries that it needs."""

from functools import partial

from megatron.core.tensor_parallel import ColumnParallelLinear

from tests.gradient_equivalence.case import ACROSS, PP2, TP2_SP, Case, joined
from tests.gradient_equivalence.taken_over import configured
from tests.support.fake_deep_ep import installed
from tests.support.fused_wgrad import accumulating
from tests.support.gradients import EXPERTS
from tests.support.mla import MLA

COLUMNS = ColumnParallelLinear.forward


def with_rows_for_fp8(self, hidden, *args, **kwargs):
    """A product as it is, of rows that one of FP8 takes."""
    assert hidden.shape[:-1].numel() % 16 == 0, hidden.shape
    return COLUMNS(self, hidden, *args, **kwargs)


def _fp8() -> dict[str, Case]:
    """What Megatron does by its configuration, without TransformerEngine: products stay float64."""
    tensorwise, blockwise = (
        {"fp8": "hybrid", "fp8_recipe": one} for one in ("tensorwise", "blockwise")
    )
    apart = EXPERTS | ACROSS
    rows = {  # ranks, settings, configuration
        "tensor-stages": (8, TP2_SP | PP2, tensorwise),
        "blocks": (2, TP2_SP | {"hdp_tokens_per_rank": 256}, blockwise),
        "experts": (2, apart, tensorwise),
        "padded": (2, apart, blockwise | {"moe_router_padding_for_quantization": True}),
        "mtp": (2, EXPERTS | {"mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.7}, blockwise),
    }
    checked = (("megatron.core.tensor_parallel.ColumnParallelLinear.forward", with_rows_for_fp8),)
    return {
        f"fp8-{name}": Case(ranks, more, around=partial(configured, **config), patches=checked)
        for name, (ranks, more, config) in rows.items()
    }


def _dispatched() -> dict[str, Case]:
    """Tokens by DeepEP, which knows weights in float32 only; shared experts beside an exchange."""
    flex = {"moe_token_dispatcher_type": "flex"}
    apart = TP2_SP | {"expert_tensor_parallel_size": 1, "expert_model_parallel_size": 4}
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform"}
    recompute |= {"recompute_num_layers": 1}
    rows = {
        "two-groups": (4, ACROSS),
        "tensor-ranks": (4, apart),
        "recompute": (2, ACROSS | recompute),
        "stages": (4, PP2 | ACROSS),
    }
    beside = EXPERTS | {"moe_shared_expert_intermediate_size": 20}
    beside |= {"moe_shared_expert_overlap": True}
    overlapped = {
        "overlap-gate": Case(4, joined(beside, ACROSS, {"moe_shared_expert_gate": True})),
        "overlap-tensor-recompute": Case(4, joined(beside, apart, recompute)),
    }
    return overlapped | {
        f"flex-{name}": Case(ranks, joined(EXPERTS, more, flex), around=installed, tolerance=1e-6)
        for name, (ranks, more) in rows.items()
    }


def _accumulated() -> dict[str, Case]:
    """Weights' gradients added to the buffer by the layers; float32, which apex's kernel knows."""
    tied = {"untie_embeddings_and_output_weights": False}
    buckets = {"overlap_grad_reduce": True, "ddp_bucket_size": 1000}
    mtp = {"mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.7}
    rows = {
        "tensor-stages": (8, joined(TP2_SP, PP2, buckets)),
        "tied-logits": (2, joined(tied, buckets, {"hdp_fused_loss": False})),
        "tied-mtp": (2, joined(tied, mtp)),
        "experts": (2, joined(EXPERTS, ACROSS, buckets)),
        "latent": (2, MLA | {"hdp_mla_ring": "latent"}),
    }
    return {
        f"accumulated-{name}": Case(
            ranks, more | {"fp64": False}, around=accumulating, tolerance=1e-4
        )
        for name, (ranks, more) in rows.items()
    }


def on_gpus() -> dict[str, Case]:
    """All of them."""
    return _fp8() | _dispatched() | _accumulated()
