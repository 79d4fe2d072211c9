"""A step comes out of a buffer as it went in, to the bit, and without a copy."""

import mmap
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hdp.data.steps import LostSource, RankStep, padding_micro_batch
from megatron_hdp.data_plane.wire import pack, unpack
from megatron_hdp.data_plane.wire.layout import ALIGNMENT_BYTES
from tests.support.rank_steps import differences, rank_steps, with_loss_tokens


def written(step, spare=0):
    packed = pack(step)
    buffer = memoryview(bytearray(b"\xff" * (packed.num_bytes + spare)))
    packed.write_into(buffer)
    return buffer


def arrays_of(step):
    records = (step.share, *step.micro_batches)
    values = [getattr(one, item.name) for one in records for item in fields(one)]
    return [value for value in values if isinstance(value, np.ndarray)]


@given(
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=12),
    ranks=st.integers(1, 5),
    seed=st.integers(0, 2**31),
    reads_tokens=st.booleans(),
    token_multiple=st.sampled_from([1, 16]),
    spare=st.sampled_from([0, 1000]),
)
def test_a_step_comes_out_as_it_went_in(lengths, ranks, seed, spare, **reader):
    for step in rank_steps(lengths, ranks, seed=seed, **reader):
        assert differences(step, unpack(written(step, spare))) == []


def test_what_differs_is_found():
    step = rank_steps([40, 9, 17])[0]
    part = step.micro_batches[0]
    tokens = part.tokens.copy()
    tokens[-1] ^= 1
    others = {
        "step.micro_batches.0.tokens": replace(part, tokens=tokens),
        "step.micro_batches.0.labels": replace(part, labels=part.labels.astype(np.int32)),
        "step.micro_batches.0.ring": replace(part, ring=[*part.ring]),
        "step.micro_batches.0.offload_ratio": replace(part, offload_ratio=-0.0),
    }
    for where, other in others.items():
        changed = replace(step, micro_batches=(other, *step.micro_batches[1:]))
        assert differences(step, changed) == [where]
    assert differences(step, with_loss_tokens(step, 1)) == ["step.totals.amounts.loss_tokens"]


def test_arrays_are_aligned_views_of_the_map_that_can_be_written():
    step = max(rank_steps([40, 9, 17, 80]), key=lambda one: len(one.share.ids))
    packed = pack(step)
    mapped = mmap.mmap(-1, packed.num_bytes)
    packed.write_into(memoryview(mapped))
    found = unpack(memoryview(mapped))
    arrays = arrays_of(found)
    assert len(arrays) == 17 + 8 * len(step.micro_batches)
    origin = np.frombuffer(mapped, np.uint8).ctypes.data
    for array in arrays:
        assert array.base is mapped and array.flags.writeable
        assert (array.ctypes.data - origin) % ALIGNMENT_BYTES == 0
    part = next(one for one in found.micro_batches if one.sequence_ids)
    part.drop(part.sequence_ids)
    assert not part.tokens.any() and not part.loss_mask.any()


def test_a_rank_without_micro_batches_and_a_step_without_any():
    step = rank_steps([40])[0]
    empty = RankStep(step.totals, step.share, ())
    assert differences(empty, unpack(written(empty))) == []
    padding = replace(empty, micro_batches=(padding_micro_batch(3, 4),))
    found = unpack(written(padding))
    assert differences(padding, found) == []
    assert found.micro_batches[0].index is None


def test_what_is_lost_travels_too():
    step = rank_steps([40, 9, 17])[0]
    lost = (LostSource("böcker", "„gone”\n", (2, 0)), LostSource("pages", "", ()))
    step = replace(
        step,
        totals=replace(
            step.totals,
            before=replace(step.totals.before, without=("pages",)),
            without={"pages": "cut"},
        ),
        lost=lost,
    )
    assert differences(step, unpack(written(step))) == []


def test_a_buffer_that_is_cut_short_is_refused():
    step = rank_steps([40, 9, 17])[0]
    packed = pack(step)
    whole = written(step)
    with pytest.raises(ValueError, match=rf"found a buffer of {packed.num_bytes - 1:,} bytes, exp"):
        packed.write_into(whole[:-1])
    for length in (0, 15, 16, 20, len(whole) // 2, len(whole) - 1):
        with pytest.raises(ValueError, match="found a buffer of .*, expected at least .*cut short"):
            unpack(whole[:length])


def test_a_buffer_of_something_else_is_refused():
    packed = pack(rank_steps([40, 9, 17])[0])
    kind, at = b'"type":"<i8"', b'"at":0'
    for right, wrong, words in (
        (kind, b'"type":"<i4"', "found an array of .*damaged"),
        (kind, b'"type":"|O"', "found an array of .*damaged"),
        (kind, b'"type":3', "found an array of .*damaged"),
        (kind, b'"type":"<u8"', "found an array of .*damaged"),
        (at, b'"at":-99999', "found an array of .* at byte -"),
        (at, b'"at":99999999', "expected at least"),
    ):
        changed = replace(packed, header=packed.header.replace(right, wrong, 1))
        buffer = memoryview(bytearray(packed.num_bytes + 1000))
        changed.write_into(buffer)
        with pytest.raises(ValueError, match=words):
            unpack(buffer)
    buffer[0] = 0
    with pytest.raises(ValueError, match="beginning of a step, expected b'HDPSTEP1': .*not a"):
        unpack(buffer)


def test_what_json_would_change_is_never_packed():
    step = rank_steps([40, 9])[0]
    for value in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="JSON compliant"):
            pack(replace(step, totals=replace(step.totals, efficiency=value)))
    part = step.micro_batches[0]
    changed = {"tokens": part.tokens.astype(np.int32), "labels": part.labels.reshape(1, -1)}
    for name, array in changed.items():
        with pytest.raises(AssertionError):
            pack(replace(step, micro_batches=(replace(part, **{name: array}),)))
