"""Sounds: their length by the header, what an encoder hears of them, rows that hold them."""

import base64
import io
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_hdp.data.chat import BadConversationError, MediaConversations
from megatron_hdp.data.media import (
    INLINE_SUFFIX,
    Items,
    ItemSize,
    MediaError,
    MediaFiles,
    settings_of,
    stored_item,
)
from megatron_hdp.data.media.sounds import samples_of, size_of_sound
from megatron_hdp.data.media.spectrograms import spectrogram_of
from megatron_hdp.data.spec import MediaSpec
from megatron_hdp.data.tokenizers import build_tokenizer
from megatron_hdp.media import ENCODERS
from tests.data.chat import tiny_tokenizer
from tests.data.media import sounds, sources
from tests.data.prepare.corpora import run

pytest.importorskip("jinja2", reason="pip install 'megatron-hdp[data]'")
transformers = pytest.importorskip("transformers", reason="pip install 'megatron-hdp[tokenizers]'")

QWEN = MediaSpec(encoder="qwen2-audio")
WINDOWS = ENCODERS["qwen2-audio"].resizing
HEARD = "<|audio_bos|><|AUDIO|><|audio_eos|>"
WINDOW = 480_000


def extracted(samples: Any, *, by_torch: bool) -> Any:
    """What transformers' extractor makes of a window, and the frames of sound in it."""
    extractor = transformers.WhisperFeatureExtractor(feature_size=128)
    whole = np.zeros((1, WINDOW), dtype=np.float32)
    whole[0, : len(samples)] = samples[:WINDOW]
    made = extractor._torch_extract_fbank_features if by_torch else None
    (found,) = (made or extractor._np_extract_fbank_features)(whole, "cpu")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("count", [481, 16_000])
