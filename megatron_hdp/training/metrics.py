"""Writes the figures of each step: a JSON object in a file, a line in the log, TensorBoard scalars.

A file continues across a restart: lines of steps that will run again are dropped, so it never holds
a step twice. A step whose evaluation comes later is written at once like all others, with room
for the losses of the evaluation, so that its line can be completed in place.
"""

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import MISSING, asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import IO, Any, Self

import orjson

from megatron_hdp.files import write_atomically
from megatron_hdp.megatron.step import EvaluationLoss, StepFigures, StepReport, figure

_BEGINNING = b'{"'  # of a step's line
_ROOM = 64  # bytes: a validation loss instead of null, or its name among those not finite


@dataclass(frozen=True, kw_only=True)
class StepMetrics(StepFigures):
    """One step as it is logged: its figures, its duration, what the optimizer did with it."""

    step: int
    """Number of the step, from 1."""
    consumed_sequences: int = figure("consumed samples", "9d", default=MISSING)
    """Sequences since the start of training, this step's included."""
    consumed_tokens: int
    """Tokens of those sequences."""
    seconds: float = figure("elapsed time per iteration (ms)", ".1f", scale=1000, default=MISSING)
    """Seconds of the step: the wait for its data, forward, backward, sync, optimizer."""
    model_flops_per_second: float
    """FLOP/s of the whole job: operations that the model needs for the batch, by ``seconds``. Sums
    of L and of L^2 / 2 (causal), backward = 2 x forward, no padding, no recomputation; pictures
    are encoded once."""
    model_flops_per_second_per_rank: float = figure(
        "throughput per GPU (TFLOP/s/GPU)", ".4g", scale=1e-12, default=MISSING
    )
    """The same per rank."""
    tokens_per_second: float = figure("tokens/s", ".0f", default=MISSING)
    """Tokens per second of the whole job."""
    learning_rate: float = figure("learning rate", ".6E", default=MISSING)
    """Learning rate that the optimizer used."""
    grad_norm: float = figure("grad norm", default=MISSING)
    """Norm of the gradient before clipping."""
    validation_loss: float | None = figure("validation loss", ".6E")
    """Nats; only on steps that ended with an evaluation."""
    validation_sources: Mapping[str, float] | None = None
    """The same by source of the data, where they are known."""
    validation_reward_margin: float | None = figure("validation margin", ".4f")
    """``reward_margin`` over the pairs of the evaluation; None without ``--hdp-objective``."""
    validation_reward_accuracy: float | None = figure("validation accuracy")
    """``reward_accuracy`` over them; None under ``kto``, too."""

    @classmethod
    def of_report(
        cls, report: StepReport, *, seconds: float, model_flops: float, num_ranks: int, **more: Any
    ) -> Self:
        """Return the metrics of a step; `more` are the fields that are left."""
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
            self,
            validation_loss=found.loss,
            validation_sources=dict(found.sources) or None,
            validation_reward_margin=found.reward_margin,
            validation_reward_accuracy=found.reward_accuracy,
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
        """Append one step and flush it; `complete` will add losses of the sources `to_validate`.

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
    """Return the line of the log, in Megatron's form followed by the figures of HDP."""
    parts = [
        f"iteration {metrics.step:8d}/{train_iters:8d}",
        *metrics.log_parts(StepMetrics),
        *metrics.log_parts(StepFigures),
    ]
    return " " + " | ".join(parts) + " |"


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
    if not path.is_file():
        what = "a folder" if path.is_dir() else "a device or a pipe"
        raise ValueError(f"--metrics-path {path}: found {what}, expected the name of a file")
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
                f"--metrics-path {path}: found lines that are not metrics of a step, expected a "
                "file that this program wrote: move it away or give another path"
            ) from None
    return b"".join(kept)


def _require_place(path: Path) -> None:
    """Refuses a path that no file can be made at; makes nothing."""
    folder = path.parent
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        what = "a folder without write permission" if folder.is_dir() else "not a folder"
        raise ValueError(f"--metrics-path {path}: found that {folder} is {what}: give another path")


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
    write_atomically(path, content, durable=False)
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
