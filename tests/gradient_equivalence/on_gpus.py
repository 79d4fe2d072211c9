"""Cases of what users of large GPUs switch on, over stand-ins for the libraries that it needs."""

from functools import partial

from megatron.core.tensor_parallel import ColumnParallelLinear

from tests.gradient_equivalence.case import ACROSS, PP2, TP2_SP, Case
from tests.gradient_equivalence.taken_over import configured
from tests.support.gradients import EXPERTS

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


def on_gpus() -> dict[str, Case]:
    """All of them."""
    return _fp8()
