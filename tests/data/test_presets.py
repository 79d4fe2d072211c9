"""Drawn lengths have the paper's shares of tokens, the size that was asked for, and one seed."""

import numpy as np
import pytest

from megatron_hdp.data.presets import LONGEST, PRESETS, preset_lengths


@pytest.mark.parametrize("name", PRESETS)
def test_shares_of_tokens_are_the_papers(name):
    lengths = preset_lengths(name, num_tokens=2**31, max_length=LONGEST)
    edges = [0, *(4096 * 2**k for k in range(10)), LONGEST + 1]
    tokens, _ = np.histogram(lengths, bins=edges, weights=lengths)
    shares = 100 * tokens / lengths.sum()
    np.testing.assert_allclose(shares, PRESETS[name], atol=1.0)


def test_most_of_byteds_sequences_are_short():
    lengths = preset_lengths("byted", num_tokens=2**30, max_length=LONGEST)
    assert np.mean(lengths <= 4096) == pytest.approx(0.8, abs=0.05)
    assert lengths[lengths >= 128 * 1024].sum() / lengths.sum() == pytest.approx(0.443, abs=0.03)


@pytest.mark.parametrize("num_tokens", [1, 100, 12_345, 2_000_000])
def test_the_number_of_tokens_is_exact(num_tokens):
    lengths = preset_lengths("github", num_tokens=num_tokens, max_length=5000, seed=3)
    assert lengths.dtype == np.int64
    assert lengths.sum() == num_tokens
    assert lengths.min() >= 1 and lengths.max() <= 5000


def test_the_seed_decides():
    draw = {"num_tokens": 10**6, "max_length": LONGEST}
    one = preset_lengths("byted", **draw, seed=1)
    assert np.array_equal(one, preset_lengths("byted", **draw, seed=1))
    assert not np.array_equal(one[:10], preset_lengths("byted", **draw, seed=2)[:10])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "gitlab"}, "preset is 'gitlab'; expected one of github, byted"),
        ({"num_tokens": 0}, "num_tokens is 0; expected at least 1"),
        ({"max_length": 0}, "max_length is 0; expected at least 1"),
    ],
)
def test_what_cannot_be_drawn(arguments, message):
    arguments = {"name": "github", "num_tokens": 10, "max_length": 10} | arguments
    with pytest.raises(ValueError, match=message):
        preset_lengths(arguments.pop("name"), **arguments)
