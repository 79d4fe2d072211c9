"""Videos become the frames, rows, texts and patches that the processors of transformers make."""

import base64
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from megatron_hdp.arrays import AnyArray
from megatron_hdp.data.chat import BadConversationError, MediaConversations
from megatron_hdp.data.media import (
    BETWEEN,
    INLINE_SUFFIX,
    Items,
    ItemSize,
    MediaError,
    MediaFiles,
    StoredFrames,
    VideoSettings,
    settings_of,
    stored_item,
)
from megatron_hdp.data.media.headers import animation_of
from megatron_hdp.data.media.videos import KeptVideos, VideoSize, size_of_video
from megatron_hdp.data.spec import MediaSpec
from megatron_hdp.data.tokenizers import build_tokenizer
from megatron_hdp.media import ENCODERS, Resizing
from tests.data.chat import tiny_tokenizer
from tests.data.media import sources, videos
from tests.data.media.drawn import drawn, saved
from tests.data.prepare.corpora import run

pytest.importorskip("jinja2", reason="pip install 'megatron-hdp[data]'")
transformers = pytest.importorskip("transformers", reason="pip install 'megatron-hdp[tokenizers]'")

SLOW = pytest.mark.slow
ENCODER_NAMES = "qwen2.5-vl", "qwen3-vl"
SEEN = "<|vision_start|>{}<|vision_end|>"


def spec(encoder: str, **keys: Any) -> MediaSpec:
    return MediaSpec(encoder=encoder, kind="videos", **keys)


def settings(encoder: str, **keys: Any) -> VideoSettings:
    found = settings_of(spec(encoder, **keys))
    assert isinstance(found, VideoSettings)
    return found


SMALL = {"least_pixels": 1, "most_pixels": 40_000}


@pytest.mark.parametrize("form", videos.FORMATS)
def test_frames_are_counted_by_headers(form: str) -> None:
    durations = [40, 80, 10, 1000, 20, 70, 50]
    pictures = [drawn(40, 61, i).convert("RGB") for i in range(len(durations))]
    raw = videos.as_file(pictures, form, durations)
    expected = [0.04, 0.08, 0.1, 1.0, 0.02, 0.07, 0.05]
    assert animation_of(io.BytesIO(raw)) == (40, 61, pytest.approx(expected))
    found = size_of_video(io.BytesIO(raw), "x", most_pixels=40 * 61)
    assert found == VideoSize(40, 61, 7, pytest.approx(7 / sum(expected)))
    with pytest.raises(MediaError, match=r"7 frames of 40 x 61 pixels, expected .* at most 2,439"):
        size_of_video(io.BytesIO(raw), "x", most_pixels=40 * 61 - 1)


@pytest.mark.parametrize("form", videos.FORMATS)
def test_broken_bytes_are_told_or_counted(form: str) -> None:
    """None of them runs for long, or raises something else."""
    rng = np.random.default_rng(0)
    whole = videos.as_file([drawn(20, 30, i).convert("RGB") for i in range(5)], form)
    for _ in range(200):
        raw = bytearray(whole[: rng.integers(len(whole))] if rng.integers(2) else whole)
        for at in rng.integers(0, len(raw) + 1, 3):
            raw[at : at + 1] = bytes([rng.integers(256)])
        try:
            assert size_of_video(io.BytesIO(bytes(raw)), "x", most_pixels=2**20).num_frames > 0
        except MediaError as error:
            assert "expected" in str(error)


def test_frames_that_are_seen() -> None:
    ten = VideoSize(40, 60, 50, 10.0)
    evenly, whole = (settings(one).sampling.chosen(ten, "x").tolist() for one in ENCODER_NAMES)
    assert evenly == [0, 5, 10, 15, 20, 25, 30, 35, 40, 45]
    assert whole == [0, 5, 11, 16, 22, 27, 33, 38, 44, 49]
    short = VideoSize(40, 60, 5, 30.0)
    evenly, whole = (settings(one).sampling.chosen(short, "x").tolist() for one in ENCODER_NAMES)
    assert (evenly, whole) == ([0, 1, 2, 3], [0, 1, 3, 4])
    for one in ENCODER_NAMES:
        with pytest.raises(MediaError, match="1 frames of which [01] would be seen"):
            settings(one).sampling.chosen(VideoSize(40, 60, 1, 2.0), "x")


