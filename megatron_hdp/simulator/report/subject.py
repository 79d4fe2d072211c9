"""What a report is about, besides the run."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What the run was asked for."""

    config: str
    """Names of files, and flags that win over them."""
    data: str
    """Where the lengths come from."""
    cost_model: str | None = None
    """The file of measured coefficients; None: they are assumed from the model's shape."""
    gpu_memory_bytes: float | None = None
    """That a GPU has; None: not looked at."""
