"""From samples to what an encoder hears: a logarithmic mel spectrogram, as Whisper's extractor.

The arithmetic is that of `transformers`' `WhisperFeatureExtractor` without torch, step by step.
"""

from functools import cache

import numpy as np

from megatron_hdp.arrays import Float32Array, Float64Array
from megatron_hdp.data.media.sounds import RATE

BINS = 128
HOP = 160
"""Samples of a frame: 10 ms."""
_TAPS = 400  # of the Fourier transform
_FLOOR = 1e-10
_MOST_HERTZ = RATE / 2
_LINEAR_HERTZ, _LINEAR_MELS = 1000.0, 15.0  # up to here mels are proportional to hertz
_LOG_STEP = np.log(6.4) / 27.0


def spectrogram_of(samples: Float32Array, num_frames: int, window_frames: int) -> Float32Array:
    """Return the first frames of a window's spectrogram, ``[BINS, num_frames]``.

    Args:
        samples: of the window, whose rest is silence.
        num_frames: that are wanted.
        window_frames: of the whole window.
    """
    whole = np.zeros(window_frames * HOP, dtype=np.float32)
    samples = samples[: len(whole)]
    whole[: len(samples)] = samples
    padded = np.pad(whole, _TAPS // 2, mode="reflect").astype(np.float64)
    # the loudest number of all decides on each, and frames behind the sound have the floor's
    heard = min(-(-(len(samples) + _TAPS // 2) // HOP), window_frames)
    count = max(heard, num_frames)
    frames = np.lib.stride_tricks.sliding_window_view(padded, _TAPS)[::HOP][:count]
    found = np.fft.rfft(frames * np.hanning(_TAPS + 1)[:-1]).astype(np.complex64)
    power = np.abs(found, dtype=np.float64) ** 2.0
    logarithms = np.log10(np.maximum(_FLOOR, np.dot(_filters().T, power.T))).astype(np.float32)
    loudest = np.maximum(logarithms.max(), np.float32(np.log10(_FLOOR)))
    logarithms = np.maximum(logarithms[:, :num_frames], loudest - np.float32(8.0))
    scaled: Float32Array = (logarithms + np.float32(4.0)) / np.float32(4.0)
    return np.ascontiguousarray(scaled)


@cache
def _filters() -> Float64Array:
    """Slaney's triangles, ``[frequencies, BINS]``."""
    mels = np.linspace(0.0, _mels(_MOST_HERTZ), BINS + 2)
    hertz = 200.0 * mels / 3.0
    is_log = mels >= _LINEAR_MELS
    hertz[is_log] = _LINEAR_HERTZ * np.exp(_LOG_STEP * (mels[is_log] - _LINEAR_MELS))
    slopes = hertz[None, :] - np.linspace(0, _MOST_HERTZ, 1 + _TAPS // 2)[:, None]
    widths = np.diff(hertz)
    rising, falling = -slopes[:, :-2] / widths[:-1], slopes[:, 2:] / widths[1:]
    found: Float64Array = np.maximum(0.0, np.minimum(rising, falling))
    found *= (2.0 / (hertz[2:] - hertz[:-2]))[None]
    return found


def _mels(hertz: float) -> float:
    return float(_LINEAR_MELS + np.log(hertz / _LINEAR_HERTZ) * (27.0 / np.log(6.4)))
