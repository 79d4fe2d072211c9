"""Records become the tokens that preparing makes of them; a window of them is kept."""

import json
import threading
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from megatron_hdp.data.on_the_fly import Decoder, RecordIndex, SourceFiles
from megatron_hdp.data.prepare import decoding_of
from megatron_hdp.data.spec import SourceSpec
from tests.data.prepare.corpora import EOD, as_bytes, texts_of, write_lines


def decoder_of(path, folder, *, max_length=10_000, window_bytes=2**20, policy="truncate", **keys):
    spec = SourceSpec(name="web", path=str(path), **keys)
    files = SourceFiles.of(spec)
    index = RecordIndex.open("web", files, Path(folder), lambda _: None)
    decoding = decoding_of(spec, files.kind, "byte")
    return Decoder(
        spec,
        index,
        decoding,
        max_length=max_length,
        long_sequence=policy,
        window_bytes=window_bytes,
    )


def tokens_of(decoder, rows):
    return [one.tokens.tolist() for one in decoder.rows(np.asarray(rows))]


@pytest.fixture
def texts():
    return texts_of(40, seed=3)


@pytest.fixture
def path(tmp_path, texts):
    return write_lines(tmp_path / "x.jsonl", texts)


def test_rows_in_the_order_in_which_they_are_asked_for(path, tmp_path, texts):
    decoder = decoder_of(path, tmp_path / "cache")
    rows = np.array([30, 2, 2, 17, 0])
    expected = as_bytes(texts)
    assert tokens_of(decoder, rows) == [expected[row] for row in rows]
    for one in decoder.rows(rows):
        assert one.is_trained is None and one.num_trained == len(one.tokens) - 1
    cut = decoder_of(path, tmp_path / "cache", max_length=9, append_eod=False)
    assert tokens_of(cut, rows) == [expected[row][:-1][:9] for row in rows]
    assert decoder.rows(rows[:0]) == []


def test_conversations_have_a_mask(tmp_path):
    pytest.importorskip("jinja2", reason="pip install 'megatron-hdp[data]'")
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    rows = [{"messages": turns}, {"messages": turns[:1]}, {"messages": turns[:1] + turns}]
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = {"format": "chat", "template": "chatml", "bad_limit": 1.0}
    decoder = decoder_of(path, tmp_path / "cache", **keys)
    first, bad, last = decoder.rows(np.arange(3))
    assert len(bad.tokens) == 0 and decoder.num_bad == 1
    for one in (first, last):
        assert len(one.is_trained) == len(one.tokens) and one.num_trained == one.is_trained.sum()
        assert bytes(one.tokens[one.is_trained].tolist()).decode() == "hello<|im_end|>"
    with pytest.raises(ValueError, match=r"x\.jsonl, line 2: no assistant turn to train on"):
        decoder_of(path, tmp_path / "cache", **{**keys, "bad_limit": 0.0}).rows(np.arange(3))


def test_a_row_of_several_conversations_is_refused(tmp_path):
    turns = [{"role": role, "content": "x"} for role in ("system", "user", "assistant") * 2]
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"messages": turns}) + "\n")
    decoder = decoder_of(path, tmp_path / "cache", format="chat", template="megatron:identity")
    with pytest.raises(ValueError, match="line 1: found a row of 2 conversations, expected one"):
        decoder.rows(np.arange(1))


def test_what_fits_in_the_window_is_read_once(path, tmp_path):
    decoder = decoder_of(path, tmp_path / "cache")
    with mock.patch.object(
        RecordIndex, "read", autospec=True, side_effect=RecordIndex.read
    ) as read:
        assert tokens_of(decoder, range(20)) == tokens_of(decoder, range(20))
        decoder.rows(np.arange(15, 25))
    assert [call.args[1].tolist() for call in read.call_args_list] == [
        list(range(20)),
        list(range(20, 25)),
    ]


def test_the_window_is_bounded_and_the_least_used_leave(path, tmp_path, texts):
    decoder = decoder_of(path, tmp_path / "cache", window_bytes=12_000)
    expected = as_bytes(texts)
    for begin in range(0, 40, 5):
        decoder.rows(np.array([0]))  # used again and again
        rows = np.arange(begin, begin + 5)
        assert tokens_of(decoder, rows) == [expected[row] for row in rows]
        assert decoder._kept_bytes <= 12_000
        assert decoder._kept_bytes == sum(one.num_bytes for one in decoder._kept.values())
    assert 0 in decoder._kept and 1 not in decoder._kept and 39 in decoder._kept
    small = decoder_of(path, tmp_path / "cache", window_bytes=1)
    assert tokens_of(small, range(40)) == expected


def test_threads_may_ask_at_a_time(path, tmp_path, texts):
    decoder, expected = decoder_of(path, tmp_path / "cache", window_bytes=9000), as_bytes(texts)
    wrong = []

    def ask(seed):
        draw = np.random.default_rng(seed)
        for _ in range(40):
            rows = draw.integers(0, 40, 6)
            if tokens_of(decoder, rows) != [expected[row] for row in rows]:
                wrong.append(rows)

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and decoder._kept_bytes <= 9000


def test_one_bad_record_is_an_error_unless_some_may_be(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "a"}\n[]\n{"text": ""}\n')
    with pytest.raises(ValueError, match=r"x\.jsonl, line 2: expected a JSON object with a string"):
        decoder_of(path, tmp_path / "cache").rows(np.arange(3))
    decoder = decoder_of(path, tmp_path / "cache", bad_limit=0.01)
    assert tokens_of(decoder, range(3)) == [[97, EOD], [], []]
    assert decoder.num_bad == 1
    assert [len(one.tokens) for one in decoder.sample(np.arange(3))] == [2, 0, 0]
    assert decoder.num_bad == 1


def test_too_many_bad_records_are_an_error(tmp_path):
    """Of 1,000 records and more, 2% of which are bad."""
    path = tmp_path / "x.jsonl"
    path.write_text("".join('{"text": "a"}\n' if i % 50 else "x\n" for i in range(1500)))
    for limit, is_error in ((0.03, False), (0.01, True)):
        decoder = decoder_of(path, tmp_path / "cache", bad_limit=limit)
        decoder.rows(np.arange(999))
        assert decoder.num_bad == 20
        if not is_error:
            decoder.rows(np.arange(1500))
            continue
        with pytest.raises(ValueError, match=r"20 of 1,000 .* at most 1\.000%.*line 1: expected"):
            decoder.rows(np.arange(1000))


def test_too_long(path, tmp_path, texts):
    decoder = decoder_of(path, tmp_path / "cache", max_length=300, policy="error")
    row = next(i for i, text in enumerate(texts) if len(text.encode()) + 1 > 300)
    with pytest.raises(ValueError, match=rf"line {row + 1} has \d+ tokens, the context length"):
        decoder.rows(np.arange(40))
    assert len(decoder.sample(np.array([row]))[0].tokens) == 300
