"""Items that several ranks encode together: gradients are those of one rank that has them whole."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_hdp.encoders import Qwen3VLEncoder, Qwen25VLEncoder
from megatron_hdp.media import ItemPlan
from megatron_hdp.megatron.media import encoding
from megatron_hdp.runtime.pieces import Members
from tests.session.test_exactness import LAYOUTS, TOLERANCE
from tests.session.test_families import arguments_with
from tests.support.family_media import GRIDS_OF, family_encoder
from tests.support.media import errors_of, made
from tests.support.ranks import RankError
from tests.support.vision_models import drawn_patches

SLOW = pytest.mark.slow
FAMILIES = ("qwen3-vl", "qwen2.5-vl")
PLANS = f"{encoding.__name__}.plan_items"
ENCODE_PIECE = Qwen3VLEncoder.encode_piece
OF_FRAMES = 3 * 4 * 12
"""Patches of the item of three frames, which do not see each other."""


def cut_by(seed, batch, cost, strategy):
    """A plan in which items are cut over any number of ranks, and others are whole."""
    rng, rows = np.random.default_rng(seed), batch.patches // batch.patches_per_row
    degrees = np.minimum(rng.integers(1, batch.num_ranks + 1, len(rows)), rows)
    degrees[batch.patches == OF_FRAMES] = 1
    return ItemPlan(
        strategy=strategy,
        first_ranks=rng.integers(0, batch.num_ranks - degrees + 1).astype(np.int32),
        degrees=degrees.astype(np.int32),
        turns=rng.permutation(len(rows)).astype(np.int32),
        phases=np.zeros(len(rows), dtype=np.int32),
    )


def errors_where_cut(run_ranks, ranks, family, seed, *faults, overrides=None, **how):
    arguments = arguments_with(overrides)
    planted = (PLANS, partial(cut_by, seed)), *faults
    return run_ranks(ranks, errors_of, arguments, (None, 0), *planted, family=family, **how)[0]


@SLOW
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", range(4))
def test_rings(run_ranks, family, seed):
    errors, calls = errors_where_cut(run_ranks, 4, family, seed)
    assert all(error < TOLERANCE for error in errors.values()), errors
    assert sum(len(pack) for rank in calls for pack in rank) < 2 * len(made(family)[1].media)


@SLOW
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", ["tp2-sp", "pp2-v2", "streams"])
def test_layouts(run_ranks, family, layout):
    ranks, overrides = LAYOUTS[layout]
    overrides = overrides | {"num_layers": 8 if layout == "pp2-v2" else 4}
    errors, _ = errors_where_cut(run_ranks, ranks, family, 1, overrides=overrides)
    assert all(error < TOLERANCE for error in errors.values()), errors


@SLOW
@pytest.mark.parametrize("trained", [(), ("encoder",), ("projector",)])
def test_frozen_parts(run_ranks, trained):
    errors, _ = errors_where_cut(run_ranks, 3, "qwen3-vl", 2, trained=trained)
    assert all(error < TOLERANCE for error in errors.values()), errors


def own_alone(self, gradient):
    """Keeps what this member itself has as gradient of its keys and values."""
    return gradient.split(list(self.sizes), dim=1)[self.place].contiguous()


@SLOW
def test_a_fault_is_seen(run_ranks):
    fault = f"{Members.__module__}.Members.returned", own_alone
    errors, _ = errors_where_cut(run_ranks, 3, "qwen3-vl", 2, fault)
    assert errors[None] > 1e-6


def second_fails(self, item, degree, member, gather):
    """The second member's piece is none; the others wait for it."""
    if member == 1:
        raise ValueError("found a piece that is none")
    return ENCODE_PIECE(self, item, degree, member, gather)


@SLOW
def test_a_mistake_in_a_piece_ends_its_rank(run_ranks):
    fault = f"{Qwen3VLEncoder.__module__}.Qwen3VLEncoder.encode_piece", second_fails
    with pytest.raises(RankError, match="ValueError: found a piece that is none"):
        errors_where_cut(run_ranks, 2, "qwen3-vl", 2, fault, timeout_s=100)


