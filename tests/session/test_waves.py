"""Items encoded in waves: gradients stay those of one rank, and late stages have more time."""

import itertools
import time
import weakref
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_hdp.media.waves import fitting_starts
from megatron_hdp.megatron import parallel
from megatron_hdp.megatron.media import encoding
from megatron_hdp.megatron.media.row_store import RowStore
from tests.session.test_cut_items import PLANS, cut_by
from tests.session.test_exactness import LAYOUTS, PP2, TOLERANCE
from tests.session.test_families import arguments_with
from tests.support import gradients
from tests.support.media import Encoder, batch_with_items, errors_of
from tests.support.own_loop import arguments_of, session_of
from tests.support.ranks import RankError, RankTimeout

SLOW = pytest.mark.slow
MEDIA = encoding.__name__
RINGS = {"rings": (3, {})}
SEND, TAKE, RETURN = RowStore.send, RowStore.take, RowStore._return_next
ENCODED, RETURNED = encoding.StepMedia._encoded, RowStore.returned


def fine(found):
    errors, _ = found[0]
    assert errors and all(error < TOLERANCE for error in errors.values()), errors


def store_of_job():
    return dist.distributed_c10d._get_default_store()


def tells_that_it_took(self, places, level):
    """Notes that the first stage runs a micro-batch with rows."""
    found = TAKE(self, places, level)
    store_of_job().set("took rows", "yes")
    return found


def encodes_once_rows_were_taken(self, wave):
    """On the last stage, of the last wave."""
    if self.job.place.stage and wave == len(self.exchanges) - 1:
        store_of_job().wait(["took rows"], timedelta(seconds=60))
    return ENCODED(self, wave)


def test_a_late_stage_encodes_while_the_first_one_computes(run_ranks):
    """It would wait for ever, did the first micro-batch wait for the rows of all."""
    planted = (
        (f"{MEDIA}.RowStore.take", tells_that_it_took),
        (f"{MEDIA}.StepMedia._encoded", encodes_once_rows_were_taken),
    )
    fine(run_ranks(2, errors_of, arguments_of(**PP2), (None,), *planted, waves=3))


@SLOW
@pytest.mark.parametrize("share", [1e-13, 1.0])
def test_late_stages_encode_more_where_they_would_wait(run_ranks, share):
    """Pictures that take little are encoded by the last stage; of many each stage has its part."""
    cost = replace(Encoder.cost, patch_s=share, patch2_s=0.0, pack_s=0.0)
    found = run_ranks(
        2, errors_of, arguments_of(**PP2), (None,), ("tests.support.media.Encoder.cost", cost)
    )
    fine(found)
    first, last = (sum(map(sum, calls)) for calls in found[0][1])
    assert first + last == 2 * sum(len(one.data) for one in batch_with_items().media)
    assert last > 3 * first if share < 1 else last < 2 * first


@SLOW
@pytest.mark.parametrize("waves", [1, 2, 3, None])
@pytest.mark.parametrize("layout", [*LAYOUTS, *RINGS])
def test_layouts(run_ranks, layout, waves):
    ranks, overrides = (LAYOUTS | RINGS)[layout]
    fine(run_ranks(ranks, errors_of, arguments_of(**overrides), (None, 0), waves=waves))


def any_starts(seed, num_slots, num_waves):
    """Any boundaries of waves."""
    rng = np.random.default_rng(seed)
    chosen = rng.integers(0, num_slots, rng.integers(0, num_slots + 1))
    return np.unique([0, *chosen])


@SLOW
@pytest.mark.parametrize("layout", ["rings", "pp2", "pp2-v2", "tp2-sp", "streams", "recompute"])
@pytest.mark.parametrize("seed", range(4))
def test_any_waves_with_levels_and_cut_items(run_ranks, layout, seed):
    ranks, overrides = (LAYOUTS | RINGS)[layout]
    overrides = overrides | {"num_layers": 8 if layout == "pp2-v2" else 4}
    planted = (
        (f"{MEDIA}.even_starts", partial(any_starts, seed)),
        (PLANS, partial(cut_by, seed)),
    )
    how = {"family": "qwen3-vl", "waves": 2}
    fine(run_ranks(ranks, errors_of, arguments_with(overrides), (None, seed), *planted, **how))


@SLOW
@pytest.mark.parametrize("balance", ["home", "replica", "micro-batch"])
@pytest.mark.parametrize("trained", [("model",), ("model", "encoder")])
def test_whoever_encodes_and_learns(run_ranks, balance, trained):
    how = {"balance": balance, "trained": trained, "waves": 2}
    fine(run_ranks(3, errors_of, arguments_of(), **how))


