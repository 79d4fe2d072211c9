"""What ByteScale (arXiv 2502.21231) reports: the figures that the reproduction stands beside."""

from dataclasses import dataclass

CONTEXTS = (262_144, 524_288, 1_048_576, 2_097_152)
BATCH_TOKENS = 33_554_432


@dataclass(frozen=True)
class Row:
    """A row of the table of speed-ups (section 8), one entry a context."""

    model: str
    data: str
    gpus: int
    naive: tuple[float, ...]
    balanced: tuple[float, ...]

    @property
    def name(self) -> str:
        """Model and data."""
        return f"{self.model} {self.data}"


def _row(model: str, data: str, gpus: int, *speedups: str) -> Row:
    naive, balanced = zip(*(map(float, one.split("/")) for one in speedups), strict=True)
    return Row(model, data, gpus, naive, balanced)


# The paper says "1K" to "8K" and "> 12K" GPUs. 12,288 is the least multiple of 4,096 above 12,000,
# and 12,288 / 16 GPUs of a rank are three times 256 ranks: a 2M mesh fits evenly.
ROWS = (
    _row("llama-7b", "github", 1024, "1.28/1.73", "1.51/2.49", "2.25/4.56", "3.96/7.89"),
    _row("llama-7b", "byted", 1024, "1.23/1.68", "1.42/1.98", "1.61/2.34", "2.43/4.26"),
    _row("llama-13b", "github", 2048, "1.26/1.65", "1.50/2.22", "2.59/4.15", "3.67/6.88"),
    _row("llama-13b", "byted", 2048, "1.21/1.53", "1.26/1.69", "1.51/2.28", "2.27/4.13"),
    _row("llama-30b", "github", 4096, "1.18/1.54", "1.28/2.07", "2.15/3.48", "3.39/6.21"),
    _row("llama-30b", "byted", 4096, "1.17/1.49", "1.23/1.58", "1.62/2.06", "2.30/3.80"),
    _row("llama-70b", "github", 8192, "1.19/1.41", "1.41/1.89", "1.98/3.05", "2.45/4.28"),
    _row("llama-70b", "byted", 8192, "1.22/1.52", "1.24/1.70", "1.26/1.93", "1.79/2.84"),
    _row("mistral-8x7b", "github", 8192, "1.15/1.46", "1.18/1.52", "1.27/1.84", "1.98/3.42"),
    _row("mistral-8x7b", "byted", 8192, "1.17/1.45", "1.20/1.63", "1.27/1.75", "1.35/2.18"),
    _row("mistral-8x22b", "github", 12_288, "1.12/1.28", "1.27/1.59", "1.86/2.72", "2.75/4.13"),
    _row("mistral-8x22b", "byted", 12_288, "1.15/1.34", "1.20/1.47", "1.35/1.73", "1.67/2.41"),
)

PIPELINED = ("llama-70b", "mistral-8x7b", "mistral-8x22b")
"""Models that the paper runs with pipeline stages."""

ABLATION = (
    ("static mesh", 1.0),
    ("dynamic communication", 1.59),
    ("selective offload", 2.01),
    ("balance", 3.69),
    ("remote loader", 3.89),
)

CASE_STEP_S = {"static": 520.0, "naive": 272.0, "balanced": 157.0}
"""Seconds of a step of the case study: 7B, 2M, byted."""
CASE_FASTEST_S = 101.0
"""Of a rank, under naive HDP."""

OFFLOAD = ((0.0, 5.08, 59.0), (0.5, 5.08, 40.0), (0.6, 5.38, 37.0), (0.8, 5.93, 33.0))
OFFLOAD = (*OFFLOAD, (1.0, 6.49, 27.0))
"""Figure 21, 64K tokens: offload ratio, seconds, GB."""