def shared(places, mine, rank):
    """Members by hand: each waits for what all have."""
    held, barrier = places

    def gather(given):
        held[rank] = given
        barrier.wait(60)
        found = torch.cat([held[one] for one in mine], dim=1)
        barrier.wait(60)
        return found

    return gather


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("degree", [1, 2, 3, 8, 40])
def test_pieces_have_all_rows_once(family, degree):
    """Even where there are more ranks than windows; those of Qwen2.5-VL are whole."""
    encoder = family_encoder(family)
    (item,) = drawn_patches(encoder, [(1, 12, 26)])
    pieces = encoder.rows_of_pieces(item, degree)
    assert len(pieces) == degree
    assert sorted(np.concatenate(pieces).tolist()) == list(range(6 * 13))
    assert max(map(len, pieces)) <= 6 * 13 / degree + 16
    some = [member for member, rows in enumerate(pieces) if len(rows)]
    places = {}, threading.Barrier(len(some))
    with ThreadPoolExecutor(len(some)) as pool:
        found = pool.map(
            lambda one: encoder.encode_piece(item, degree, one, shared(places, some, one)), some
        )
        rows = torch.cat(list(found))
    expected = encoder([item])[np.concatenate(pieces)]
    torch.testing.assert_close(rows, expected, rtol=1e-12, atol=1e-12)
    weights = list(encoder.parameters())
    slope = torch.randn(rows.shape, generator=torch.Generator().manual_seed(1)).double()
    for one, other in zip(
        torch.autograd.grad((rows * slope).sum(), weights),
        torch.autograd.grad((expected * slope).sum(), weights),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def gathered_gradients(sizes):
    """Body of a rank: what it is given of all, and its gradient of all members' losses."""
    rank = dist.get_rank()
    mine = torch.full((2, sizes[rank], 3), rank + 1.0, dtype=torch.float64, requires_grad=True)
    found = Members(range(len(sizes)), rank, sizes)(mine)
    (found * found * (rank + 1)).sum().backward()
    return found.detach(), mine.grad


def test_members_have_what_all_have_and_gradients_go_back(run_ranks):
    sizes = [2, 3]
    for rank, (found, gradient) in enumerate(run_ranks(2, gathered_gradients, sizes)):
        expected = torch.tensor([1.0] * 2 + [2.0] * 3).double()[None, :, None].expand(2, 5, 3)
        assert torch.equal(found, expected)
        assert torch.equal(gradient, torch.full((2, sizes[rank], 3), 2.0 * (rank + 1) * 3).double())


def test_what_does_not_see_all_of_an_item_is_not_cut():
    for family, kind in zip(FAMILIES, (Qwen3VLEncoder, Qwen25VLEncoder), strict=True):
        encoder = family_encoder(family)
        assert isinstance(encoder, kind)
        image, video = drawn_patches(encoder, [(1, 4, 4), (2, 4, 4)])
        assert encoder.most_ranks([image]) == 8 and encoder.most_ranks([image, video]) == 1
    assert family_encoder("llava-clip").most_ranks(drawn_patches) == 1


def errors_of_images(arguments):
    """Body of a rank: pictures alone, whose keys and values take no time to send."""
    grids = [(1, *one[1:]) for one in GRIDS_OF["qwen3-vl"]]
    costs = replace(family_encoder("qwen3-vl").cost, gathered_s_per_patch=0.0)
    with (
        mock.patch.dict(GRIDS_OF, {"qwen3-vl": grids}),
        mock.patch.object(Qwen3VLEncoder, "cost", costs),
    ):
        return errors_of(arguments, (None,), family="qwen3-vl")


@SLOW
def test_the_planner_cuts_what_is_too_large_for_one_rank(run_ranks):
    errors, calls = run_ranks(4, errors_of_images, arguments_with())[0]
    assert all(error < TOLERANCE for error in errors.values()), errors
    whole = [patches for rank in calls for pack in rank for patches in pack]
    assert len(whole) > 0 and max(whole) < 12 * 26
