"""What the benchmarks of a GPU share: their options, a line about the machine, tables, clocks."""

import argparse
import platform
import time
from collections.abc import Callable, Sequence

import torch


class Budget:
    """Seconds that a benchmark may take; what does not fit is left out and said so."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        """Seconds that are left."""
        return self._end - time.monotonic()


def parse(description: str, seconds: float = 100) -> tuple[argparse.Namespace, Budget]:
    """Return the options of a benchmark: ``device``, ``small``, and its budget of time."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--small", action="store_true", help="sizes for a CPU: shows that it runs")
    parser.add_argument("--seconds", type=float, default=seconds, help="time limit")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("found no NVIDIA GPU: give --device cpu --small, or run it where there is one")
    return options, Budget(options.seconds)


def machine(device: str) -> str:
    """Return a line: device and versions."""
    parts = [f"Python {platform.python_version()}", f"torch {torch.__version__}"]
    if device == "cuda":
        parts.insert(0, torch.cuda.get_device_name())
        parts.append(f"CUDA {torch.version.cuda}")
    else:
        parts.insert(0, f"CPU, {torch.get_num_threads()} thread(s)")
    return ", ".join(parts)


def table(header: Sequence[str], rows: Sequence[Sequence[str]] = ()) -> str:
    """Return a Markdown table."""
    return "\n".join(map(row, [header, ["---"] * len(header), *rows]))


def row(cells: Sequence[str]) -> str:
    """Return a line of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def seconds_of(run: Callable[[], object], device: str) -> float:
    """Return the seconds of one run, the device's work included."""
    if device == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def peak_bytes(run: Callable[[], object]) -> int:
    """Return the peak of the GPU's memory during a run."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()
