"""Frames of MP4, MKV and others are counted by headers, and decoded as transformers does it."""

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from megatron_hdp.data.media import MediaError, MediaFiles, VideoSettings, settings_of, stored_item
from megatron_hdp.data.media.videos import VideoSize, frames_of_video, size_of_video
from megatron_hdp.data.spec import MediaSpec
from tests.data.media import videos
from tests.data.media.drawn import drawn

av = pytest.importorskip("av", reason="no PyAV: pip install 'megatron-hdp[video]'")
FORMS = {"mp4": "mpeg4", "mov": "mpeg4", "avi": "mpeg4", "matroska": "mpeg4", "webm": "libvpx-vp9"}
MOST = 2**20


def pictures(count: int = 12) -> list[Image.Image]:
    return [drawn(64, 96, i).convert("RGB") for i in range(count)]


def size_of(raw: bytes) -> VideoSize:
    return size_of_video(io.BytesIO(raw), "x", most_pixels=MOST)


def settings() -> VideoSettings:
    keys = {"least_pixels": 1, "most_pixels": 40_000}
    found = settings_of(MediaSpec(encoder="qwen2.5-vl", kind="videos", **keys))
    assert isinstance(found, VideoSettings)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_frames_are_those_of_transformers(tmp_path: Path, form: str) -> None:
    """Bit for bit; of a WebM it does not know how many there are."""
    video_utils = pytest.importorskip("transformers.video_utils")
    raw = videos.as_movie(pictures(), form, FORMS[form])
    assert size_of(raw) == VideoSize(64, 96, 12, 5.0)
    (tmp_path / "x").write_bytes(raw)
    chosen = np.array([0, 3, 4, 11])
    theirs, about = video_utils.read_video_pyav(str(tmp_path / "x"), lambda **_: chosen)
    found = frames_of_video(io.BytesIO(raw), "x", chosen, most_pixels=MOST)
    assert np.array_equal(np.stack([np.asarray(one) for one in found]), theirs)
    assert about.fps == 5.0 and about.total_num_frames in (0, 12)


def test_a_patch_is_read_from_a_movie(tmp_path: Path) -> None:
    raw, mine = videos.as_movie(pictures(), "mp4"), settings()
    (tmp_path / "x.bin").write_bytes(b"before" + raw + b"behind")
    sizes = mine.sizes_of(io.BytesIO(raw), "x")
    files = MediaFiles(str(tmp_path), mine)
    stored = [stored_item(files, ("x.bin", 6, len(raw)), one) for one in sizes]
    assert all(one.array.shape == one.shape for one in stored) and len(stored) == 2
    assert stored[1].array.std() > 10
    (tmp_path / "x.bin").write_bytes(raw)
    again = stored_item(MediaFiles(str(tmp_path), mine), ("x.bin", 6, len(raw)), sizes[0])
    assert f"found {len(raw) - 6:,} bytes from 6 on" in str(again.decoded())


@pytest.mark.parametrize("turned", [90, 180, 270])
def test_a_turned_video_is_refused(turned: int) -> None:
    """As telephones save them."""
    for form in ("mp4", "mov"):
        with pytest.raises(MediaError, match="a video that is turned when it is shown"):
            size_of(videos.as_movie(pictures(3), form, turned=turned))


def test_a_text_that_names_files_is_no_video() -> None:
    for raw in (b"#EXTM3U\n#EXT-X-TARGETDURATION:9\n/etc/passwd\n", b"ffconcat version 1.0\n"):
        with pytest.raises(MediaError, match="no video that is read here"):
            size_of(raw)


def test_frames_too_large_or_too_few() -> None:
    raw = videos.as_movie(pictures(3), "mp4")
    with pytest.raises(MediaError, match="3 frames of 64 x 96 pixels, expected .* at most 6,143"):
        size_of_video(io.BytesIO(raw), "x", most_pixels=64 * 96 - 1)
    with pytest.raises(MediaError, match="found 3 frames, expected 5 or more"):
        list(frames_of_video(io.BytesIO(raw), "x", np.array([0, 4]), most_pixels=MOST))
    with pytest.raises(MediaError, match="a damaged video"):
        list(frames_of_video(io.BytesIO(raw), "x", np.array([0]), most_pixels=100))


@pytest.mark.parametrize("form", [pytest.param(one, marks=pytest.mark.slow) for one in FORMS])
def test_broken_bytes_are_told(form: str) -> None:
    """Nothing else is raised; of an MPEG-4 most are seen, a decoder of VP9 takes almost any."""
    whole, rng, told = videos.as_movie(pictures(), form, FORMS[form]), np.random.default_rng(0), 0
    for _ in range(100):
        raw = bytearray(whole)
        for at in rng.integers(0, len(raw), 8):
            raw[at] ^= int(rng.integers(1, 256))
        try:
            size = size_of(bytes(raw))
            chosen = np.arange(min(size.num_frames, 12))
            assert list(frames_of_video(io.BytesIO(bytes(raw)), "x", chosen, most_pixels=MOST))
        except MediaError as error:
            told += "expected" in str(error)
    assert told > (0 if form == "webm" else 50)
