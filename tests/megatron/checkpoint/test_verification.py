"""A checkpoint that is not what was saved is found, by file, with checksums and without."""

import pytest

from megatron_hdp.megatron.checkpoint import checksums
from megatron_hdp.megatron.checkpoint.checksums import SUMS, FileSum
from megatron_hdp.megatron.checkpoint.verification import share_of, verify
from tests.megatron.checkpoint.small import flip, save_small

FILES = ("__0_0.distcp", ".metadata", "common.pt", "metadata.json")
DAMAGE = {
    "missing": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-7]),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"more"),
    "garbage": lambda path: path.write_bytes(b"\x80\x05garbage" * 40),
    "flipped": lambda path: flip(path, path.stat().st_size // 2),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}
# Without checksums nothing tells these, and what reads the files does not look at their end.
UNSEEN = {(".metadata", "longer"), ("common.pt", "longer")}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("with_checksums", [True, False], ids=["checksums", "none"])
def test_damage_is_found_and_named(tmp_path, name, damage, with_checksums):
    place = save_small(tmp_path, 4, with_checksums=with_checksums)
    assert verify(place, 4).is_good
    DAMAGE[damage](place / name)
    found = verify(place, 4)
    if not with_checksums and (name, damage) in UNSEEN:
        assert found.is_good
        return
    assert any(name in fault for fault in found.faults), found
    assert all("found" in fault and "expected" in fault for fault in found.faults), found


@pytest.mark.parametrize("damage", sorted(set(DAMAGE) - {"flipped"}))
@pytest.mark.parametrize("name", [one for one in FILES if one != "common.pt"])
def test_what_ranks_hold_alike_may_lie_among_the_tensors(tmp_path, name, damage):
    place = save_small(tmp_path, 4, with_checksums=False, common_file=False)
    assert not (place / "common.pt").exists() and verify(place, 4).is_good
    DAMAGE[damage](place / name)
    found = verify(place, 4)
    assert found.is_good == ((name, damage) in UNSEEN)
    assert all(name in fault or "common.pt" in fault for fault in found.faults)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"algorithm": "md5", "files": {}}', "\x00"])
def test_a_damaged_list_of_checksums_is_named(tmp_path, text):
    place = save_small(tmp_path, 4)
    (place / SUMS).write_text(text)
    found = verify(place, 4)
    assert SUMS in found.faults[0] and "expected JSON" in found.faults[0]


def test_an_added_file_harms_nothing_and_is_named(tmp_path):
    for with_checksums in (True, False):
        place = save_small(tmp_path, 4, with_checksums=with_checksums)
        (place / "notes.txt").write_text("mine")
        found = verify(place, 4)
        assert found.is_good and found.added_files == ("notes.txt",)


def test_every_byte_of_a_summed_file_counts(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(5000))
    before = FileSum.of_file(path)
    for position in range(0, 5000, 499):
        flip(path, position)
        assert FileSum.of_file(path) != before
        flip(path, position)
    assert FileSum.of_file(path) == before


def test_a_file_that_its_writer_did_not_sum_is_not_published(tmp_path, capfd):
    (tmp_path / "__0_0.distcp").write_text("rank 0")
    (tmp_path / "__1_0.distcp").write_text("rank 1")
    checksums.write_and_sum(lambda: None, tmp_path, 0)
    parts = [checksums.take_part(tmp_path, rank) for rank in (0, 1)]
    assert [list(part) for part in parts] == [["__0_0.distcp"], []]
    with pytest.raises(ValueError, match="__1_0.distcp: found no checksum"):
        checksums.merge(tmp_path, parts)


def test_ten_ranks_are_not_summed_by_rank_one(tmp_path):
    (tmp_path / "__10_0.distcp").write_text("rank 10")
    checksums.write_and_sum(lambda: None, tmp_path, 1)
    assert checksums.take_part(tmp_path, 1) == {}


def test_each_file_is_one_ranks_and_ranks_have_alike_much():
    sizes = {f"file-{i}": 1000 - i for i in range(21)}
    parts = [share_of(sizes, rank, 4) for rank in range(4)]
    assert sorted(name for part in parts for name in part) == sorted(sizes)
    bytes_by_rank = [sum(sizes[name] for name in part) for part in parts]
    assert max(bytes_by_rank) - min(bytes_by_rank) <= max(sizes.values())
