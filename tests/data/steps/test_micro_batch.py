"""The slices of all ranks, put back together, are the documents."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hdp.data.mixture import Position, Step
from megatron_hdp.data.steps import Reader, StepShares, padding_micro_batch, read_micro_batch
from megatron_hdp.data.tables import SequenceTable
from megatron_hdp.planner import MicroBatch, Plan, chunk_tokens, plan
from megatron_hdp.planner.lockstep import PADDING
from tests.support.examples import some
from tests.support.random_plans import in_streams, random_plan

# A busy machine is no failure.
examples = settings(max_examples=some(60))


class CountingFile:
    """Documents in memory; counts the tokens that were read."""

    def __init__(self, lengths):
        rng = np.random.default_rng(0)
        self.tokens = rng.integers(1, 10**6, size=sum(lengths))
        self.documents = np.split(self.tokens, np.cumsum(lengths)[:-1])  # views
        self.num_read = 0

    def read(self, begin, count):
        assert 0 <= begin <= begin + count <= len(self.tokens)
        self.num_read += count
        return self.tokens[begin : begin + count]


class Pieces:
    """Consecutive pieces of one document, of any lengths."""

    def __init__(self, lengths):
        self._lengths = np.array(lengths)

    def __len__(self):
        return len(self._lengths)

    def lengths(self, rows):
        return self._lengths[rows]

    def num_labels(self, rows):
        return self._lengths[rows] - (np.asarray(rows) == len(self) - 1)

    def begins(self, rows):
        return (np.cumsum(self._lengths) - self._lengths)[rows]

    def documents(self, rows):
        return np.zeros_like(rows)

    starts = begins


def of_row(column, row):
    return int(column(np.array([row]))[0])


class OneSource:
    """A corpus of one table and one file."""

    def __init__(self, table, file):
        self.table, self.file = table, file

    def tokens(self, source, row, start, count):
        return self.file.read(of_row(self.table.begins, row) + start, count)

    def is_trained(self, source, row, start, stop):
        return np.ones(stop - start, dtype=bool)


def step_of(rows, table):
    return Step(
        sources=np.zeros_like(rows),
        rows=rows,
        starts=np.zeros_like(rows),
        lengths=table.lengths(rows),
        num_labels=table.num_labels(rows),
        num_loss_tokens=table.num_labels(rows),
        before=Position(),
        after=Position(),
        max_length=100,
        weights=(1.0,),
    )


def read(plan_, m, rank, rows, table, file, **more):
    """A rank's part; its sequences under their rows."""
    reader = Reader(rank, 10**6, reads_tokens=file is not None, **more)
    (share,) = StepShares(step_of(rows, table), plan_).of([rank])
    slot = share.indices.tolist().index(m)
    part = read_micro_batch(share, slot, reader, OneSource(table, file))
    return replace(part, sequence_ids=tuple(int(rows[i]) for i in part.sequence_ids))


def put_back(plan_, step_sequences, table, file):
    """Check every rank's part, and return how often each (row, position) was held and labelled."""
    held, labelled = {}, {}
    for m in range(plan_.num_micro_batches):
        micro_batch = plan_.micro_batch(m)
        for rank in micro_batch.ranks:
            before = file.num_read
            part = without_padding(read(plan_, m, rank, step_sequences, table, file))
            check_shapes(part, micro_batch, rank, plan_, table)
            num_runs = 2 * len(part.ring_slices) + len(part.local_lengths)
            assert file.num_read - before <= len(part.tokens) + num_runs
            walk(part, table, file, held, labelled)
    return held, labelled


def without_padding(part):
    """The part without what belongs to no sequence, which makes up two tokens."""
    if len(part.ring_slices) + len(part.local_lengths) == len(part.sequence_ids):
        assert len(part.tokens) >= 2
        return part
    assert part.local_lengths == (1, 1) and len(part.tokens) == 2 and not part.ring_slices
    assert part.sequence_index[1] == -1 and not part.loss_mask[1] and not part.tokens[1]
    arrays = ("tokens", "labels", "positions", "loss_mask", "sequence_index")
    first = {name: getattr(part, name)[:1] for name in arrays}
    return replace(part, local_lengths=(1,), **first)


