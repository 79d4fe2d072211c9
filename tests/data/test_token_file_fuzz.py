"""Damaged ``.idx`` files: they open as they are or are refused by name; reading never crashes."""

import random
from unittest import mock

import numpy as np

from megatron_hdp.data import TokenFile, TokenFileError
from tests.data.test_token_file import write_pair
from tests.support.index_reference import documents_of

DTYPES = (np.uint8, np.uint16, np.int32, np.int64)


def damaged(raw, draw):
    """The bytes with some flipped, overwritten, cut off, doubled or put in front."""
    raw = bytearray(raw)
    for _ in range(draw.choice([1, 1, 2, 8])):
        place = draw.randrange(len(raw) + 1)
        kind = draw.randrange(5)
        if kind == 0 and place < len(raw):
            raw[place] ^= 1 << draw.randrange(8)
        elif kind == 1:
            edge = draw.choice([0, 1, 2**31 - 1, 2**31, 2**62, 2**63 - 1, 2**63, 2**64 - 1])
            raw[place : place + 8] = edge.to_bytes(8, "little")[: len(raw) - place]
        elif kind == 2:
            del raw[place:]
        elif kind == 3:
            del raw[place : place + draw.randrange(9)]
        else:
            raw[place:place] = draw.randbytes(draw.randrange(9))
        if not raw:
            break
    return bytes(raw)


def check(folder, seed):
    """One damaged pair, read in pieces of a few; returns whether it opened."""
    draw = random.Random(seed)
    few = draw.choice([1, 2, 3, 100])
    with (
        mock.patch("megatron_hdp.data.index_file._PIECE", few),
        mock.patch("megatron_hdp.data.index_checks._PIECE", few),
    ):
        return check_in_pieces(folder, seed, draw)


def check_in_pieces(folder, seed, draw):
    """The same, in pieces of one size."""
    documents = [[draw.randrange(200)] * draw.randrange(9) for _ in range(draw.randrange(1, 9))]
    length = draw.choice([None, 1, 3])
    prefix = write_pair(folder / "data", documents, draw.choice(DTYPES), length)
    path = folder / "data.idx"
    path.write_bytes(damaged(path.read_bytes(), draw))
    size = (folder / "data.bin").stat().st_size
    expected = documents_of(path.read_bytes(), size)
    try:
        file = TokenFile(prefix)
    except TokenFileError as error:
        assert prefix in str(error), (seed, error)
        assert expected is None, (seed, error)
        return False
    file.reader.fingerprint()
    assert expected is not None, seed
    found = zip(file.begins.tolist(), file.lengths.tolist(), strict=True)
    assert [one for one in found if one[1]] == [one for one in expected if one[1]], seed
    num_bytes = 0
    for document, tokens in enumerate(file.lengths.tolist()):
        assert len(file.read(document, 0, tokens)) == tokens, seed
        num_bytes += tokens * file.reader.dtype.itemsize
    assert num_bytes <= size, seed
    return True


def test_damaged_pairs(tmp_path, seeds):
    opened = [check(tmp_path, seed) for seed in seeds]
    assert 0 < sum(opened) < len(opened)  # else it damages nothing, or everything