def test_an_encoder_hears_what_transformers_hears(count: int) -> None:
    """Bit for bit without torch, to the last digits of float32 with it."""
    samples = sounds.waves(count, 3)
    seen = WINDOWS.seen(-(-count // 160))
    found = spectrogram_of(samples, seen, 3000)
    assert np.array_equal(found, extracted(samples, by_torch=False)[:, :seen])
    np.testing.assert_allclose(found, extracted(samples, by_torch=True)[:, :seen], atol=5e-5)


def test_what_is_not_needed_is_not_computed() -> None:
    """The first frames of a window are the same however many are asked for; silence is its own."""
    samples = sounds.waves(1600, 3)
    whole = spectrogram_of(samples, 100, 3000)
    assert whole.shape == (128, 100) and whole.dtype == np.float32
    for count in (1, 9, 11):
        assert np.array_equal(spectrogram_of(samples, count, 3000), whole[:, :count])
    assert (spectrogram_of(samples * 0, 20, 3000) == -1.5).all()
    assert whole[:, 20:].max() == whole.min() == whole.max() - np.float32(2)


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 200, 321, 479_801, 479_999, 480_000, 500_000])
@pytest.mark.parametrize("loudness", [0.0, 1e-3, 1.0])
def test_an_encoder_hears_the_same_of_any_length(count: int, loudness: float) -> None:
    samples = sounds.waves(count, 1) * np.float32(loudness)
    expected = extracted(samples, by_torch=False)
    for seen in (min(-(-count // 160) + 1, 3000), 3000):
        assert np.array_equal(spectrogram_of(samples, seen, 3000), expected[:, :seen])


@pytest.mark.slow
def test_rows_are_those_of_the_processor() -> None:
    """Of 10,000 lengths, by the arithmetic of its three lines; the extractor counts frames."""
    extractor = transformers.WhisperFeatureExtractor(feature_size=8)
    counts = np.random.default_rng(0).integers(321, 700_000, 10_000)
    frames = np.minimum(-(-counts // 160), 3000)
    for count in (321, 479_841, 480_001):
        made = extractor(np.zeros(count, np.float32), sampling_rate=16_000)
        mask = extractor(
            np.zeros(count, np.float32), sampling_rate=16_000, return_attention_mask=True
        )["attention_mask"]
        assert mask.sum() == min(-(-count // 160), 3000) and len(made["input_features"]) == 1
    expected = [(((n - 1) // 2 + 1) - 2) // 2 + 1 for n in frames.tolist()]
    found = settings_of(QWEN).rows(np.ones_like(frames), frames)
    assert found.tolist() == expected


@pytest.mark.slow
@pytest.mark.parametrize("count", [480, 16_000, 31_999, 480_000, 600_000])
def test_the_processor_expands_a_placeholder_to_as_many(tmp_path: Path, count: int) -> None:
    """The whole processor, on a file that its own loader does not read."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        sources.tokenizer(tmp_path, sources.OF_SOUNDS).partition(":")[2]
    )
    extractor = transformers.WhisperFeatureExtractor(feature_size=128)
    processor = transformers.Qwen2AudioProcessor(extractor, tokenizer, chat_template="")
    samples = sounds.waves(count)
    made = processor(text=HEARD, audio=[samples], sampling_rate=16_000, return_tensors="np")
    placeholder = tokenizer.convert_tokens_to_ids("<|AUDIO|>")
    raw = sounds.with_head(3, 32, samples.tobytes())
    settings = settings_of(MediaSpec(encoder="qwen2-audio", most_seconds=60))
    (size,) = settings.sizes_of(io.BytesIO(raw), "x")
    height, width = size.height, size.width
    (rows,) = settings.rows(np.array([height]), np.array([width]))
    assert (made["input_ids"] == placeholder).sum() == rows
    seen = WINDOWS.seen(width)
    found = spectrogram_of(samples_of(raw, "x", WINDOW), seen, 3000)
    np.testing.assert_allclose(found, made["input_features"][0][:, :seen], atol=5e-5)


FORMS = {
    "8 bits": (1, 8, lambda x: (x * 127 + 128).astype("u1"), 0.012),
    "24 bits": (1, 24, lambda x: (x * 8_388_607).astype("<i4"), 3e-7),
    "32 bits": (1, 32, lambda x: (x.astype(float) * 2_147_483_000).astype("<i4"), 1e-6),
    "float": (3, 32, lambda x: x.astype("<f4"), 0),
    "double": (3, 64, lambda x: x.astype("<f8"), 0),
}


@pytest.mark.parametrize("form", FORMS)
def test_samples_of_all_forms(form: str) -> None:
    kind, bits, made, error = FORMS[form]
    left, right = sounds.waves(1000, 1), sounds.waves(1000, 2)
    numbers = made(np.stack([left, right], axis=1))
    raw = numbers.tobytes()
    if bits == 24:
        raw = np.frombuffer(raw, "u1").reshape(-1, 4)[:, :3].tobytes()
    whole = sounds.with_head(kind, bits, raw, channels=2)
    found = samples_of(whole, "x", 900)
    np.testing.assert_allclose(found, ((left + right) / 2)[:900], atol=error)
    size = size_of_sound(io.BytesIO(whole), "x")
    assert (size.num_samples, size.rate, size.num_heard) == (1000, 16_000, 1000)
    assert found.dtype == np.float32


def flac_head(rate: int, num_samples: int) -> bytes:
    packed = rate << 44 | 0 << 41 | 15 << 36 | num_samples
    return b"fLaC\0\0\0\x22" + bytes(10) + packed.to_bytes(8, "big") + bytes(16)


def test_the_length_of_a_flac_needs_no_library() -> None:
    size = size_of_sound(io.BytesIO(flac_head(44_100, 100_000)), "x")
    assert (size.num_samples, size.rate, size.num_heard) == (100_000, 44_100, 36_282)


@pytest.mark.parametrize("kind", ["FLAC", "OGG", "MP3", "WAV"])
def test_other_files_and_rates(kind: str) -> None:
    """As librosa reads them: by soundfile, resampled by soxr, as long as the rate says."""
    library = pytest.importorskip("soundfile", reason="pip install 'megatron-hdp[sound]'")
    resampler = pytest.importorskip("soxr", reason="pip install 'megatron-hdp[sound]'")
    stream, samples = io.BytesIO(), sounds.waves(44_100, 1)
    library.write(stream, samples, 44_100, format=kind)
    size = size_of_sound(stream, "x")
    found = samples_of(stream.getvalue(), "x", WINDOW)
    assert len(found) == size.num_heard
    stream.seek(0)
    read, _ = library.read(stream, dtype="float32")
    assert np.array_equal(found, resampler.resample(read, 44_100, 16_000, quality="HQ"))
    broken = stream.getvalue()[:200]
    with pytest.raises(MediaError, match=r"found (no whole sound|a WAV of)"):
        samples_of(broken if kind != "OGG" else b"OggS" + bytes(100), "x", WINDOW)


def truncated(raw: bytes) -> bytes:
    return raw[:-7]


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (truncated(sounds.sound(0)), "3,193 of 3,200 bytes, expected a whole one"),
        (sounds.with_head(1, 16, b""), "0 of 0 bytes, expected a whole one"),
        (sounds.with_head(1, 16, bytes(100), channels=0), "0 channels"),
        (sounds.sound(0)[:30], "a WAV without samples"),
        (sounds.with_head(1, 16, bytes(4000), rate=7), "2,000 samples, 7 a second, expected some"),
        (sounds.as_wav(sounds.waves(16_000 * 31)), r"a sound of 31.0 s, expected at most 30"),
        (sounds.as_wav(sounds.waves(320)), "a sound of 1 x 2 frames of 10 ms, expected 1 x 3"),
    ],
)
def test_bad_headers_are_told(raw: bytes, words: str) -> None:
    settings = settings_of(QWEN)
    with pytest.raises(ValueError, match=words):
        (size,) = settings.sizes_of(io.BytesIO(raw), "x")
        settings.rows(np.array([size.height]), np.array([size.width]))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_broken_bytes_have_one_length_or_a_sentence(seed: int) -> None:
    """Of 2,000 damaged files what is planned by the header is what is heard, or a bad sound."""
    pytest.importorskip("soxr", reason="pip install 'megatron-hdp[sound]'")
    drawn, heard = np.random.default_rng(seed), 0
    settings = settings_of(QWEN)
    for number in range(500):
        raw = bytearray(sounds.sound(number))
        for at in drawn.integers(0, 48, drawn.integers(1, 4)).tolist():
            raw[at] = int(drawn.integers(0, 256))
        try:
            frames = settings.sizes_of(io.BytesIO(bytes(raw)), "x")[0].width
            samples = samples_of(bytes(raw), "x", WINDOW)
        except MediaError:
            continue
        assert -(-len(samples) // 160) == frames
        heard += 1
    assert 50 < heard < 450


def test_a_pipe_does_not_tell_how_long_a_sound_is() -> None:
    raw = bytearray(sounds.sound(0))
    raw[40:44] = struct.pack("<I", 2**32 - 1)
    assert size_of_sound(io.BytesIO(bytes(raw)), "x").num_samples == sounds.COUNTS[0]


def conversations(folder: Path, media: MediaSpec = QWEN) -> MediaConversations:
    tokenizer = build_tokenizer(sources.tokenizer(folder, sources.OF_SOUNDS))
    return MediaConversations(tokenizer, media, str(folder), "chatml")


def test_sounds_are_written_as_qwen_writes_them(tmp_path: Path) -> None:
    """Parts are numbered as its template does it; marks and lists are read as of pictures."""
    sounds.write_sounds(tmp_path, 4)
    made = conversations(tmp_path)
    both = f"Audio 1: {HEARD}\nwhat?Audio 2: {HEARD}\n"
    marked = {
        "conversations": [
            {"from": "human", "value": "<audio>what?<audio>"},
            {"from": "gpt", "value": "a tone"},
        ],
        "audios": [sounds.name(0), {"path": sounds.name(1), "bytes": None}],
    }
    for row, said in ((sounds.asked(0, "what?", 1), both), (marked, f"{HEARD}what?{HEARD}")):
        (found,) = made.render(row, str(tmp_path / "x.jsonl"), 0)
        text = tiny_tokenizer.text_of(made._tokenizer, found.ids)
        assert said in text
        assert [(one.of.height, one.of.width) for one in found.items] == [(1, 10), (1, 26)]
    (tmp_path / sounds.name(3)).write_bytes(truncated(sounds.sound(3)))
    with pytest.raises(BadConversationError, match="expected a whole one: copy it again"):
        made.render(sounds.asked(3), str(tmp_path / "x.jsonl"), 0)
    with pytest.raises(BadConversationError, match="expected text or a sound"):
        row = sounds.asked(0, "what?")
        row["messages"][0]["content"].append({"type": "image", "image": "x.png"})
        made.render(row, str(tmp_path / "x.jsonl"), 0)


SLOW_FORMATS = [pytest.param(one, marks=pytest.mark.slow) for one in ("tar", "parquet")]
FORMATS = ["lines", "inline", *SLOW_FORMATS]


def said(number: int) -> dict[str, Any]:
    """A part as OpenAI has it."""
    data = base64.b64encode(sounds.sound(number)).decode()
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}


def write(folder: Path, form: str) -> Path:
    """Each sound with a caption."""
    if form == "lines":
        rows = [{"audio": sounds.name(i), "text": "a tone"} for i in range(4)]
        (folder / "x.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
        return folder / "x.jsonl"
    if form == "inline":
        answer = {"role": "assistant", "content": "a tone"}
        rows = [{"messages": [{"role": "user", "content": [said(i)]}, answer]} for i in range(4)]
        (folder / "x.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
        return folder / "x.jsonl"
    if form == "tar":
        import tarfile

        with tarfile.open(folder / "x.tar", "w") as tar:
            for i in range(4):
                for suffix, raw in (("wav", sounds.sound(i)), ("txt", b"a tone")):
                    info = tarfile.TarInfo(f"{i}.{suffix}")
                    info.size = len(raw)
                    tar.addfile(info, io.BytesIO(raw))
        return folder / "x.tar"
    pyarrow = pytest.importorskip("pyarrow", reason="pip install 'megatron-hdp[data]'")
    parquet = pytest.importorskip("pyarrow.parquet")

    rows = [{"audio": {"bytes": sounds.sound(i), "path": None}, "text": "a tone"} for i in range(4)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "x.parquet")
    return folder / "x.parquet"


@pytest.mark.parametrize("form", FORMATS)
def test_prepared_sounds_are_found_again(tmp_path: Path, form: str) -> None:
    sounds.write_sounds(tmp_path, 4)
    how = {
        "tokenizer": sources.tokenizer(tmp_path, sources.OF_SOUNDS),
        "format": "chat",
        "template": "chatml",
    }
    found = run(write(tmp_path, form), tmp_path / "cache", media=QWEN, **how)
    items = Items.beside(found.prefix)
    assert items is not None and len(items) == 4
    files = MediaFiles(str(tmp_path), settings_of(QWEN), found.prefix + INLINE_SUFFIX)
    for number, item in enumerate(items.records):
        place = items.name(int(item["file"])), int(item["offset"]), int(item["size"])
        stored = stored_item(files, place, ItemSize(int(item["height"]), int(item["width"])))
        samples = samples_of(sounds.sound(number), "x", WINDOW)
        assert stored.num_frames == -(-len(samples) // 160)
        expected = spectrogram_of(samples, stored.shape[1], 3000)
        assert np.array_equal(np.asarray(stored.values), expected)
        assert stored.num_bytes == expected.nbytes


def test_a_file_that_has_changed_is_told(tmp_path: Path) -> None:
    raw = sounds.sound(0)
    (tmp_path / "x.wav").write_bytes(raw)
    files = MediaFiles(str(tmp_path), settings_of(QWEN))
    stored = stored_item(files, ("x.wav", 0, len(raw)), ItemSize(1, 12))
    assert "found 1,600 samples, expected 12 frames of 160 by the header" in stored.decoded()
    stored.found = "damaged"
    assert (np.asarray(stored.values) == -1.5).all()


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"encoder": "qwen2-audio", "most_pixels": 100}, "found most-pixels for qwen2-audio"),
        ({"encoder": "qwen3-vl", "most_seconds": 5}, "found most-seconds for qwen3-vl"),
    ],
)
def test_keys_of_the_other_kind_are_refused(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        settings_of(MediaSpec(**keys))


def test_settings_are_part_of_what_is_prepared_and_drawn(tmp_path: Path) -> None:
    longer = MediaSpec(encoder="qwen2-audio", most_seconds=60)
    made = [conversations(tmp_path, one).fingerprint() for one in (QWEN, longer)]
    assert made[0] != made[1]
    assert settings_of(QWEN).identity() != settings_of(MediaSpec(encoder="qwen3-vl")).identity()
