"""Checkpoints of a run through megatron-core's dist_checkpointing: when one is loaded, or saved."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch.distributed.checkpoint import CheckpointException

from megatron_hdp.megatron.checkpoint import checksums, reading, write_results
from megatron_hdp.megatron.checkpoint.folder import RELEASE, CheckpointFolder
from megatron_hdp.megatron.checkpoint.run_folder import RunFolder
from megatron_hdp.megatron.checkpoint.staging import SavesInNewProcesses
from megatron_hdp.megatron.checkpoint.state import Progress, TrainingState
from megatron_hdp.megatron.checkpoint.together import (
    on_every_rank,
    on_first_rank,
    require_shared,
)
from megatron_hdp.megatron.finite import named_parameters, non_finite
from megatron_hdp.megatron.options import TrainingArguments
from megatron_hdp.megatron.parallel import compute_device
from megatron_hdp.megatron.releases import own_checkpoint_writer
from megatron_hdp.processes import bound_to_this_process
from megatron_hdp.runtime.gathering import largest

_POLL_S = 0.05


class NotSavedError(ValueError):
    """A checkpoint could not be written; nothing of it is left, and those before it are."""


class Checkpoints:
    """Loads and saves the checkpoints of one run; every rank must make the same calls.

    `arguments` say where to load from and save to, `state` is saved, `say` prints one line.

    Attributes:
        is_owed: whether a save was given up that no later one has made good; on all ranks alike.
    """

    def __init__(
        self, arguments: TrainingArguments, state: TrainingState, say: Callable[[str], None]
    ) -> None:
        self._arguments = arguments
        self._state = state
        self._say = say
        self._folder = None if arguments.save is None else RunFolder(arguments.save, say)
        self._latest = 0  # iteration that was saved or loaded last
        self._under_way = 0  # iteration that is being saved asynchronously
        self._queue = new_queue()
        self.is_owed = False

    def load(self) -> Progress:
        """Takes the folder to save into, then restores the checkpoint that arguments name, if any.

        Raises:
            ValueError: the checkpoint is damaged or this run cannot continue it, or the folder
                cannot be written, belongs to another job or holds another run's checkpoints.
        """
        folder = self._folder
        if folder is not None:
            on_first_rank(folder.take)
        has_base = self._load_base()
        source, weights_only = self._source(has_base)
        if folder is not None:
            continued = None if weights_only else source
            if line := on_first_rank(partial(folder.begin_at, continued)):
                self._say(line)
        if source is None:
            return Progress()
        progress = self._load_from(source, weights_only)
        if folder is not None:
            on_first_rank(partial(folder.take_along, source))
        return progress

    def leave(self) -> None:
        """Leaves an epoch of the job: ends this rank's writer, if there is one.

        Communicates nothing. What the others of its save still write nobody looks at.
        """
        for call in self._queue.async_calls:
            if (writer := call.async_caller.process) is not None:
                writer.kill()  # and so what it has started, which is bound to it
                writer.join()
        self._queue = new_queue()  # saves are counted anew, as those who join count them

    def enter(self, progress: Progress) -> None:
        """Continues in another epoch of the job; what was being saved is owed.

        The first rank takes the folder over from the one before, which may be dead.

        Raises:
            ValueError: the folder cannot be written, or belongs to another job.
        """
        if self._folder is None:
            return
        folder = self._folder

        def take_over() -> int:
            folder.discard()
            folder.take_over(progress.iteration)
            return folder.latest()

        self._latest = on_first_rank(take_over)
        (given_up,) = largest([self._under_way], compute_device())
        self.is_owed = given_up > self._latest

    def save(self, progress: Progress) -> None:
        """Saves, unless this very state is saved already; asynchronously with ``--async-save``.

        What is being saved asynchronously is finished first.

        Raises:
            ValueError: a weight is not finite, the folder cannot be written, belongs to another job
                by now or holds another run's checkpoint of it, or ranks do not share it.
        """
        if self._folder is None or progress.iteration == self._latest:
            return
        self.wait()
        folder, iteration = self._folder, progress.iteration
        self._require_finite(iteration)
        with self._whole_or_nothing():
            written = on_first_rank(partial(folder.begin, iteration))
            require_shared(written, "--save")
            request = self._request(progress, written)
            request.add_finalize_fn(partial(self._publish, folder, written, iteration))
            self._latest = iteration
            self.is_owed = False
            # a writer waits until its rank has heard of its end; if that was killed, for ever
            with bound_to_this_process():
                if self._arguments.async_save:
                    self._under_way = iteration
                    self._queue.schedule_async_request(request)
                else:
                    request.execute_sync()

    def poll(self) -> None:
        """Makes an asynchronously saved checkpoint visible once every rank has written its part.

        Raises:
            NotSavedError: it could not be written; nothing of it is left.
        """
        with self._whole_or_nothing():
            self._queue.maybe_finalize_async_calls()

    def wait(self) -> None:
        """Returns when nothing is being saved any more."""
        while self._queue.get_num_unfinalized_calls():
            self.poll()  # an all-reduce each time, so no rank waits for another one's disk in one
            time.sleep(_POLL_S)

    def finish(self) -> None:
        """`wait`, then ends the helpers of asynchronous saving."""
        self.wait()
        self._queue.close()

    def close(self) -> None:
        """Gives the folder up, however the run has ended; what is not saved by now never will be.

        Communicates nothing, and does nothing a second time.
        """
        if self._folder is not None:
            self._folder.give_up()

    def _require_finite(self, iteration: int) -> None:
        parts = [chunk.module for chunk in self._state.chunks]
        if found := non_finite(named_parameters(parts)):
            raise ValueError(
                f"the weights after iteration {iteration} are not finite, first "
                f"{', '.join(found)}, expected finite numbers. Nothing is saved: resume from the "
                "last checkpoint with a lower --lr"
            )

    def _load_base(self) -> bool:
        """Loads what adapters are trained beside; whether this run has some.

        Raises:
            ValueError: there is no such checkpoint.
        """
        arguments = self._arguments
        if arguments.lora_rank is None:
            return False
        path = arguments.pretrained_checkpoint
        if path is None and not (arguments.save or arguments.load):
            return True  # beside weights that were drawn, to try it
        source = None if path is None else on_first_rank(partial(self._find, path))
        if source is None:
            raise ValueError(
                f"--lora-rank: found {'no --pretrained-checkpoint' if path is None else path}"
                f"{'' if path is None else ' without a checkpoint'}, expected the weights that "
                "adapters are trained beside: checkpoints hold adapters alone"
            )
        if arguments.finetune:
            raise ValueError(
                "--finetune: found it beside --lora-rank, expected one of them: adapters begin at "
                "zero, or --load resumes them; leave it out"
            )
        self._load_from(source, True)
        return True

    def _source(self, has_base: bool) -> tuple[Path | None, bool]:
        """The checkpoint to load, and whether to take its weights alone."""
        arguments = self._arguments
        for path, weights_only in (
            (arguments.load, arguments.finetune),
            (arguments.pretrained_checkpoint, True),
        ):
            if path is None or (weights_only and has_base):
                continue
            found = on_first_rank(partial(self._find, path))
            if found is not None:
                is_whole = weights_only or found.name == RELEASE
                return found, is_whole and not has_base  # which `resume` refuses
            self._say(f"no checkpoint in {path} yet")
        return None, False

    def _find(self, path: Path) -> Path | None:
        folder, iteration = CheckpointFolder(path), self._arguments.ckpt_step
        if iteration is not None and path == self._arguments.load:
            return folder.find(iteration)
        return folder.newest()

    def _load_from(self, source: Path, weights_only: bool) -> Progress:
        require_shared(source, "--load")
        reading.require_sound(source, contents=self._arguments.checkpoint_checksums, say=self._say)
        if weights_only:
            self._state.load_weights(source)
            progress = Progress()
        else:
            progress = self._state.resume(source)
            if self._folder is not None and self._folder.holds(source):
                self._latest = progress.iteration
        what = f"the weights of {source}" if weights_only else f"{source}: {progress}"
        self._say(f"loaded {what}")
        return progress

    def _request(self, progress: Progress, written: Path) -> Any:
        """What Megatron will do to write this rank's part into a folder."""
        strategy = FullyParallelSaveStrategyWrapper(
            TorchDistSaveShardedStrategy("torch_dist", 1),
            parallel_state.get_data_parallel_group(with_context_parallel=True),
        )
        with write_results.through_a_file():
            request = dist_checkpointing.save(
                self._state.content(progress),
                str(written),
                strategy,
                async_sharded_save=True,
                **own_checkpoint_writer(),
            )
        if request.async_fn is None or not self._arguments.checkpoint_checksums:
            return request
        write = partial(checksums.write_and_sum, request.async_fn, written, dist.get_rank())
        return request._replace(async_fn=write)

    def _publish(self, folder: RunFolder, written: Path, iteration: int) -> None:
        """Called on every rank when all parts are on the disk."""
        if self._arguments.checkpoint_checksums:
            take = partial(checksums.take_part, written, dist.get_rank())
            on_every_rank(take, partial(checksums.merge, written))
        on_first_rank(partial(folder.publish, written, iteration))
        self._under_way = 0
        self._say(f"saved checkpoint of iteration {iteration} to {folder.path}")

    @contextmanager
    def _whole_or_nothing(self) -> Iterator[None]:
        """Removes what was being saved if the block fails; a writer's error is every rank's."""
        try:
            yield
        except BaseException as error:
            try:
                if isinstance(error, CheckpointException):
                    reason = on_first_rank(partial(self._reason_of, error))
                    raise self._not_saved(reason) from error
                if isinstance(error, OSError):  # of this rank alone: the others hear of its end
                    raise self._not_saved(str(error)) from error
                raise
            finally:
                if self._folder is not None and dist.get_rank() == 0:
                    self._folder.discard()

    def _not_saved(self, reason: str) -> NotSavedError:
        return NotSavedError(
            f"the checkpoint of iteration {self._latest} could not be saved: {reason}: nothing of "
            "it is left, those before it are as they were: make room in the folder of --save, or "
            "give another one"
        )

    def _reason_of(self, error: CheckpointException) -> str:
        """What a rank's writer met; known on the first rank."""
        assert self._folder is not None
        failures = [f"rank {rank}: {failure}" for rank, (failure, _) in error.failures.items()]
        free = shutil.disk_usage(self._folder.path).free
        reason = " ".join(failures[0].split()) if failures else "a writer failed"
        return f"{reason} ({free:,} bytes were free)"


def new_queue() -> AsyncCallsQueue:
    """A queue of saves that are written beside training, each by a process of its own."""
    # Megatron's own writer for a save forks this process, which suits the CPU alone.
    return AsyncCallsQueue() if compute_device().type == "cpu" else SavesInNewProcesses()
