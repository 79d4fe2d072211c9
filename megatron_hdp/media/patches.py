"""Patches of a picture or a video, or a window of sound: what encoders of models take."""

from dataclasses import dataclass

from megatron_hdp.arrays import AnyArray


@dataclass(frozen=True)
class Patches:
    """A resized picture or video, cut into patches; not normalised, which the encoder does.

    Patches stand as the processors of `transformers` have them: frame by frame; within a frame,
    with m x m patches merged into a row, as ``[h / m, w / m, m, m]``, so that a row's patches are
    neighbours. A patch's values are its colours, then a video's frames, then lines, then columns.
    """

    values: AnyArray
    """uint8 ``[t * h * w, 3 * p * p]`` of p x p pixels a patch; of a video with f frames in a patch
    ``[t * h * w, 3 * f * p * p]``. A picture stands for f equal frames, and is not repeated."""
    grid: tuple[int, int, int]
    """Patches in time, height and width: t, h, w. A picture has t = 1."""
    seconds: float | None = None
    """Of a video, between temporal patches; encoders that have no use for it look past it."""
    first: int = 0
    """Temporal patches of the video before these, which are items of their own."""

    def __post_init__(self) -> None:
        """Refuses a grid that is none.

        Raises:
            ValueError: it has other patches than there are.
        """
        t, h, w = self.grid
        if min(self.grid) < 1 or self.values.ndim != 2 or len(self.values) != t * h * w:
            raise ValueError(
                f"found patches of shape {self.values.shape} in a grid of {t} x {h} x {w}, "
                f"expected [{t * h * w}, values of a patch]"
            )


@dataclass(frozen=True)
class Sound:
    """A window of sound as a logarithmic mel spectrogram.

    What is behind `num_frames` is silence; a convolution sees its first frames.
    """

    values: AnyArray
    """float32 ``[bins, frames]``."""
    num_frames: int
    """Those that hold sound."""

    def __post_init__(self) -> None:
        """Refuses a window that is none.

        Raises:
            ValueError: it has fewer frames than hold sound.
        """
        if self.values.ndim != 2 or not 0 < self.num_frames <= self.values.shape[1]:
            raise ValueError(
                f"found a spectrogram of shape {self.values.shape} with {self.num_frames} frames "
                "of sound, expected [bins, frames] and no more of sound than that"
            )
