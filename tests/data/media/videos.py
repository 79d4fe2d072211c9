"""Sources with drawn videos: files, and lists of frames."""

import io
import json
from pathlib import Path
from typing import Any

from PIL import Image

from tests.data.media import sources
from tests.data.media.drawn import drawn, saved

TOKENS = ("<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
SIDES = [(60, 90), (100, 60), (44, 44)]
"""Height and width of video 0, 1, ..."""
COUNTS = [5, 14, 7]
"""Frames of each."""
MS = 200
"""Of a frame."""
FORMATS = ("GIF", "WEBP")
MIXTURE = """
sources:
  videos:
    path: x.jsonl
    format: chat
    template: chatml
    tokenizer: hf:hf
    media: {{encoder: {encoder}, kind: videos, least-pixels: 1, most-pixels: {most}}}
  text: {{path: x.txt, tokenizer: hf:hf}}
"""


def frames(number: int) -> list[Image.Image]:
    """Of a video, whose colours change."""
    height, width = SIDES[number % len(SIDES)]
    count = COUNTS[number % len(COUNTS)]
    return [drawn(height, width, 100 * number + i).convert("RGB") for i in range(count)]


def as_file(pictures: list[Image.Image], form: str, duration: int | list[int] = MS) -> bytes:
    stream = io.BytesIO()
    how = {"lossless": True} if form == "WEBP" else {}
    first, *others = pictures
    first.save(stream, form, save_all=True, append_images=others, duration=duration, **how)
    return stream.getvalue()


def as_movie(
    pictures: list[Image.Image], form: str, codec: str = "mpeg4", rate: int = 5, turned: int = 0
) -> bytes:
    """An MP4, MOV, MKV, WebM or AVI, by PyAV."""
    import av

    stream = io.BytesIO()
    with av.open(stream, "w", format=form) as file:
        track = file.add_stream(codec, rate=rate)
        track.width, track.height = pictures[0].size
        track.pix_fmt = "yuv420p"
        if turned:
            track.set_display_rotation(turned)
        for one in [*pictures, None]:
            frame = None if one is None else av.VideoFrame.from_image(one)
            file.mux(track.encode(frame))
    return stream.getvalue()


def name(number: int) -> str:
    """Of a file; those of other formats have its number, too."""
    return f"videos/{number}.{FORMATS[number % len(FORMATS)].lower()}"


def frame_names(number: int) -> list[str]:
    return [f"videos/{number}/{i}.png" for i in range(COUNTS[number % len(COUNTS)])]


def write_videos(folder: Path, count: int) -> None:
    """Each as a file, and as files of its frames."""
    for number in range(count):
        (folder / f"videos/{number}").mkdir(parents=True)
        pictures = frames(number)
        (folder / name(number)).write_bytes(as_file(pictures, FORMATS[number % len(FORMATS)]))
        for one, path in zip(pictures, frame_names(number), strict=True):
            (folder / path).write_bytes(saved(one, "png"))


def asked(*content: str | int | list[str], answer: str = "a film", **keys: Any) -> dict[str, Any]:
    """Contents in parts: numbers are files, lists those of frames."""
    found: list[dict[str, Any]] = []
    for one in content:
        if isinstance(one, str):
            found.append({"type": "text", "text": one})
        else:
            named = name(one) if isinstance(one, int) else one
            found.append({"type": "video", "video": named, **keys})
    turns = [("user", found), ("assistant", answer)]
    return {"messages": [{"role": role, "content": one} for role, one in turns]}


ROWS = [
    asked(i % 3 if i % 2 else frame_names(i % 3)[:5], "what?", answer="it is " + "a" * i)
    for i in range(9)
]


def write_mixture(folder: Path, encoder: str, most_pixels: int, text: str) -> Path:
    """Conversations with videos and a text, as a file of --hdp-data."""
    write_videos(folder, 3)
    (folder / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    sources.tokenizer(folder, TOKENS)
    (folder / "x.txt").write_text(text)
    (folder / "mix.yaml").write_text(MIXTURE.format(encoder=encoder, most=most_pixels))
    return folder / "mix.yaml"