@gradients.seldom_compiled
def begun_by(arguments, media, faults=(), **how):
    """Body of a rank: the exchanges of a step in the order in which it begins them; losses."""
    parallel.initialise(arguments)
    found = []

    def send(self, made):
        found.append(("rows", self._num_sent))
        return SEND(self, made)

    def return_next(self):
        found.append(("gradients", self._num_returned))
        return RETURN(self)

    batch = batch_with_items(media)
    with ExitStack() as planted:
        for name, replacement in (("send", send), ("_return_next", return_next), *faults):
            planted.enter_context(mock.patch.object(RowStore, name, replacement))
        session = session_of(arguments)
        session.attach_encoder(Encoder(), **how)
        loss = session.step(batch).loss
        order = tuple(found)
        evaluated = session.step(batch, forward_only=True).loss
    parallel.finish()
    return order, found[len(order) :], (loss, evaluated)


SPARSE = ((7, 1, 90),)
"""One item, whose rows most micro-batches have nothing of."""


@SLOW
@pytest.mark.parametrize("layout", ["rings", "pp2-v2", "tp2-sp", "tp2-overlap"])
@pytest.mark.parametrize("media", [SPARSE, ((2, 0, 3), *SPARSE, (5, 5, 25))])
def test_all_ranks_begin_all_waves_in_one_order(run_ranks, layout, media):
    """Also those who want nothing in some wave, or in none."""
    ranks, overrides = (LAYOUTS | RINGS)[layout]
    given = arguments_of(**overrides), media
    whole = run_ranks(ranks, begun_by, *given, waves=1)
    found = run_ranks(ranks, begun_by, *given, waves=100)
    num = len(found[0][0]) // 2
    assert min(len(media), 2) <= num <= len(media)
    rows = [("rows", wave) for wave in range(num)]
    for (order, evaluated, losses), (*_, expected) in zip(found, whole, strict=True):
        assert [*order] == rows + [("gradients", wave) for wave in range(num)]
        assert evaluated == rows
        assert losses == pytest.approx(expected, rel=1e-12)


def one_wave_lost(self, wave, num_made):
    """Drops the gradients of a wave."""
    found = RETURNED(self, wave, num_made)
    return torch.zeros_like(found) if wave == 1 else found


def read_too_early(self, places, level):
    """Finds nothing where rows of the last wave will be."""
    found = ROWS_AT(self, places, level)
    return found * torch.from_numpy(self._waves_of(places) < len(self._ends) - 1)[:, None]


ROWS_AT = RowStore.rows_at


@SLOW
@pytest.mark.parametrize(
    ("name", "fault"), [("returned", one_wave_lost), ("rows_at", read_too_early)]
)
def test_faults_are_seen(run_ranks, name, fault):
    planted = f"{MEDIA}.RowStore.{name}", fault
    errors, _ = run_ranks(2, errors_of, arguments_of(**PP2), (None,), planted, waves=3)[0]
    assert errors[None] > 1e-6


def never_later(self, made):
    """On one rank never begins the exchanges of later waves."""
    if not (dist.get_rank() and self._num_sent):
        SEND(self, made)


@SLOW
def test_a_rank_that_does_not_begin_a_wave_is_waited_for(run_ranks):
    fault = f"{MEDIA}.RowStore.send", never_later
    with pytest.raises(RankTimeout, match="row_store.py"):
        run_ranks(2, errors_of, arguments_of(**PP2), (None,), fault, waves=2, timeout_s=45)


def leaves_at_once(self, places, level, gradient):
    """Begins to send gradients of a wave with the first of them."""
    self._missing[self._waves_of(places)] = len(places)
    return ADD(self, places, level, gradient)


ADD = RowStore.add


@SLOW
def test_gradients_that_come_late_are_seen(run_ranks):
    fault = f"{MEDIA}.RowStore.add", leaves_at_once
    with pytest.raises(RankError, match="came after they left"):
        run_ranks(2, errors_of, arguments_of(**PP2), (None,), fault, waves=2)


class Failing(Encoder):
    """Raises on the rank that has the item of the last wave."""

    def forward(self, items):
        if any(len(one) == 4 * 80 for one in items):
            raise ValueError("found a picture that is none")
        return super().forward(items)


@gradients.seldom_compiled
def mistakes(arguments):
    """Body of a rank: what steps say whose last wave has an item that cannot be encoded."""
    parallel.initialise(arguments)
    session, batch = session_of(arguments), batch_with_items(((2, 0, 3), (5, 5, 25), (7, 120, 80)))
    found = []
    for forward_only in (False, True):
        session.attach_encoder(Failing(), waves=100)
        with pytest.raises(ValueError) as error:
            session.step(batch, forward_only=forward_only)
        found.append(str(error.value))
    session.attach_encoder(Encoder(), waves=100)
    found.append(session.step(batch).loss)
    parallel.finish()
    return found


@SLOW
@pytest.mark.parametrize(("ranks", "overrides"), [(2, PP2), (3, {})])
def test_a_mistake_in_a_later_wave_ends_the_step_everywhere(run_ranks, ranks, overrides):
    first, *others = run_ranks(ranks, mistakes, arguments_of(**overrides))
    assert all(one == first for one in others)
    *sentences, loss = first
    assert all("found a picture that is none" in one for one in sentences) and loss != 0


