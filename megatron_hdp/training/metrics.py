"""What a step measured: one JSON object a step in a file, one line in the log, TensorBoard scalars.

A file continues across a restart: lines of steps that will run again are dropped, so it never holds
a step twice. A step whose evaluation comes later is written at once like all others, with room
for what the evaluation will find, so that its line can be completed in place.
"""

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import IO, Any, Self

import orjson

from megatron_hdp.megatron.step import EvaluationLoss, StepFigures, StepReport, words_by_source

_BEGINNING = b'{"'  # of a step's line
_ROOM = 64  # bytes: a validation loss instead of null, or its name among those not finite


@dataclass(frozen=True, kw_only=True)
class StepMetrics(StepFigures):
    """One step as it is logged: what it did, how long it took, what the optimizer did with it."""

    step: int
    """Number of the step, from 1."""
    grad_norm: float
    """Norm of the gradient before clipping."""
    learning_rate: float
    """What the optimizer used."""
    consumed_sequences: int
    """Sequences since the start of training, this step's included."""
    consumed_tokens: int
    """Tokens of those sequences."""
    seconds: float
    """The step: planning that was waited for, forward, backward, sync, optimizer."""
    tokens_per_second: float
    """Of the whole job."""
    model_flops_per_second: float
    """FLOP/s of the whole job: what the model needs for the batch, by ``seconds``. Sums of L and of
    L^2 / 2 (causal), backward = 2 x forward, no padding, no recomputation."""
    model_flops_per_second_per_rank: float
    """The same per rank; the log's ``throughput per GPU (TFLOP/s/GPU)``."""
    validation_loss: float | None = None
    """Nats; only on steps that ended with an evaluation."""
    validation_sources: Mapping[str, float] | None = None
    """The same by source of the data, where they are known."""

    @classmethod
    def of_report(
        cls, report: StepReport, *, seconds: float, model_flops: float, num_ranks: int, **more: Any
    ) -> Self:
        """Return the metrics of a step.

        Args:
            report: what it did; its figures are taken over.
            seconds: what it took.
            model_flops: what its batch needs.
            num_ranks: ranks of the job.
            more: the fields that are left.
        """
        return cls(
            **{item.name: getattr(report, item.name) for item in fields(StepFigures)},
            **more,
            consumed_sequences=report.position_after.sequences,
            seconds=seconds,
            tokens_per_second=report.tokens / seconds,
            model_flops_per_second=model_flops / seconds,
            model_flops_per_second_per_rank=model_flops / seconds / num_ranks,
        )

    def validated(self, found: EvaluationLoss) -> Self:
        """Return the metrics with the losses of the evaluation that the step ended with."""
        return replace(
            self, validation_loss=found.loss, validation_sources=dict(found.sources) or None
        )

    def to_json(self) -> bytes:
        """Return the object on one line; NaN and infinity are null and named in ``non_finite``."""
        record = asdict(self)
        non_finite = [key for key, value in self.scalars().items() if not math.isfinite(value)]
        if non_finite:
            record["non_finite"] = non_finite
        return orjson.dumps(record)


class MetricsLogger:
    """Writes each step's metrics as soon as it is given them.

    What must be refused is refused at once; nothing is written before the first step has ended.

    Args:
        path: file of one JSON object a line, or None.
        tensorboard_dir: folder of TensorBoard events, or None.
        first_step: step that runs next; of a file that exists, the steps before it are kept.
    """

    def __init__(
        self, path: Path | None, tensorboard_dir: Path | None = None, *, first_step: int = 1
    ) -> None:
        self._path = path
        self._earlier_lines = b"" if path is None else _steps_before(first_step, path)
        self._new_writer = (
            None if tensorboard_dir is None else _tensorboard_writer(tensorboard_dir, first_step)
        )
        self._file: IO[bytes] | None = None
        self._latest = 0, 0  # where the latest line begins, and how long it may be
        self._writer: Any = None

    def write(self, metrics: StepMetrics, *, to_validate: Sequence[str] | None = None) -> None:
        """Append one step and flush it.

        Args:
            metrics: of the step.
            to_validate: sources of the evaluation whose losses `complete` will add; None: it will
                not be called.

        Raises:
            ValueError: the file cannot be written; names it.
        """
        if self._file is None and self._path is not None:
            with _writing(self._path):
                self._file = _new_file(self._path, self._earlier_lines)
        if self._writer is None and self._new_writer is not None:
            self._writer = self._new_writer()
        if self._file is not None:
            line = metrics.to_json()
            room = 0 if to_validate is None else _room_for(to_validate)
            self._latest = self._file.seek(0, os.SEEK_END), len(line) + room
            self._put(line)
        self._add_scalars(metrics.tagged(), metrics.step)

    def complete(self, metrics: StepMetrics) -> None:
        """Write the latest step's metrics again, now with its validation loss, in their place."""
        if self._file is not None:
            self._put(metrics.to_json())
        found = {key: v for key, v in metrics.tagged().items() if key.startswith("validation")}
        self._add_scalars(found, metrics.step)

    def _put(self, line: bytes) -> None:
        """Write the latest step's line at its place, in one go, padded to the room that it has."""
        assert self._file is not None and self._path is not None
        begin, room = self._latest
        assert len(line) <= room, (line, room)
        with _writing(self._path):
            self._file.seek(begin)
            self._file.write(line.ljust(room) + b"\n")
            self._file.flush()

    def _add_scalars(self, values: Mapping[str, float], step: int) -> None:
        if self._writer is None:
            return
        for key, value in values.items():
            if key != "step":
                self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the files; what one could not take was said before."""
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
        if self._writer is not None:
            self._writer.close()


def log_line(metrics: StepMetrics, train_iters: int) -> str:
    """Return the line of the log, in Megatron's form with the figures of HDP behind it."""
    parts = [
        f"iteration {metrics.step:8d}/{train_iters:8d}",
        f"consumed samples: {metrics.consumed_sequences:9d}",
        f"elapsed time per iteration (ms): {metrics.seconds * 1000:.1f}",
        f"throughput per GPU (TFLOP/s/GPU): {metrics.model_flops_per_second_per_rank / 1e12:.4g}",
        f"tokens/s: {metrics.tokens_per_second:.0f}",
        f"learning rate: {metrics.learning_rate:.6E}",
        f"lm loss: {metrics.loss:.6E}",
        f"grad norm: {metrics.grad_norm:.3f}",
    ]
    for label, value, form in _hdp_figures(metrics):
        if value is not None:
            parts.append(f"{label}: {value:{form}}")
    if metrics.micro_batches_max is not None:
        parts.append(f"micro-batches: {metrics.micro_batches_min}-{metrics.micro_batches_max}")
    if metrics.sources is not None and len(metrics.sources) > 1:
        parts.append(f"loss (share) by source: {words_by_source(metrics.sources)}")
    if metrics.validation_loss is not None:
        parts.append(f"validation loss: {metrics.validation_loss:.6E}")
    return " " + " | ".join(parts) + " |"


