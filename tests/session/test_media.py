"""Items of a session's batch: gradients of model and encoder are those of one rank."""

from dataclasses import replace

import pytest
import torch

from megatron_hdp.media import ITEM_STRATEGIES
from megatron_hdp.megatron import media as session_media
from megatron_hdp.megatron import parallel
from megatron_hdp.megatron.media.row_store import RowStore
from megatron_hdp.runtime.health import DisagreementError
from megatron_hdp.session import MediaItem, TokenBatch
from tests.session.test_exactness import LAYOUTS, TOLERANCE
from tests.support import gradients
from tests.support.media import CHANNELS, PER_ROW, Encoder, batch_with_items, errors_of
from tests.support.own_loop import arguments_of, session_of

SLOW = pytest.mark.slow


@pytest.mark.parametrize("seeds", [(1,), pytest.param((None, 0, 1), marks=SLOW)])
def test_rings_of_any_plan(run_ranks, seeds):
    """Items across the slices of rings; every item is encoded once, then once with a graph."""
    errors, calls = run_ranks(3, errors_of, arguments_of(), seeds)[0]
    assert all(error < TOLERANCE for error in errors.values()), errors
    batch = batch_with_items()
    once = sorted(len(one.data) for one in batch.media)
    assert sorted(n for rank in calls for pack in rank for n in pack) == sorted(2 * once)
    assert all(sum(pack) <= Encoder.patches_per_pack for rank in calls for pack in rank)
    assert sum(bool(rank) for rank in calls) == 3


@pytest.mark.parametrize(
    ("layout", "seeds"),
    [("pp2-v2", (None,)), *(pytest.param(one, (None, 0), marks=SLOW) for one in LAYOUTS)],
)
def test_layouts(run_ranks, layout, seeds):
    """Tensor ranks with their own share of tokens, stages without any, streams that run twice."""
    ranks, overrides = LAYOUTS[layout]
    errors, _ = run_ranks(ranks, errors_of, arguments_of(**overrides), seeds)[0]
    assert all(error < TOLERANCE for error in errors.values()), errors


@SLOW
@pytest.mark.parametrize("balance", ITEM_STRATEGIES)
def test_whoever_encodes(run_ranks, balance):
    """The gradient does not depend on it."""
    errors, _ = run_ranks(3, errors_of, arguments_of(), balance=balance)[0]
    assert all(error < TOLERANCE for error in errors.values()), errors


@SLOW
@pytest.mark.parametrize("frozen", ["encoder", "model"])
def test_one_of_them_is_frozen(run_ranks, frozen):
    """A frozen encoder runs once; a frozen model still passes gradients on."""
    trained = ("model",) if frozen == "encoder" else ("encoder",)
    overrides = {} if frozen == "encoder" else {"hdp_frozen": ("embedding.*", "*.linear_*")}
    errors, calls = run_ranks(2, errors_of, arguments_of(**overrides), trained=trained)[0]
    assert all(error < TOLERANCE for error in errors.values()), errors
    num_encoded = sum(len(pack) for rank in calls for pack in rank)
    assert num_encoded == len(batch_with_items().media) * (1 if frozen == "encoder" else 2)


def rows_one_further(self, batch, micro_batch):
    """Takes the row behind the token's own."""
    found = ROWS_IN(self, batch, micro_batch)
    return found.clip(min=-1, max=self.num_rows - 2) + (found >= 0)


def gradients_lost(self, wave, num_made):
    """Gives a rank no gradients of the rows that it made."""
    found = RETURNED(self, wave, num_made)
    return torch.zeros_like(found) if parallel.hdp_rank() == 1 else found


ROWS_IN, RETURNED = session_media.BatchMedia.rows_in, RowStore.returned
MEDIA = "megatron_hdp.megatron.media.encoding"


@SLOW
@pytest.mark.parametrize(
    ("target", "fault"),
    [
        (f"{MEDIA}.BatchMedia.rows_in", rows_one_further),
        (f"{MEDIA}.RowStore.returned", gradients_lost),
    ],
)
def test_faults_are_seen(run_ranks, target, fault):
    """The tests above would fail."""
    errors, _ = run_ranks(2, errors_of, arguments_of(), (None,), (target, fault))[0]
    assert errors[None] > 1e-6


class Drawing(Encoder):
    """Makes other rows each time."""

    def forward(self, items):
        return super().forward(items) * (1 + len(self.calls))


class Failing(Encoder):
    """Raises on the rank that has this item."""

    def forward(self, items):
        if any(len(one) == 12 for one in items):
            raise ValueError("found a picture that is none")
        return super().forward(items)


def item(sequence=0, start=0, patches=PER_ROW):
    """Any."""
    return MediaItem(sequence, start, torch.zeros(patches, CHANNELS).double())


@gradients.seldom_compiled
def refusals(arguments):
    """Body of a rank: what each mistake is answered with."""
    parallel.initialise(arguments)
    session = session_of(arguments)
    tokens = TokenBatch([[1] * 8, [2] * 8])
    batches = {
        "no encoder": [item()],
        "no multiple": [item(patches=6)],
        "no sequence": [item(sequence=2)],
        "no room": [item(start=6, patches=12)],
        "shared": [item(start=2, patches=8), item(start=3)],
    }
    found = {}

    def answer(name, batch):
        try:
            session.step(batch)
        except ValueError as error:
            found[name] = str(error)

    for name, media in batches.items():
        answer(name, replace(tokens, media=media))
        session.attach_encoder(Encoder())
    for encoder in (Drawing, Failing):
        session.attach_encoder(encoder())
        answer(encoder.__name__, batch_with_items())
    session.attach_encoder(Encoder())
    before = session.step(tokens).loss
    assert session.step(replace(tokens, media=[item()]), forward_only=True).loss != before
    assert session.log_probs(replace(tokens, media=[item(1, 2)]))[1][2] == 0
    with pytest.raises(DisagreementError, match="media: "):
        session.step(replace(tokens, media=[item(start=parallel.hdp_rank())]))
    parallel.finish()
    return found


def test_mistakes_are_one_sentence_on_every_rank(run_ranks):
    """And none hangs; behind them the session goes on."""
    arguments = arguments_of()
    first, second = run_ranks(2, refusals, arguments)
    expected = {
        "no encoder": "1 items in the batch and no encoder",
        "no multiple": "item 0 of 6 patches, expected a multiple of 4",
        "no sequence": "item 0 in sequence 2, expected one of the 2",
        "no room": "item 0 of 3 rows at token 6 of sequence 0",
        "shared": "item 0 shares tokens with another one",
        "Drawing": "the encoder's second run",
        "Failing": "found a picture that is none",
    }
    assert first.keys() == second.keys() == expected.keys()
    for name, sentence in expected.items():
        assert sentence in first[name] and sentence in second[name], (name, first[name])