def processors() -> dict[str, Any]:
    """Those of transformers, which need torchvision."""
    pytest.importorskip("torchvision", reason="no torchvision: pip install torchvision")
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    size = {"shortest_edge": 4_096, "longest_edge": 25_165_824}
    return {
        "qwen2.5-vl": Qwen2VLVideoProcessor(fps=2, do_sample_frames=True),
        "qwen3-vl": Qwen3VLVideoProcessor(size=size),
    }


@SLOW
@pytest.mark.parametrize("encoder", ENCODER_NAMES)
def test_frames_rows_and_seconds_are_those_of_transformers(encoder: str) -> None:
    """Integer-equal of 3,000 random videos; text and seconds as its processors have them."""
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
    from transformers.video_utils import VideoMetadata

    processor, mine, rng = processors()[encoder], settings(encoder), np.random.default_rng(0)
    for _ in range(3000):
        total, rate = int(rng.integers(2, 3000)), float(rng.choice([8, 10, 23.976, 29.97, 60]))
        sides = rng.integers(40, 2000, 2).tolist()
        size, about = VideoSize(*sides, total, rate), VideoMetadata(total, rate)
        theirs = processor.sample_frames(about, fps=2)
        # by rounding it may name a frame behind the last one, which no video has
        about.frames_indices = theirs[theirs < total]
        seen = mine.sampling.chosen(size, "x")
        assert seen.tolist() == about.frames_indices.tolist()
        patches = mine._patches(size, seen, rate)
        each = processor.get_num_of_video_patches(len(seen), *sides, {})
        rows = mine.rows(*(np.array([one]) for one in sides), len(seen))
        assert int(rows[0]) * len(patches) * 4 == each
        assert np.float32(patches[0].seconds) == np.float32(2 / about.sampled_fps)
        if encoder == "qwen3-vl":
            stamps = Qwen3VLProcessor._calculate_timestamps(None, about.frames_indices, rate, 2)
            assert [one.shown_at_s for one in patches] == stamps


@SLOW
def test_a_text_is_that_of_the_processor(tmp_path: Path) -> None:
    """Of Qwen3-VL, whose timestamps are text."""
    processor = processors()["qwen3-vl"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        sources.tokenizer(tmp_path, (*videos.TOKENS, "<|image_pad|>")).partition(":")[2]
    )
    pictures_of = transformers.Qwen2VLImageProcessorPil()
    whole = transformers.Qwen3VLProcessor(pictures_of, tokenizer, processor, chat_template="")
    pictures = videos.frames(1)
    video = np.stack([np.asarray(one) for one in pictures])
    about = {"total_num_frames": len(pictures), "fps": 5.0}
    made = whole(text=SEEN.format("<|video_pad|>"), videos=[video], video_metadata=[about])
    raw = videos.as_file(pictures, "WEBP")
    mine = settings("qwen3-vl")
    sizes = mine.sizes_of(io.BytesIO(raw), "x")
    (rows,) = mine.rows(np.array([sizes[0].height]), np.array([sizes[0].width]), sizes[0].frames)
    text = mine.written(sizes).replace("<|video_pad|>", "<|video_pad|>" * int(rows))
    assert tokenizer(text)["input_ids"] == made["input_ids"][0]


