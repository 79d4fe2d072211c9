"""What is said of lengths, against numpy on all of them."""

import numpy as np
import pytest

from megatron_hdp.cli.data_commands.histogram import QUANTILES, Histogram

LENGTHS = np.minimum(np.random.default_rng(3).lognormal(5, 2, 5000).astype(np.int64) + 1, 9000)


@pytest.mark.parametrize("piece", [1, 7, 1000, 5000])
def test_it_says_what_numpy_says(piece):
    lengths = LENGTHS[:50] if piece == 1 else LENGTHS
    pieces = [lengths[first : first + piece] for first in range(0, len(lengths), piece)]
    found = Histogram.of(pieces)
    assert found.num_sequences == len(lengths)
    assert found.num_tokens == lengths.sum()
    assert (found.shortest, found.longest) == (lengths.min(), lengths.max())
    assert found.mean == pytest.approx(lengths.mean(), rel=1e-12)
    expected = [np.quantile(lengths, share, method="higher") for share in (0, *QUANTILES, 1)]
    assert [found.quantile(share) for share in (0, *QUANTILES, 1)] == expected


def test_shares_of_tokens_by_power_of_two():
    found = Histogram.of([np.array([4, 5, 8, 9, 1000])])
    assert found.token_shares() == pytest.approx(
        {
            4: 4 / 1026,
            8: 13 / 1026,
            16: 9 / 1026,
            **dict.fromkeys((32, 64, 128, 256, 512), 0),
            1024: 1000 / 1026,
        }
    )
    assert sum(Histogram.of([LENGTHS]).token_shares().values()) == pytest.approx(1)
    borders = [2**power + more for power in (1, 20, 40) for more in (0, 1)]
    shares = Histogram.of([np.array(borders)]).token_shares()
    assert [most for most, share in shares.items() if share] == [2, 4, 2**20, 2**21, 2**40, 2**41]
