"""The global batch that the flags describe: presets, limits and cuts, and what is said of them."""

import numpy as np
import pytest

from megatron_hdp.cli.lengths import batch_of, read_lengths


def file_of(tmp_path, *lengths):
    path = tmp_path / "lengths.txt"
    path.write_text("\n".join(map(str, lengths)))
    return str(path)


def batch(source, **options):
    return batch_of(source, **{"ranks": 4, "tokens_per_rank": 100} | options)


def test_a_preset_has_four_capacities_cut_to_all_ranks():
    drawn = batch("preset:github", tokens_per_rank=1000)
    assert drawn.lengths.sum() == 16_000
    assert drawn.lengths.max() <= 4000
    assert drawn.max_length == 4000
    assert drawn.notes == ("preset github, seed 0: 16,000 tokens, cut to 4,000 a sequence",)


def test_a_presets_context_is_at_most_2m():
    drawn = batch("preset:byted", ranks=1024, tokens_per_rank=8192, seed=1)
    assert drawn.lengths.max() == 2 * 2**20


def test_a_preset_follows_its_flags():
    options = {"num_tokens": 5000, "max_length": 300}
    one, other = (batch("preset:byted", **options, seed=seed) for seed in (1, 2))
    assert one.lengths.sum() == other.lengths.sum() == 5000
    assert one.lengths.max() == 300
    assert one.lengths.tolist() != other.lengths.tolist()
    assert one.lengths.tolist() == batch("preset:byted", **options, seed=1).lengths.tolist()


@pytest.mark.parametrize(
    ("raw", "lengths"),
    [
        (b"\xef\xbb\xbf5\n7\n", [5, 7]),
        (b"5\r\n7\r\n\r\n3", [5, 7, 3]),
        (b"5\r7", [5, 7]),
        (b" 5 \n\t7\n\n", [5, 7]),
        (b"007\n", [7]),
        (f"{2**63 - 1}\n1\n".encode(), [2**63 - 1, 1]),
        (b"\n" * 3_000_000 + b"4\n", [4]),
    ],
)
def test_lines_of_any_kind(tmp_path, raw, lengths):
    path = tmp_path / "lengths.txt"
    path.write_bytes(raw)
    assert read_lengths(str(path)).tolist() == lengths


def test_pieces_of_a_file_join(tmp_path):
    lengths = np.random.default_rng(0).integers(1, 10**9, 500_000)
    path = tmp_path / "lengths.txt"
    path.write_bytes(b"\r\n".join(b"%d" % one for one in lengths.tolist()))
    assert np.array_equal(read_lengths(str(path)), lengths)


def test_a_file_without_flags_is_taken_whole(tmp_path):
    taken = batch(file_of(tmp_path, 5, 700, 3))
    assert (taken.lengths.tolist(), taken.notes) == ([5, 700, 3], ())
    assert taken.max_length is None


@pytest.mark.parametrize(
    ("num_tokens", "taken", "note"),
    [
        (14, [5, 7], "the first 2 of 3 sequences taken: the next one would exceed 14 tokens"),
        (15, [5, 7, 3], "all 3 sequences taken: they have 15 of 15 tokens"),
        (99, [5, 7, 3], "all 3 sequences taken: they have 15 of 99 tokens"),
    ],
)
def test_a_limit_takes_whole_sequences_in_order(tmp_path, num_tokens, taken, note):
    found = batch(file_of(tmp_path, 5, 7, 3), num_tokens=num_tokens)
    assert (found.lengths.tolist(), found.notes) == (taken, (note,))


def test_cut_first_then_limited(tmp_path):
    found = batch(file_of(tmp_path, 9, 9, 9), max_length=4, num_tokens=9)
    assert (found.lengths.tolist(), found.max_length) == ([4, 4], 4)
    assert found.notes[0] == "3 of 3 sequences cut to 4 tokens"
    assert batch(file_of(tmp_path, 3, 4), max_length=4).notes == ()


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("", {"num_tokens": 4}, r"--global-batch-tokens 4: the first sequence of .* has 5 tokens;"),
        (
            "",
            {"seed": 0},
            r"--seed 0 has no effect on .*lengths.txt: it draws presets; leave it out",
        ),
        ("preset:gitlab", {}, r"preset:gitlab: expected preset:github or preset:byted"),
        (
            "preset:github",
            {"num_tokens": 2**60},
            r"about [\d,]+ sequences; expected at most 134,217",
        ),
    ],
)
def test_what_cannot_be_done(tmp_path, source, options, message):
    with pytest.raises(ValueError, match=message):
        batch(source or file_of(tmp_path, 5, 7), **options)
