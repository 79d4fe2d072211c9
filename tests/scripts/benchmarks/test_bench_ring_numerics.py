"""Rings emulated: exact in float64, and what rounding sums at every hop adds to their errors."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

from tests.support import ring_cases

sys.path.append(str(Path(__file__).parents[3] / "scripts" / "benchmarks"))
numerics = importlib.import_module("bench_ring_numerics")


def whole(slices, head):
    """Slices of a ring as one sequence ``[s, 1, d]``."""
    heads, tails = slices[:, head].chunk(2, dim=1)
    return torch.cat((heads.flatten(0, 1), tails.flip(0).flatten(0, 1)))[:, None]


@pytest.mark.parametrize("degree", [1, 2, 5])
def test_the_emulated_ring_is_attention(monkeypatch, degree):
    ring = numerics.Ring.random(degree, tokens=6, head_dim=8)
    found = numerics.attend(ring, numerics.EXACT)
    monkeypatch.setattr(ring_cases, "HEADS", 1)
    monkeypatch.setattr(ring_cases, "KV_HEADS", 1)
    monkeypatch.setattr(ring_cases, "SCALE", 8**-0.5)
    for head in range(numerics.HEADS):
        q, k, v, dout = (whole(x, head) for x in (ring.q, ring.k, ring.v, ring.dout))
        expected = ring_cases.reference((q, k, v), dout, "cpu")
        for part, wanted in zip(numerics.PARTS, expected, strict=True):
            error = ring_cases.relative_error(whole(found[part], head), wanted)
            assert error < 1e-13, part


def test_errors_of_bfloat16_sums_grow_with_the_hops_and_ours_do_not():
    found = {}
    for degree in (2, 64):
        ring = numerics.Ring.random(degree, tokens=8, head_dim=16)
        exact = numerics.attend(ring, numerics.EXACT)
        for rounding in (numerics.TRANSFORMER_ENGINE, numerics.OURS):
            found[rounding, degree] = numerics.errors(ring, rounding, exact)
    for part in numerics.PARTS:
        few, many = (found[numerics.OURS, degree][part][0] for degree in (2, 64))
        assert 1e-3 < few < 5e-3 and many < 1.2 * few
        few, many = (found[numerics.TRANSFORMER_ENGINE, degree][part][0] for degree in (2, 64))
        assert few < 5e-3 and many > 1.6 * few


def test_a_small_run(capsys):
    numerics.main(["--degrees", "2", "3", "--head-dims", "8", "--tokens", "4"])
    names, _, *rows = capsys.readouterr().out.splitlines()
    assert names == "| head dimension | degree | sums in | out | dq | dk | dv |"
    assert [row.split(" | ")[1:3] for row in rows] == [
        [degree, sums] for degree in ("2", "3") for sums in ("bfloat16", "float32")
    ]
    assert all(row.count(" %") == 4 for row in rows)
