"""Sources with drawn sounds."""

import io
import json
import struct
import wave
from pathlib import Path
from typing import Any

import numpy as np

from megatron_hdp.arrays import Float32Array
from tests.data.media import sources

COUNTS = [1600, 4001, 800, 2720]
"""Samples of sound 0, 1, ... at 16 kHz."""
MIXTURE = """
sources:
  sounds:
    path: x.jsonl
    format: chat
    template: chatml
    tokenizer: hf:hf
    media: {encoder: qwen2-audio}
  text: {path: x.txt, tokenizer: hf:hf}
"""


def waves(count: int, number: int = 0) -> Float32Array:
    """Tones and noise, from -1 to 1."""
    noise = np.random.default_rng(number).standard_normal(count) * 0.05
    at = np.arange(count) / 16_000
    tones = 0.3 * np.sin(2 * np.pi * (200 + 150 * number) * at) * np.sin(3 * at + 1)
    return (noise + tones).astype(np.float32)


def as_wav(samples: Float32Array, rate: int = 16_000, channels: int = 1) -> bytes:
    """Of 16 bits; the standard library's."""
    stream = io.BytesIO()
    with wave.open(stream, "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((samples * 32_767).astype("<i2").tobytes())
    return stream.getvalue()


def with_head(kind: int, bits: int, body: bytes, rate: int = 16_000, channels: int = 1) -> bytes:
    """A WAV of any format, with a chunk before its samples."""
    width = channels * bits // 8
    about = struct.pack("<HHIIHH", kind, channels, rate, rate * width, width, bits)
    chunks = b"LIST" + struct.pack("<I", 3) + b"abc\0"
    chunks += b"fmt " + struct.pack("<I", len(about)) + about
    chunks += b"data" + struct.pack("<I", len(body)) + body
    return b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WAVE" + chunks


def sound(number: int) -> bytes:
    return as_wav(waves(COUNTS[number % len(COUNTS)], number))


def name(number: int) -> str:
    return f"sounds/{number}.wav"


def write_sounds(folder: Path, count: int) -> None:
    (folder / "sounds").mkdir()
    for number in range(count):
        (folder / name(number)).write_bytes(sound(number))


def asked(*content: str | int, answer: str = "a tone") -> dict[str, Any]:
    """Contents in parts, whose numbers are sounds."""
    found = [
        {"type": "text", "text": one}
        if isinstance(one, str)
        else {"type": "audio", "audio_url": name(one)}
        for one in content
    ]
    turns = [("user", found), ("assistant", answer)]
    return {"messages": [{"role": role, "content": one} for role, one in turns]}


ROWS = [asked(i % 4, "what?", (i + 1) % 4, answer="it is " + "a" * i) for i in range(9)]


def write_mixture(folder: Path, text: str) -> Path:
    """Conversations with sounds and a text, as a file of --hdp-data."""
    write_sounds(folder, 4)
    (folder / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    sources.tokenizer(folder, sources.OF_SOUNDS)
    (folder / "x.txt").write_text(text)
    (folder / "mix.yaml").write_text(MIXTURE)
    return folder / "mix.yaml"
