"""The length of a sound from its header, and its samples: WAV and FLAC's length without a library.

Other files, and what is in a FLAC, are read by `soundfile`; other rates become 16 kHz by `soxr`, as
`librosa` does it, which `transformers` reads files with.
"""

import io
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from megatron_hdp.arrays import AnyArray, Float32Array
from megatron_hdp.data.extras import import_extra
from megatron_hdp.data.media.sizes import MediaError

RATE = 16_000
"""Samples a second that encoders hear."""
EXTRA = "sound"

_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE
_TYPES = {
    (_PCM, 8): "u1",
    (_PCM, 16): "<i2",
    (_PCM, 24): "u1",
    (_PCM, 32): "<i4",
    (_FLOAT, 32): "<f4",
    (_FLOAT, 64): "<f8",
}
"""Of a WAV's samples, by format and bits; of 24 bits their bytes."""
_RIFF, _CHUNK, _FMT = struct.Struct("<4sI4s"), struct.Struct("<4sI"), struct.Struct("<HHIIHH")
_SUBFORMAT, _WITH_SUBFORMAT = 24, 26  # of an extensible format: where it stands, and ends
_MOST_CHUNKS = 1000  # before the samples
_RATES = range(1000, 768_001)
_UNTOLD = 2**32 - 1  # the size that who writes into a pipe gives
_FLAC, _FLAC_BYTES = b"fLaC", 26