def _hdp_figures(metrics: StepMetrics) -> list[tuple[str, float | None, str]]:
    """Label, value and format of what a step without HDP does not have, or has none of."""
    return [
        ("planned efficiency", metrics.planned_efficiency, ".3f"),
        ("measured efficiency", metrics.measured_efficiency, ".3f"),
        ("idle share mean", metrics.idle_share_mean, ".3f"),
        ("idle share max", metrics.idle_share_max, ".3f"),
        ("ring wait (ms)", _scaled(metrics.ring_wait_s, 1e3), ".1f"),
        ("pipeline wait (ms)", _scaled(metrics.pipeline_wait_s or None, 1e3), ".1f"),
        ("gradient sync (ms)", _scaled(metrics.sync_s, 1e3), ".1f"),
        ("ring traffic (MB)", _scaled(metrics.ring_bytes, 1e-6), ".1f"),
        ("all-to-all (MB)", _scaled(metrics.all_to_all_bytes, 1e-6), ".1f"),
        ("padding (%)", _scaled(metrics.padding_share or None, 100), ".1f"),
        ("offloaded (MB)", _scaled(metrics.offloaded_bytes or None, 1e-6), ".1f"),
        ("host buffers (MB)", _scaled(metrics.host_bytes_max or None, 1e-6), ".1f"),
        ("planning (ms)", metrics.planning_ms, ".2f"),
        ("exposed planning (ms)", metrics.planning_exposed_ms, ".2f"),
        ("skipped documents", metrics.skipped_documents or None, "d"),
        ("slow ranks", metrics.slow_ranks or None, "d"),
        ("planner failures", metrics.planner_failures or None, "d"),
    ]


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _room_for(sources: Sequence[str]) -> int:
    """Return bytes that an evaluation of these sources may add to a line."""
    return _ROOM + sum(_ROOM + len(orjson.dumps(name)) for name in sources)


def _steps_before(first_step: int, path: Path) -> bytes:
    """Return the file without the steps that will be written again and a last line cut short.

    Blank lines go, too, and what a disk that lost power holds instead of text.
    """
    if not path.exists():
        _require_place(path)
        return b""
    if path.is_dir():
        raise ValueError(f"--metrics-path {path}: found a folder, expected the name of a file")
    lines = [line for line in path.read_bytes().split(b"\n") if line.strip(b" \t\r\0")]
    kept = []
    for number, line in enumerate(lines, 1):
        try:
            if orjson.loads(line)["step"] < first_step:
                kept.append(line + b"\n")
        except (orjson.JSONDecodeError, KeyError, TypeError) as error:
            is_half = isinstance(error, orjson.JSONDecodeError) and line.startswith(_BEGINNING)
            if is_half and number == len(lines):
                break
            raise ValueError(
                f"--metrics-path {path}: found lines that are no step's metrics, expected a file "
                "of this program: move it away or give another path"
            ) from None
    return b"".join(kept)


def _require_place(path: Path) -> None:
    """Refuses a path that no file can be made at; makes nothing."""
    folder = path.parent
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        what = "a folder that cannot be written" if folder.is_dir() else "no folder"
        raise ValueError(f"--metrics-path {path}: {folder} is {what}: give another path")


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"--metrics-path {path} cannot be written ({error.strerror}): make room, or give "
            "another path; checkpoints stay as they are"
        ) from error


def _new_file(path: Path, content: bytes) -> IO[bytes]:
    """Replace the file by one of `content` and open that for writing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(content)
    os.replace(temporary, path)
    return path.open("r+b")


def _tensorboard_writer(folder: Path, first_step: int) -> Callable[[], Any]:
    """Return what makes the writer; the writer's folder appears with it."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ValueError(
            f"--tensorboard-dir needs the package tensorboard ({error}): "
            "pip install 'megatron-hdp[tensorboard]'"
        ) from error
    return partial(SummaryWriter, str(folder), purge_step=first_step)
