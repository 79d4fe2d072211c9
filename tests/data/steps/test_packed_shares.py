"""Shares that are packed to be sent come out the same to the bit, and small."""

from dataclasses import fields, replace

import numpy as np
import pytest

from megatron_hdp.data.steps import PackedShares
from tests.support.rank_steps import rank_steps


def shares_of(ranks=3):
    return [one.share for one in rank_steps([5, 90, 300, 17, 1, 64], ranks=ranks)]


def require_same(found, expected):
    for one, other in zip(found, expected, strict=True):
        for item in fields(other):
            here, there = getattr(one, item.name), getattr(other, item.name)
            if isinstance(there, np.ndarray):
                assert here.dtype == there.dtype and here.tobytes() == there.tobytes(), item.name
            else:
                assert here == there, item.name


@pytest.mark.parametrize("ranks", [3, 8])
def test_they_come_out_the_same(ranks):
    shares = shares_of(ranks)
    require_same(PackedShares.of(shares).unpack(), shares)


def test_no_share_at_all():
    assert PackedShares.of([]).unpack() == []


@pytest.mark.parametrize("number", [-1, 255, 256, 2**31 - 1, 2**31, -(2**31) - 1, 2**63 - 1])
def test_numbers_of_any_size(number):
    shares = [replace(one, rows=one.rows * 0 + number) for one in shares_of()]
    require_same(PackedShares.of(shares).unpack(), shares)


def test_small_numbers_take_few_bytes():
    shares = shares_of()
    packed = PackedShares.of(shares)
    num_bytes = len(packed.sizes) + sum(len(contents) for _, contents in packed.columns)
    assert num_bytes < sum(one.num_bytes for one in shares) / 2