def numbers_of(frames: list[Image.Image], resizing: Resizing) -> AnyArray:
    """Patches of frames that are resized by Pillow, cut as transformers cuts them."""
    width, height = frames[0].size
    sides = resizing.resized(np.array([height]), np.array([width]), len(frames))
    to_height, to_width = (int(one[0]) for one in sides)
    small = [one.resize((to_width, to_height), Image.Resampling.BICUBIC) for one in frames]
    small += small[-1:] * (len(small) % 2)
    pixels = np.stack([np.asarray(one) for one in small]).transpose(0, 3, 1, 2)
    p, h, w = resizing.patch, to_height // resizing.patch, to_width // resizing.patch
    cut = pixels.reshape(len(small) // 2, 2, 3, h // 2, 2, p, w // 2, 2, p)
    return cut.transpose(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(len(small) // 2, h * w, -1)


def doubled(values: AnyArray, patch: int) -> AnyArray:
    """A single frame, repeated as an encoder does it."""
    if values.shape[1] == 3 * 2 * patch**2:
        return values
    return np.repeat(values.reshape(len(values), 3, 1, -1), 2, axis=2).reshape(len(values), -1)


@SLOW
@pytest.mark.parametrize("encoder", ENCODER_NAMES)
def test_patches_of_files_and_lists(tmp_path: Path, encoder: str) -> None:
    """A temporal patch is read by itself, in any order, with the bits of its frames."""
    videos.write_videos(tmp_path, 3)
    mine = settings(encoder, **SMALL)
    files = MediaFiles(str(tmp_path), mine)
    for number, count in enumerate(videos.COUNTS):
        raw = (tmp_path / videos.name(number)).read_bytes()
        with Image.open(io.BytesIO(raw)) as image:
            size = size_of_video(io.BytesIO(raw), "x", most_pixels=2**20)
            seen = mine.sampling.chosen(size, "x").tolist()
            of_file = [_frame(image, i) for i in seen]
        names = videos.frame_names(number)
        streams = (io.BytesIO((tmp_path / one).read_bytes()) for one in names)
        listed = mine.sizes_of_frames(streams, "x", None)
        assert listed[-1].frames == count
        pairs = ["".join(n + BETWEEN for n in names[i : i + 2]) for i in range(0, count, 2)]
        found = [
            (
                of_file,
                [(videos.name(number), 0, len(raw))] * 99,
                mine.sizes_of(io.BytesIO(raw), "x"),
            ),
            (videos.frames(number), [(one, 0, 0) for one in pairs], listed),
        ]
        for frames, places, sizes in found:
            expected = numbers_of(frames, mine.resizing)
            assert len(expected) == len(sizes)
            for part in reversed(range(len(sizes))):
                stored = stored_item(files, places[part], sizes[part])
                assert isinstance(stored, StoredFrames) and stored.first == part
                values = stored.array
                assert values.shape == stored.shape and len(values) == np.prod(stored.grid)
                assert np.array_equal(doubled(values, mine.resizing.patch), expected[part])


def _frame(image: Image.Image, number: int) -> Image.Image:
    image.seek(number)
    return image.convert("RGB")


def test_transparent_frames_are_white_behind(tmp_path: Path) -> None:
    """As pictures are."""
    clear = Image.new("RGBA", (56, 56), (9, 9, 9, 0))
    raw = videos.as_file([clear, drawn(56, 56, 1)], "WEBP")
    (tmp_path / "x").write_bytes(raw)
    mine = settings("qwen2.5-vl", **SMALL)
    (size,) = mine.sizes_of(io.BytesIO(raw), "x")
    values = stored_item(MediaFiles(str(tmp_path), mine), ("x", 0, len(raw)), size).array
    by_frame = values.reshape(-1, 3, 2, 14 * 14)
    assert (by_frame[:, :, 0] == 255).all() and not (by_frame[:, :, 1] == 255).all()


def damaged(raw: bytes) -> bytes:
    return raw[: len(raw) // 2].ljust(len(raw), b"\0")


@SLOW
@pytest.mark.parametrize("number", range(3))
def test_a_damaged_body_is_told_of_every_patch(tmp_path: Path, number: int) -> None:
    videos.write_videos(tmp_path, 3)
    mine, path = settings("qwen3-vl", **SMALL), tmp_path / videos.name(number)
    raw = path.read_bytes()
    sizes = mine.sizes_of(io.BytesIO(raw), "x")
    path.write_bytes(damaged(raw))
    files = MediaFiles(str(tmp_path), mine)
    for size in sizes:
        stored = stored_item(files, (videos.name(number), 0, len(raw)), size)
        found = stored.decoded()
        assert isinstance(found, str) and "expected" in found
        stored.found = found
        assert (stored.array == 128).all()


def test_a_frame_of_another_size_is_told(tmp_path: Path) -> None:
    for i, side in enumerate([56, 57]):
        (tmp_path / f"{i}.png").write_bytes(saved(drawn(56, side), "png"))
    mine = settings("qwen2.5-vl", **SMALL)
    place = f"0.png{BETWEEN}1.png{BETWEEN}", 0, 0
    stored = stored_item(MediaFiles(str(tmp_path), mine), place, ItemSize(56, 56, 2))
    assert "1.png: found a frame of 56 x 57 pixels, expected 56 x 56" in str(stored.decoded())


def test_a_video_is_decoded_once() -> None:
    kept, asked = KeptVideos(100), []

    def decode(key: str) -> list[AnyArray]:
        asked.append(key)
        if key == "damaged":
            raise MediaError("no frames")
        return [np.zeros(60, dtype=np.uint8)]

    for key in "aabba":
        kept.of(key, lambda key=key: decode(key))  # type: ignore[misc]
    assert asked == ["a", "b", "a"]
    for _ in range(2):
        with pytest.raises(MediaError, match="no frames"):
            kept.of("damaged", lambda: decode("damaged"))
    assert asked.count("damaged") == 1


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    videos.write_videos(tmp_path, 3)
    return tmp_path


def written(folder: Path, row: Any, encoder: str) -> str:
    tokenizer = build_tokenizer(sources.tokenizer(folder, videos.TOKENS))
    made = MediaConversations(tokenizer, spec(encoder, **SMALL), str(folder), "chatml")
    (found,) = made.render(row, str(folder / "x.jsonl"), 0)
    assert len(found.items) == len(found.item_tokens)
    return tiny_tokenizer.text_of(tokenizer, found.ids)


@SLOW
def llava(named: Any) -> dict[str, Any]:
    turns = [("human", "<video>what?"), ("gpt", "a film")]
    return {"conversations": [{"from": a, "value": b} for a, b in turns], "video": named}


def test_texts(folder: Path) -> None:
    """A placeholder for two frames; Qwen3-VL has the time before each."""
    pad = "<|video_pad|>"
    for row in (videos.asked(0, "what?"), llava(videos.name(0))):
        assert SEEN.format(pad * 2) + "what?" in written(folder, row, "qwen2.5-vl")
        stamped = f"<0.1 seconds>{SEEN.format(pad)}<0.7 seconds>{SEEN.format(pad)}"
        assert SEEN.format(stamped) + "what?" in written(folder, row, "qwen3-vl")
    frames = videos.frame_names(0)[:3]
    row = videos.asked(frames, "what?", fps=4)
    stamped = f"<0.1 seconds>{SEEN.format(pad)}<0.5 seconds>{SEEN.format(pad)}"
    assert stamped in written(folder, row, "qwen3-vl")
    row = llava(None) | {"videos": [frames]}
    stamped = f"<0.2 seconds>{SEEN.format(pad)}<1.0 seconds>{SEEN.format(pad)}"
    assert stamped in written(folder, row, "qwen3-vl")


@SLOW
@SLOW
@pytest.mark.parametrize(
    ("row", "words"),
    [
        (videos.asked(0, max_pixels=9), "found max_pixels beside a video"),
        (videos.asked(0, fps=1), "found fps beside a video, expected it of the whole source"),
        (videos.asked(["videos/0/0.png"]), "found 1 frames, expected 2 to 768"),
        (videos.asked([]), "as a video, expected its path"),
        (videos.asked(["videos/0/0.png", "videos/1/0.png"]), "found frame 2 of 100 x 60 pixels"),
        (videos.asked(["videos/0/0.png"] * 2, fps=0), "found 0 frames a second"),
        (llava("videos/0"), "no video .*videos/0, expected it there"),
        (llava("videos/0/0.png"), "found no video that is read here, expected MP4"),
        (llava(videos.name(9)), "no video .*9.webp, expected it there"),
        (sources.parts("what?", 0), "a part `image`, expected text or a video"),
    ],
)
def test_what_does_not_agree_is_refused(folder: Path, row: Any, words: str) -> None:
    with pytest.raises(BadConversationError, match=words):
        written(folder, row, "qwen3-vl")


def test_prepared_videos_are_found_again(folder: Path) -> None:
    path = folder / "x.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in videos.ROWS))
    options = {"tokenizer": sources.tokenizer(folder, videos.TOKENS), "format": "chat"}
    media = spec("qwen2.5-vl", **SMALL)
    made = run(path, folder / "cache", template="chatml", media=media, **options)
    items = Items.beside(made.prefix)
    assert items is not None and len(items) == len(videos.ROWS)
    parts = items.of(1)  # a WebP of 14 frames, 5 a second
    assert parts["part"].tolist() == [0, 1] and parts["frames"].tolist() == [4, 4]
    assert parts["seconds"] == pytest.approx(1.4)
    assert np.diff(parts["token"]).tolist() == [1]
    assert items.of(0)["frames"].tolist() == [5, 5, 5]  # a list
    assert items.name(int(items.of(0)[2]["file"])) == f"videos/0/4.png{BETWEEN}"


def test_a_video_in_its_row_is_stored_once(folder: Path) -> None:
    raw = (folder / videos.name(1)).read_bytes()
    url = f"data:video/webp;base64,{base64.b64encode(raw).decode()}"
    row = sources.parts("what?")
    row["messages"][0]["content"].append({"type": "video_url", "video_url": {"url": url}})
    path = sources.write_lines(folder / "inline.jsonl", [row, row])
    tokenizer = sources.tokenizer(folder, videos.TOKENS)
    options = {"format": "chat", "template": "chatml", "media": spec("qwen3-vl", **SMALL)}
    made = run(path, folder / "cache", tokenizer=tokenizer, **options)
    items = Items.beside(made.prefix)
    assert items is not None and items.records["offset"].tolist() == [0] * 3 + [len(raw)] * 3
    assert Path(made.prefix + INLINE_SUFFIX).read_bytes() == 2 * raw


@SLOW
def test_videos_of_a_tar(folder: Path) -> None:
    """Found by their names, read by their content."""
    with tarfile.open(folder / "x.tar", "w") as tar:
        for number in range(3):
            tar.add(folder / videos.name(number), f"{number}.mp4")
            (folder / "caption").write_text("a film")
            tar.add(folder / "caption", f"{number}.txt")
    mine, options = spec("qwen3-vl", **SMALL), {"format": "chat", "template": "chatml"}
    tokenizer = sources.tokenizer(folder, videos.TOKENS)
    made = run(folder / "x.tar", folder / "cache", media=mine, tokenizer=tokenizer, **options)
    items = Items.beside(made.prefix)
    assert items is not None and items.name(0) == "x.tar"
    files = MediaFiles(str(folder), settings("qwen3-vl", **SMALL))
    for number in range(3):
        (first, *_), path = items.of(number), folder / videos.name(number)
        place = int(first["offset"]), int(first["size"])
        assert files.raw("x.tar", *place) == path.read_bytes()
        size = ItemSize(*(int(first[key]) for key in ("height", "width", "frames", "part")))
        stored = stored_item(files, ("x.tar", *place), size)
        assert stored.array.shape == stored.shape


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"encoder": "clip-l-336"}, "found kind: videos for clip-l-336, expected it for qwen"),
        ({"encoder": "qwen2-audio"}, "found kind: videos for qwen2-audio, expected sounds"),
        ({"encoder": "qwen3-vl", "frames_per_second": 0.0}, "found frames-per-second 0"),
        ({"encoder": "qwen3-vl", "most_frames": 2}, "least-frames 4 and most-frames 2"),
        ({"encoder": "qwen3-vl", "most_seconds": 2}, "most-seconds .*its items are videos"),
        ({"encoder": "qwen3-vl", "least_pixels": 9, "most_pixels": 8}, "in order"),
    ],
)
def test_settings_that_exclude_each_other(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        settings_of(MediaSpec(kind="videos", **keys))
    with pytest.raises(ValueError, match="frames-per-second .*its items are pictures"):
        settings_of(MediaSpec(encoder="qwen3-vl", frames_per_second=1.0))


def test_what_rows_depend_on_is_its_identity() -> None:
    one = settings("qwen3-vl")
    assert one.identity() != settings("qwen3-vl", most_pixels=9_000).identity()
    assert one.preparing() == settings("qwen3-vl", most_pixels=9_000).preparing()
    assert one.preparing() != settings("qwen3-vl", frames_per_second=1.0).preparing()
    assert one.resizing.images == ENCODERS["qwen3-vl"].resizing.images