def check_shapes(part, micro_batch, rank, plan_, table):
    degree = len(micro_batch.ranks)
    assert part.ring == micro_batch.ranks
    assert part.offload_ratio == micro_batch.offload_ratio
    assert len(part.tokens) == sum(part.ring_slices) + sum(part.local_lengths)
    for array in (part.labels, part.positions, part.loss_mask, part.sequence_index):
        assert array.shape == part.tokens.shape
    num_sharded = len(micro_batch.sequences) if degree > 1 else 0
    assert len(part.ring_slices) == num_sharded
    assert len(part.sequence_ids) == num_sharded + len(part.local_lengths)
    degrees = [degree] * num_sharded + [1] * len(part.local_lengths)
    sizes = [*(size // 2 for size in part.ring_slices), *part.local_lengths]
    for row, d, size in zip(part.sequence_ids, degrees, sizes, strict=True):
        assert size == chunk_tokens(of_row(table.lengths, row), d, plan_.slice_multiple)
    member, begin = micro_batch.ranks.index(rank), 0
    for size in part.ring_slices:
        chunk = size // 2
        assert part.positions[begin] == member * chunk
        assert part.positions[begin + chunk] == (2 * degree - 1 - member) * chunk
        begin += size


def walk(part, table, file, held, labelled):
    runs = [size // 2 for size in part.ring_slices for _ in range(2)] + list(part.local_lengths)
    rows = [row for row in part.sequence_ids[: len(part.ring_slices)] for _ in range(2)]
    rows += part.sequence_ids[len(part.ring_slices) :]
    begin, num_sharded = 0, len(part.ring_slices)
    places = [i for i in range(num_sharded) for _ in range(2)]
    places += range(num_sharded, len(part.sequence_ids))
    for row, place, size in zip(rows, places, runs, strict=True):
        document = file.documents[of_row(table.documents, row)][of_row(table.starts, row) :]
        first = part.positions[begin]
        for i in range(begin, begin + size):
            position = int(part.positions[i])
            assert position == first + i - begin
            if position >= of_row(table.lengths, row):
                assert (part.tokens[i], part.labels[i], part.loss_mask[i]) == (0, 0, False)
                assert part.sequence_index[i] == -1
                continue
            assert part.sequence_index[i] == place
            held[row, position] = held.get((row, position), 0) + 1
            assert part.tokens[i] == document[position]
            if part.loss_mask[i]:
                labelled[row, position] = labelled.get((row, position), 0) + 1
                assert part.labels[i] == document[position + 1]
        begin += size


def check_cover(plan_, step_sequences, table, file):
    held, labelled = put_back(plan_, step_sequences, table, file)
    expected_held = {(row, p) for row in step_sequences for p in range(of_row(table.lengths, row))}
    expected_labelled = {
        (row, p) for row in step_sequences for p in range(of_row(table.num_labels, row))
    }
    assert (set(held), set(labelled)) == (expected_held, expected_labelled)
    assert set(held.values()) | set(labelled.values()) <= {1}


@examples
@given(
    lengths=st.lists(st.integers(0, 90), min_size=1, max_size=12).filter(any),
    ranks=st.integers(1, 5),
    strategy=st.sampled_from(["static", "naive", "dp-balance", "auto"]),
    policy=st.sampled_from(["truncate", "split"]),
    max_length=st.integers(1, 60),
    slice_multiple=st.sampled_from([1, 4]),
)
def test_planned_slices_make_up_the_documents(
    lengths, ranks, strategy, policy, max_length, slice_multiple
):
    file = CountingFile(lengths)
    table = SequenceTable.build(np.array(lengths), max_length=max_length, long_sequence=policy)
    step_sequences = np.random.default_rng(1).permutation(len(table))
    capacity = 2 * slice_multiple * -(-max_length // (2 * ranks * slice_multiple)) + 8
    made = plan(
        table.lengths(step_sequences),
        ranks=ranks,
        tokens_per_rank=capacity,
        strategy=strategy,
        max_length=max_length,
        slice_multiple=slice_multiple,
    )
    check_cover(made, step_sequences, table, file)


def hand_made(lengths, micro_batch, slice_multiple=1):
    """A plan of one micro-batch, free of what a strategy would choose."""
    local = [(rank, i) for rank in sorted(micro_batch.local) for i in micro_batch.local[rank]]
    return Plan(
        num_ranks=7,
        tokens_per_rank=1,
        strategy="hand-made",
        lengths=lengths,
        rank_offsets=[0, len(micro_batch.ranks)],
        ranks=micro_batch.ranks,
        sequence_offsets=[0, len(micro_batch.sequences)],
        sequences=micro_batch.sequences,
        local_offsets=[0, len(local)],
        local_sequences=[i for _, i in local],
        local_ranks=[rank for rank, _ in local],
        offload_ratios=[micro_batch.offload_ratio],
        slice_multiple=slice_multiple,
    )


@st.composite
def rings_with_local_sequences(draw):
    lengths = draw(st.lists(st.integers(1, 70), min_size=3, max_size=9))
    ranks = draw(st.permutations(range(7)))[: draw(st.integers(1, 6))]
    homes = draw(st.lists(st.sampled_from([None, *ranks]), min_size=len(lengths) - 1))
    sharded, local = [0], {}
    for sequence, home in enumerate(homes[: len(lengths) - 1], start=1):
        if home is None:
            sharded.append(sequence)
        else:
            local[home] = (*local.get(home, ()), sequence)
    micro_batch = MicroBatch(
        ranks=tuple(ranks), sequences=tuple(sharded), local=local, offload_ratio=0.25
    )
    return lengths, micro_batch


@examples
@given(rings_with_local_sequences(), st.sampled_from([1, 4]), st.sampled_from(["split", "error"]))
def test_rings_with_local_sequences_make_up_the_documents(case, slice_multiple, policy):
    lengths, micro_batch = case
    file = CountingFile([sum(lengths)] if policy == "split" else lengths)
    if policy == "error":
        table = SequenceTable.build(np.array(lengths), max_length=70)
    else:  # all sequences are consecutive pieces of one document
        table = Pieces(lengths)
    made = hand_made(lengths, micro_batch, slice_multiple)
    check_cover(made, np.arange(len(lengths)), table, file)


def worked_example():
    """A ring of two ranks for the first of two documents; the second is whole on its member 1."""
    file = CountingFile([7, 3])
    table = SequenceTable.build(np.array([7, 3]), max_length=7)
    micro_batch = MicroBatch(ranks=(4, 2), sequences=(0,), local={2: (1,)}, offload_ratio=0.5)
    return file, (hand_made([7, 3], micro_batch), 0, 2, np.array([0, 1]), table)


def test_a_worked_example():
    file, where = worked_example()
    document, whole = file.documents
    part = read(*where, file)
    # degree 2: chunks of ceil(7 / 4) = 2 tokens; member 1 (rank 2) holds chunks 1 and 2
    assert part.positions.tolist() == [2, 3, 4, 5, 0, 1, 2]
    assert part.tokens.tolist() == [*document[2:6], *whole]
    assert part.labels.tolist() == [*document[3:7], *whole[1:], 0]
    assert part.loss_mask.tolist() == [True] * 6 + [False]
    assert part.sequence_index.tolist() == [0] * 4 + [1] * 3
    assert (part.ring, part.ring_slices, part.local_lengths) == ((4, 2), (4,), (3,))
    assert (part.index, part.sequence_ids, part.offload_ratio) == (0, (0, 1), 0.5)
    other = read(*where[:2], 4, *where[3:], file)
    assert other.positions.tolist() == [0, 1, 6, 7]
    assert other.tokens.tolist() == [*document[:2], document[6], 0]
    assert other.loss_mask.tolist() == [True, True, False, False]
    assert other.sequence_index.tolist() == [0, 0, 0, -1]


def test_further_tokens_are_those_of_the_file_behind_each_chunk():
    """The document's next chunk lies on the other rank; behind its end nothing has loss."""
    file, where = worked_example()
    document, whole = file.documents
    plain, part = read(*where, file), read(*where, file, num_further=3)
    labels, masks = part.further_labels.reshape(3, -1), part.further_mask.reshape(3, -1)
    assert labels[0].tolist() == [*document[4:7], 0, whole[2], 0, 0]
    assert labels[1].tolist() == [*document[5:7], 0, 0, 0, 0, 0]
    assert labels[2].tolist() == [document[6], 0, 0, 0, 0, 0, 0]
    assert np.array_equal(masks, labels > 0)
    for name in ("tokens", "labels", "loss_mask", "positions", "sequence_index"):
        assert np.array_equal(getattr(part, name), getattr(plain, name))
    part.drop([part.sequence_ids[0]])
    assert not part.further_mask.reshape(3, -1)[:, :4].any() and part.further_mask.any()


def test_a_rank_without_micro_batches_runs_padding():
    alone = MicroBatch(ranks=(0,), sequences=(0,), local={}, offload_ratio=0.5)
    table = SequenceTable.build(np.array([3]), max_length=3)
    step = step_of(np.array([0]), table)
    busy, idle = StepShares(step, hand_made([3], alone)).of([0, 1])
    assert (busy.indices.tolist(), idle.indices.tolist()) == ([0], [PADDING])
    assert idle.ring_of(0) == (1,) and not len(idle.ids) and busy.ids.tolist() == [0]
    part = read_micro_batch(idle, 0, Reader(1, 10**6), OneSource(table, CountingFile([3])))
    assert part.index is None and len(part.tokens) == 2 and part.offload_ratio == 0


def test_padding_is_two_tokens_without_loss():
    part = padding_micro_batch(3)
    assert (part.ring, part.ring_slices, part.local_lengths) == ((3,), (), (2,))
    assert part.tokens.shape == part.labels.shape == part.positions.shape == (2,)
    assert part.index is None and part.corrupt_ids == ()
    assert part.sequence_index.tolist() == [-1, -1]
    assert not part.loss_mask.any()
    assert padding_micro_batch(3, 4).local_lengths == (4,)


def test_tokens_are_padded_to_a_multiple():
    file, where = worked_example()
    plain, padded = read(*where, file), read(*where, file, token_multiple=4)
    assert len(plain.tokens) == 7 and len(padded.tokens) == 8
    assert padded.local_lengths == (3, 1) and padded.sequence_ids == plain.sequence_ids
    assert padded.positions.tolist() == [*plain.positions, 0]
    assert not padded.loss_mask[7:].any() and not padded.tokens[7:].any()
    assert padded.sequence_index.tolist() == [*plain.sequence_index, -1]
    shared = read(*where, file, token_multiple=7)
    assert shared.local_lengths == (3, 7), "two tokens for each of those that share them"


def test_without_a_file_only_tokens_and_labels_are_missing():
    file, where = worked_example()
    full, empty = read(*where, file), read(*where, None)
    assert not empty.tokens.any() and not empty.labels.any()
    assert (full.positions == empty.positions).all() and (full.loss_mask == empty.loss_mask).all()
    assert (full.sequence_index == empty.sequence_index).all()
    assert empty.corrupt_ids == ()


@pytest.mark.parametrize("value", [10**6, -1])
@pytest.mark.parametrize("position, found", [(0, ()), (1, ()), (2, (0,)), (6, (0,))])
def test_tokens_outside_the_vocabulary_are_found_where_they_are_read(value, position, found):
    file, where = worked_example()
    file.documents[0][position] = value  # rank 2 reads tokens 2 to 5 and the label after them
    assert read(*where, file).corrupt_ids == found


def test_dropped_sequences_carry_nothing():
    file, where = worked_example()
    part, whole = read(*where, file, token_multiple=4), read(*where, file, token_multiple=4)
    part.drop({1, 7})
    assert (part.tokens[:4] == whole.tokens[:4]).all() and whole.loss_mask[4:6].all()
    assert not part.tokens[4:].any() and not part.labels[4:].any() and not part.loss_mask[4:].any()
    assert (part.positions == whole.positions).all()
    assert part.sequence_index.tolist() == [0] * 4 + [-1] * 4
    part.drop({0})
    assert not part.tokens.any() and not part.loss_mask.any()


def tokens_by_place(plan_, lengths, multiple, most=200):
    """What all ranks hold: by sequence and position its token, label and whether it has loss.

    A part holds at most `most` tokens.
    """
    file = CountingFile(lengths)
    table, rows = SequenceTable.build(np.array(lengths), max_length=200), np.arange(len(lengths))
    found = {}
    for m in range(plan_.num_micro_batches):
        for rank in plan_.micro_batch(m).ranks:
            whole = read(plan_, m, rank, rows, table, file, token_multiple=multiple, num_further=2)
            parts = whole.in_parts()
            check_parts(whole, parts, int(plan_.parts_of_each[m]), multiple, most)
            for part in parts:
                held = part.sequence_index, part.positions, part.tokens, part.labels
                further = (*part.further_labels.reshape(2, -1), *part.further_mask.reshape(2, -1))
                for place, *what in zip(*held, part.loss_mask, *further, strict=True):
                    if place >= 0:
                        key = part.sequence_ids[place], int(what[0])
                        assert key not in found
                        found[key] = tuple(map(int, what[1:]))
    return found


def check_parts(whole, parts, num_parts, multiple, most):
    assert len(parts) == num_parts and len(whole.parts) == (num_parts if num_parts > 1 else 0)
    assert whole.ring_slices == tuple(size for part in parts for size in part.ring_slices)
    assert whole.local_lengths == tuple(size for part in parts for size in part.local_lengths)
    for part, told in zip(parts, whole.parts, strict=num_parts > 1):
        num_tokens = sum(part.ring_slices) + sum(part.local_lengths)
        assert len(part.tokens) == num_tokens >= 2 * multiple and num_tokens % multiple == 0
        assert not told.padding or part.local_lengths[-1] == told.padding
        assert num_tokens - told.padding <= most


@examples
@given(
    lengths=st.lists(st.integers(1, 150), min_size=1, max_size=10),
    ranks=st.integers(1, 4),
    multiple=st.sampled_from([1, 2]),
    seed=st.integers(0, 99),
)
def test_parts_hold_what_the_whole_holds(lengths, ranks, multiple, seed):
    asked = {"ranks": ranks, "tokens_per_rank": 160, "seed": seed}
    made, parts = (random_plan(np.array(lengths), **asked, most_parts=most) for most in (1, 6))
    whole = tokens_by_place(made, lengths, multiple)
    assert len(whole) == sum(lengths)
    assert tokens_by_place(parts, lengths, multiple) == whole
    streams = in_streams(made, tokens_per_rank=30, seed=seed)
    assert tokens_by_place(streams, lengths, multiple, most=30) == whole


def test_a_sequence_is_taken_out_of_all_parts():
    made = hand_made([90, 40], MicroBatch((0,), (), {0: (0, 1)}, 0.0))
    file, rows = CountingFile([90, 40]), np.arange(2)
    table = SequenceTable.build(np.array([90, 40]), max_length=200)
    part = read(replace(made, num_parts=[4]), 0, 0, rows, table, file)
    assert len(part.parts) == 4 and part.local_lengths != (90, 40)
    part.drop({0})
    assert (part.sequence_index == -1).sum() == 90 and part.loss_mask.sum() == 39
