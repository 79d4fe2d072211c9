"""Offload with multi-latent attention: the bits of a step without it, whatever travels."""

import pytest

from tests.megatron.step import test_offload
from tests.megatron.step.test_offload import CAPACITY
from tests.support.gradients import EXPERTS, write_corpus
from tests.support.mla import mla_arguments, plain_stock_attention


def with_and_without(*given):
    """Body of a rank: the reference is Megatron's own latent attention."""
    with plain_stock_attention():
        return WITH_AND_WITHOUT(*given)


WITH_AND_WITHOUT = test_offload.with_and_without
TP2_SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}


@pytest.mark.parametrize(
    "way, overrides",
    [
        ("latent", {}),
        pytest.param("kv", {}, marks=pytest.mark.slow),
        pytest.param("latent", TP2_SP, marks=pytest.mark.slow),
        pytest.param("latent", EXPERTS, marks=pytest.mark.slow),
    ],
    ids=["latent", "kv", "latent-tp2-sp", "latent-experts"],
)
def test_a_step_with_offload_has_the_bits_of_one_without(
    run_ranks, tmp_path, monkeypatch, way, overrides
):
    monkeypatch.setattr(test_offload, "with_and_without", with_and_without)
    settings = CAPACITY | overrides | {"num_layers": 4, "hdp_mla_ring": way}
    arguments = mla_arguments(write_corpus(tmp_path, test_offload.LENGTHS), **settings)
    test_offload.check(run_ranks, arguments, 2, 2 * arguments.tensor_model_parallel_size)
