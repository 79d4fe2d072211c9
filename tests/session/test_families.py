"""Models of pictures and text: gradients of model and encoder are those of one rank."""

from dataclasses import replace

import pytest
import torch

from megatron_hdp.media import ItemCostModel, MRope, RowGrid
from megatron_hdp.megatron import media as session_media
from megatron_hdp.megatron import parallel
from megatron_hdp.megatron.media.row_store import RowStore
from megatron_hdp.session import MediaItem, TokenBatch
from tests.session.test_exactness import LAYOUTS, TOLERANCE
from tests.support.family_media import ITEMS_OF, family_encoder
from tests.support.media import errors_of
from tests.support.own_loop import arguments_of, session_of

SLOW = pytest.mark.slow
WIDE = {"kv_channels": 12, "num_layers": 4}


def arguments_with(overrides=None):
    """Heads with six frequencies, and layers enough for deepstack on each first stage."""
    return arguments_of(**(WIDE | (overrides or {})))


@SLOW  # a run with rows for several layers: tests/training/test_pictures.py
@pytest.mark.parametrize("family", ITEMS_OF)
def test_rings(run_ranks, family):
    """Items across the slices of rings."""
    errors, calls = run_ranks(3, errors_of, arguments_with(), (0,), family=family)[0]
    assert all(error < TOLERANCE for error in errors.values()), errors
    assert sum(bool(rank) for rank in calls) == 3


@SLOW
@pytest.mark.parametrize("family", ITEMS_OF)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(run_ranks, family, layout):
    """Tensor ranks, stages, parts, streams, experts, recomputation, offload."""
    ranks, overrides = LAYOUTS[layout]
    arguments = arguments_with(overrides | {"num_layers": 8 if layout == "pp2-v2" else 4})
    errors, _ = run_ranks(ranks, errors_of, arguments, family=family)[0]
    assert all(error < TOLERANCE for error in errors.values()), errors


@SLOW
@pytest.mark.parametrize("family", ITEMS_OF)
@pytest.mark.parametrize("freezes", [False, True])
@pytest.mark.parametrize("trained", [(), ("encoder",), ("projector",), ("encoder", "projector")])
def test_frozen_parts(run_ranks, family, freezes, trained):
    """What is trained, of encoder, projector and language model, learns as on one rank."""
    how = {"trained": trained, "family": family, "freezes": freezes}
    errors, calls = run_ranks(2, errors_of, arguments_with(), **how)[0]
    assert all(error < TOLERANCE for error in errors.values()), errors
    num_encoded = sum(len(pack) for rank in calls for pack in rank)
    assert num_encoded == len(ITEMS_OF[family]) * (2 if trained else 1)


@SLOW
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_projector_alone(run_ranks, layout):
    """As LLaVA's first training: no weight of the language model is trained."""
    ranks, overrides = LAYOUTS[layout]
    arguments = arguments_with(overrides | {"num_layers": 8 if layout == "pp2-v2" else 4})
    how = {"trained": ("projector",), "family": "qwen3-vl", "freezes": True}
    errors, _ = run_ranks(ranks, errors_of, arguments, **how)[0]
    assert all(error < TOLERANCE for error in errors.values()), errors


@SLOW
@pytest.mark.parametrize("layout", ["pp2-parts", "experts"])
def test_a_model_that_megatron_has_built(run_ranks, layout):
    """Adapted in place, it takes rows and positions as ours does."""
    ranks, overrides = LAYOUTS[layout]
    how = {"family": "qwen3-vl", "by_megatron": True}
    errors, _ = run_ranks(ranks, errors_of, arguments_with(overrides), **how)[0]
    assert all(error < TOLERANCE for error in errors.values()), errors


class WrongGrid(torch.nn.Module):
    """Counts other rows than it makes."""

    cost = ItemCostModel(patch_s=1.0)
    patches_per_row, patches_per_pack = 1, 100
    positions = MRope((2, 2, 2))

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1).double())

    def patches(self, item):
        return 4

    def grid(self, item):
        return RowGrid(1, 1, 5)


def refusals(plain, shallow):
    """Body of a rank: what models without frequencies or layers for an encoder are answered."""
    found = [without_frequencies(plain)]
    parallel.finish()
    return [*found, without_layers(shallow)]


def refusal(session):
    """Of an encoder with rows for several layers."""
    with pytest.raises(ValueError) as caught:
        session.attach_encoder(family_encoder("qwen3-vl"))
    return str(caught.value)


def without_frequencies(arguments):
    parallel.initialise(arguments)
    session = session_of(arguments)
    found = [refusal(session)]
    session.attach_encoder(family_encoder("llava-clip"))  # asks nothing of the model
    return found


def without_layers(arguments):
    parallel.initialise(arguments)
    session = session_of(arguments)
    found = [refusal(session)]
    session.attach_encoder(WrongGrid())
    try:
        session.step(TokenBatch([[1] * 8], media=[MediaItem(0, 1, "picture")]))
    except ValueError as error:
        found.append(str(error))
    return found


def test_models_that_an_encoder_does_not_fit(run_ranks):
    """Every rank says so, the last stage too; text runs on."""
    shallow = arguments_with({"num_layers": 2, **LAYOUTS["pp2"][1]})
    first, second = run_ranks(2, refusals, arguments_of(), shallow)
    assert first == second
    expected = [
        ["found 2 rotary frequencies, expected 6"],
        ["found 1 layers on the first pipeline stage", "a grid of 1 x 1 x 5 rows"],
    ]
    for kinds, found in zip(expected, first, strict=True):
        assert all(kind in one for kind, one in zip(kinds, found, strict=True)), found


def levels_swapped(self, rows, level):
    """Takes the last level for the first."""
    return LEVEL(self, rows, self.levels - 1 - level)


def axes_swapped(self, micro_batch):
    """Takes height for width."""
    placed = WITH_POSITIONS(self, micro_batch)
    found = placed.axis_positions.reshape(3, -1)[[0, 2, 1]]
    return replace(placed, axis_positions=found.ravel())


def positions_like_tokens(self, micro_batch):
    """Counts rows as if they were tokens."""
    return micro_batch


LEVEL = RowStore._level
WITH_POSITIONS = session_media.BatchMedia.with_positions
MEDIA = "megatron_hdp.megatron.media.encoding"


@SLOW
@pytest.mark.parametrize(
    ("target", "fault"),
    [
        (f"{MEDIA}.RowStore._level", levels_swapped),
        (f"{MEDIA}.BatchMedia.with_positions", axes_swapped),
        (f"{MEDIA}.BatchMedia.with_positions", positions_like_tokens),
    ],
)
def test_faults_are_seen(run_ranks, target, fault):
    """The tests above would fail."""
    arguments = arguments_with()
    errors, _ = run_ranks(2, errors_of, arguments, (None,), (target, fault), family="qwen3-vl")[0]
    assert errors[None] > 1e-6