SMALL = ((2, 0, 20), (3, 10, 20), (4, 0, 20), (5, 5, 20), (7, 1, 20), (7, 90, 20), (8, 0, 20))
ON_DEVICE, ON_HOST = RowStore._on_device, RowStore._on_host


@gradients.seldom_compiled
def peaks_of(arguments, **how):
    """Body of a rank: rows in buffers of one call on the device at a time, at most; rows parked."""
    parallel.initialise(arguments)
    alive, peaks, parked = [0], [0], []

    def on_device(self, num):
        for _ in range(100 * bool(alive[0])):  # a thread of gloo's may hold what has come
            time.sleep(0.01)
            if not alive[0]:
                break
        found = ON_DEVICE(self, num)
        alive[0] += num
        weakref.finalize(found, lambda: alive.__setitem__(0, alive[0] - num))
        peaks.append(alive[0])
        return found

    def on_host(self, num):
        parked.append((num, len(self._exchanges)))
        return ON_HOST(self, num)

    with (
        mock.patch.object(RowStore, "_on_device", on_device),
        mock.patch.object(RowStore, "_on_host", on_host),
    ):
        session = session_of(arguments)
        session.attach_encoder(Encoder(), **how)
        batch = batch_with_items(SMALL)
        evaluated = session.step(batch, forward_only=True).loss
        of_evaluation = max(peaks)
        loss = session.step(batch).loss
    parallel.finish()
    return of_evaluation, max(peaks), parked, (loss, evaluated)


@SLOW
def test_the_device_holds_few_rows(run_ranks):
    """Those of a wave; with gradients, what leaves and what comes."""
    total, most = sum(rows for *_, rows in SMALL), 60
    whole = run_ranks(2, peaks_of, arguments_of(**PP2), most_rows=total)
    assert whole[0][0] == total and not whole[0][2]
    found = run_ranks(2, peaks_of, arguments_of(**PP2), most_rows=most)
    for (evaluated, learnt, parked, losses), (*_, expected) in zip(found, whole, strict=True):
        assert evaluated <= most and 0 < learnt <= 2 * most
        assert len(parked) == 3 and all(num > 2 for _, num in parked)  # gradients of one of both
        assert losses == pytest.approx(expected, rel=1e-12)
    assert found[0][0] > 0 and found[0][2][0][0] == total and found[1][2][0][0] == 0


def as_few_as_fit(starts, num_slots, rows_of, most):
    """A limit that every single slot keeps."""
    most = max(rows_of(slot, slot + 1) for slot in range(num_slots))
    found = fitting_starts(starts, num_slots, rows_of, most)
    for begin, end in itertools.pairwise([*found, num_slots]):
        assert rows_of(begin, end) <= most
    return found


TIGHT = f"{MEDIA}.fitting_starts", as_few_as_fit


@SLOW
@pytest.mark.parametrize("layout", [*LAYOUTS, *RINGS])
def test_rows_in_host_memory(run_ranks, layout):
    ranks, overrides = (LAYOUTS | RINGS)[layout]
    how = {"most_rows": 1, "waves": 1}
    fine(run_ranks(ranks, errors_of, arguments_of(**overrides), (None, 0), TIGHT, **how))


@SLOW
@pytest.mark.parametrize("layout", ["rings", "pp2", "tp2-sp"])
@pytest.mark.parametrize("seed", range(2))
def test_levels_and_cut_items_in_host_memory(run_ranks, layout, seed):
    ranks, overrides = (LAYOUTS | RINGS)[layout]
    planted, how = (TIGHT, (PLANS, partial(cut_by, seed))), {"family": "qwen3-vl", "most_rows": 1}
    arguments = arguments_with(overrides | {"num_layers": 4})
    fine(run_ranks(ranks, errors_of, arguments, (None, seed), *planted, **how))


def never_back(self, places, level, gradient):
    """Loses gradients on their way to host memory."""
    self._gradients.zero_()
    return ADD(self, places, level, gradient)


@SLOW
def test_gradients_that_are_not_parked_are_seen(run_ranks):
    planted = TIGHT, (f"{MEDIA}.RowStore.add", never_back)
    errors, _ = run_ranks(2, errors_of, arguments_of(), (None,), *planted, most_rows=1)[0]
    assert errors[None] > 1e-6


@gradients.seldom_compiled
def too_many(arguments):
    """Body of a rank: what a step says of a micro-batch with more rows than fit."""
    parallel.initialise(arguments)
    session = session_of(arguments)
    session.attach_encoder(Encoder(), most_rows=30)
    with pytest.raises(ValueError) as error:
        session.step(batch_with_items())
    parallel.finish()
    return str(error.value)


@SLOW
def test_a_micro_batch_of_too_many_rows_is_one_sentence_on_every_rank(run_ranks):
    first, second = run_ranks(2, too_many, arguments_of(**PP2))
    assert first == second and "expected at most 30, as --hdp-encoder-rows says" in first