@dataclass(frozen=True)
class SoundSize:
    """How long a sound is."""

    num_samples: int
    """Of each channel."""
    rate: int
    """Samples a second."""

    @property
    def num_heard(self) -> int:
        """Samples at `RATE`."""
        return -(-self.num_samples * RATE // self.rate)


@dataclass(frozen=True)
class _Wav:
    kind: tuple[int, int]
    """A key of `_TYPES`, if it is known here."""
    channels: int
    rate: int
    offset: int
    """Of its samples."""
    num_bytes: int

    @property
    def size(self) -> SoundSize:
        """Its length."""
        return SoundSize(self.num_bytes // (self.channels * self.kind[1] // 8), self.rate)


def size_of_sound(stream: BinaryIO, name: str) -> SoundSize:
    """Return the length of the sound in a file; nothing is decoded.

    Args:
        stream: the file, which can seek; it stands anywhere.
        name: what an error calls it.

    Raises:
        MediaError: it is no sound that is read here, or its header is damaged.
        ModuleNotFoundError: it is neither WAV nor FLAC, and soundfile is not installed.
    """
    wav = _wav(stream, name)
    found = wav.size if wav is not None else _flac(stream)
    if found is None:
        with _opened(stream, name) as file:
            found = SoundSize(int(file.frames), int(file.samplerate))
    if found.num_samples < 1 or found.rate not in _RATES:
        raise MediaError(
            f"{name}: found a sound of {found.num_samples:,} samples, {found.rate:,} a second, "
            f"expected some, {_RATES.start:,} to {_RATES[-1]:,} a second: save it again, or leave "
            "it out"
        )
    return found


def samples_of(raw: bytes, name: str, most: int) -> Float32Array:
    """Return a sound at `RATE`, the mean of its channels, from -1 to 1.

    Args:
        raw: the bytes of its file.
        name: what an error calls it.
        most: of a longer sound the first so many samples are returned.

    Raises:
        MediaError: it is damaged, or no sound that is read here.
        ModuleNotFoundError: soundfile or soxr is not installed, and needed for it.
    """
    stream = io.BytesIO(raw)
    if (wav := _wav(stream, name)) is not None:
        rate, samples = wav.rate, _samples_of_wav(raw, wav)
    else:
        with _opened(stream, name) as file:
            rate = int(file.samplerate)
            samples = file.read(dtype="float32", always_2d=True)
    heard: Float32Array = samples.mean(axis=1) if samples.shape[1] > 1 else samples[:, 0]
    if not np.isfinite(heard).all():
        raise MediaError(f"{name}: found samples that are no finite numbers, expected a sound")
    if rate == RATE:
        return heard[:most]
    resampler = import_extra("soxr", f"{name}, of {rate:,} samples a second,", EXTRA)
    wanted = SoundSize(len(heard), rate).num_heard
    found: Float32Array = resampler.resample(heard, rate, RATE, quality="HQ")[: min(wanted, most)]
    return np.pad(found, (0, min(wanted, most) - len(found)))


def _wav(stream: BinaryIO, name: str) -> _Wav | None:
    """What the header of a WAV says; None: it is none, or of samples that are not read here."""
    stream.seek(0)
    head = stream.read(_RIFF.size)
    if len(head) < _RIFF.size or head[:4] != b"RIFF" or head[8:] != b"WAVE":
        return None
    end = stream.seek(0, os.SEEK_END)
    at, about = _RIFF.size, None
    for _ in range(_MOST_CHUNKS):
        if at + _CHUNK.size > end:
            break
        stream.seek(at)
        kind, size = _CHUNK.unpack(stream.read(_CHUNK.size))
        at += _CHUNK.size
        if kind == b"fmt ":
            about = stream.read(min(size, _WITH_SUBFORMAT))
        elif kind == b"data":
            if about is None or len(about) < _FMT.size:
                break
            size = end - at if size == _UNTOLD else size
            return _wav_of(about, at, size, end, name)
        at += size + size % 2
    raise MediaError(f"{name}: found a WAV without samples, expected a whole one: copy it again")


def _wav_of(about: bytes, at: int, size: int, end: int, name: str) -> _Wav | None:
    kind, channels, rate, _, _, bits = _FMT.unpack_from(about)
    if kind == _EXTENSIBLE and len(about) == _WITH_SUBFORMAT:
        (kind,) = struct.unpack_from("<H", about, _SUBFORMAT)
    if (kind, bits) not in _TYPES:
        return None
    found = _Wav((kind, bits), channels, rate, at, size)
    if not channels or not rate or at + size > end or not found.size.num_samples:
        raise MediaError(
            f"{name}: found a WAV of {channels} channels and {rate:,} samples a second with "
            f"{max(end - at, 0):,} of {size:,} bytes, expected a whole one: copy it again"
        )
    return found


def _samples_of_wav(raw: bytes, wav: _Wav) -> Float32Array:
    """Samples of all channels, float32 ``[samples, channels]``."""
    count = wav.size.num_samples * wav.channels
    if wav.kind == (_PCM, 24):
        parts = np.frombuffer(raw, "u1", 3 * count, wav.offset).reshape(-1, 3)
        numbers: AnyArray = np.zeros((count, 4), dtype="u1")
        numbers[:, 1:] = parts
        numbers = numbers.reshape(-1).view("<i4")
    else:
        numbers = np.frombuffer(raw, _TYPES[wav.kind], count, wav.offset)
    found: Float32Array
    if wav.kind == (_PCM, 8):
        found = (numbers.astype(np.float32) - np.float32(128)) / np.float32(128)
    elif wav.kind[0] == _FLOAT:
        found = numbers.astype(np.float32)
    else:
        found = numbers.astype(np.float32) / np.float32(2.0 ** (8 * numbers.itemsize - 1))
    return found.reshape(-1, wav.channels)


def _flac(stream: BinaryIO) -> SoundSize | None:
    """What the header of a FLAC says; None: it is none, or does not tell how long it is."""
    stream.seek(0)
    head = stream.read(_FLAC_BYTES)
    if len(head) < _FLAC_BYTES or not head.startswith(_FLAC) or head[4] & 0x7F:
        return None
    packed = int.from_bytes(head[18:26], "big")  # rate 20, channels 3, bits 5, samples 36
    rate, num_samples = packed >> 44, packed & (2**36 - 1)
    return SoundSize(num_samples, rate) if num_samples and rate else None


@contextmanager
def _opened(stream: BinaryIO, name: str) -> Iterator[Any]:
    """Open a sound by soundfile; what it says of its bytes within the block is a `MediaError`."""
    library = import_extra("soundfile", name, EXTRA)
    stream.seek(0)
    try:
        with library.SoundFile(stream) as file:
            yield file
    except library.LibsndfileError as error:
        raise MediaError(
            f"{name}: found no whole sound ({error.error_string}), expected WAV, FLAC, OGG or MP3: "
            "leave it out, or copy it again"
        ) from error
