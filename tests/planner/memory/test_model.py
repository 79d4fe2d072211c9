"""The memory model: equation 3, and its fit through measured peaks."""

import pytest

from megatron_hdp.planner.memory.model import MemoryModel

MODEL = MemoryModel(10, 100.0, workspace_bytes_per_token=50.0, fixed_bytes=1000.0)


@pytest.mark.parametrize(
    "ratio, layers, peak", [(0.0, 10, 1e5 + 6000), (0.5, 6, 6e4 + 6000), (1.0, 2, 2e4 + 6000)]
)
def test_equation_3_by_hand(ratio, layers, peak):
    assert MODEL.resident_layers(ratio) == layers
    assert MODEL.peak_bytes(100, ratio) == peak


@pytest.mark.parametrize("num_layers", [1, 2])
def test_two_layers_always_stay(num_layers):
    model = MemoryModel(num_layers, 100.0)
    assert model.peak_bytes(10, 1.0) == model.peak_bytes(10, 0.0) == num_layers * 1000


@pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0])
def test_most_tokens_is_where_the_peak_reaches_the_memory(ratio):
    tokens = MODEL.most_tokens(1e6, ratio)
    assert MODEL.peak_bytes(tokens, ratio) <= 1e6 < MODEL.peak_bytes(tokens + 1, ratio)


def test_nothing_fits_beside_what_is_fixed():
    assert MODEL.most_tokens(999.0) == 0


def test_a_fit_finds_the_coefficients():
    peaks = [(size, MODEL.peak_bytes(size)) for size in (64, 128, 512)]
    found = MemoryModel.fit(10, 100.0, peaks)
    assert found.workspace_bytes_per_token == pytest.approx(50.0)
    assert found.fixed_bytes == pytest.approx(1000.0)
    assert found.peak_bytes(100_000, 0.7) == pytest.approx(MODEL.peak_bytes(100_000, 0.7))


def test_one_size_is_not_enough():
    with pytest.raises(ValueError, match=r"peaks at \[64.0\] tokens; expected two sizes"):
        MemoryModel.fit(10, 100.0, [(64, 1.0), (64, 2.0)])
