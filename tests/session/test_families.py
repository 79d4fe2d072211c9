"""Models of pictures and text: gradients of model and encoder are those of one rank."""

from dataclasses import replace

import pytest

from megatron_hdp.session import media as session_media
from tests.session.test_exactness import LAYOUTS, TOLERANCE
from tests.support.family_media import ITEMS_OF
from tests.support.media import errors_of
from tests.support.own_loop import arguments_of

SLOW = pytest.mark.slow
WIDE = {"kv_channels": 12, "num_layers": 4}


def arguments_with(overrides=None):
    """Heads with six frequencies, and layers enough for deepstack on each first stage."""
    return arguments_of(**(WIDE | (overrides or {})))


@pytest.mark.parametrize(
    "family", [pytest.param(one, marks=SLOW if one == "qwen2-audio" else ()) for one in ITEMS_OF]
)
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


def levels_swapped(self, rows):
    """Takes the second level for the first."""
    return LEVELS(self, rows)[::-1]


def axes_swapped(self, micro_batch):
    """Takes height for width."""
    placed = WITH_POSITIONS(self, micro_batch)
    found = placed.axis_positions.reshape(3, -1)[[0, 2, 1]]
    return replace(placed, axis_positions=found.ravel())


def positions_like_tokens(self, micro_batch):
    """Counts rows as if they were tokens."""
    return micro_batch


LEVELS = session_media.StepMedia._levels_of
WITH_POSITIONS = session_media.BatchMedia.with_positions
MEDIA = "megatron_hdp.session.media"


@SLOW
@pytest.mark.parametrize(
    ("target", "fault"),
    [
        (f"{MEDIA}.StepMedia._levels_of", levels_swapped),
        (f"{MEDIA}.BatchMedia.with_positions", axes_swapped),
        (f"{MEDIA}.BatchMedia.with_positions", positions_like_tokens),
    ],
)
def test_faults_are_seen(run_ranks, target, fault):
    """The tests above would fail."""
    arguments = arguments_with()
    errors, _ = run_ranks(2, errors_of, arguments, (None,), (target, fault), family="qwen3-vl")[0]
    assert errors[None] > 1e-6
