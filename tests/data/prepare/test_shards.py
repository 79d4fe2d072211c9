"""Work is cut by the data alone, in order, and nothing is left out."""

import pytest

from megatron_hdp.data.prepare.shards import Counts, cut, shard_bytes_for
from tests.data.prepare.corpora import texts_of, write_lines


@pytest.mark.parametrize("shard_bytes", [1, 700, 5_000, 2**30])
def test_shards_cover_the_files_in_order(tmp_path, shard_bytes):
    files = [str(write_lines(tmp_path / f"{i}.jsonl", texts_of(20, i))) for i in range(3)]
    files += [str(tmp_path / "a.txt"), str(tmp_path / "b.txt")]
    for path in files[3:]:
        with open(path, "w") as stream:
            stream.write("text" * 100)
    shards = cut(files, "text", lines=False, shard_bytes=shard_bytes)
    assert [shard.index for shard in shards] == list(range(len(shards)))
    pieces = [piece for shard in shards for piece in shard.pieces]
    assert [path for path in files if any(piece.path == path for piece in pieces)] == files
    for path in files:
        mine = [piece for piece in pieces if piece.path == path]
        assert mine[0].begin == 0
        assert [one.end for one in mine[:-1]] == [one.begin for one in mine[1:]]
    assert all(len(shard.pieces) == 1 or shard.num_bytes <= shard_bytes for shard in shards)
    assert len({shard.fingerprint for shard in shards}) == len(shards)
    if shard_bytes == 2**30:
        assert len(shards) == 1


def test_a_fingerprint_does_not_say_where_files_lie(tmp_path):
    shards = []
    for folder in ("here", "there"):
        path = write_lines(tmp_path / folder / "x.jsonl", texts_of(20))
        shards.append(cut([str(path)], "text", lines=False, shard_bytes=500))
    here, there = ([shard.fingerprint for shard in some] for some in shards)
    assert here == there
    path = str(tmp_path / "here" / "x.jsonl")
    assert here[0] != cut([path], "text", lines=False, shard_bytes=600)[0].fingerprint


def test_little_is_cut_small_and_much_is_not():
    sizes = [shard_bytes_for(total) for total in (0, 2**20, 2**27, 2**40)]
    assert sizes == [2**20, 2**20, 2**21, 2**26]


def test_counts_add_up_and_name_the_first():
    counts = Counts(1, 10, 0, 2, ["a", "b"])
    counts.add(Counts(2, 20, 1, 3, ["c", "d"]))
    for name in "ef":
        counts.add_bad(name, may_be_bad=True)
    assert counts == Counts(3, 30, 1, 7, ["a", "b", "c", "d", "e"])
    with pytest.raises(ValueError, match="g"):
        counts.add_bad("g", may_be_bad=False)
