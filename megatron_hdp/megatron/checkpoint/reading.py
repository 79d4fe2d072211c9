"""Reads a checkpoint through Megatron: a damaged or unfit checkpoint becomes one sentence.

Its files are checked before anything of them is unpickled. The storage is shared, so each file is
read by one rank for that; Megatron then has each rank read the parts that it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from torch.distributed.checkpoint import CheckpointException

from megatron_hdp.megatron.adapters import is_of_encoder
from megatron_hdp.megatron.checkpoint import unpickling
from megatron_hdp.megatron.checkpoint.folder import CheckpointFolder
from megatron_hdp.megatron.checkpoint.together import on_every_rank, on_first_rank
from megatron_hdp.megatron.checkpoint.verification import inventory, share_of
from megatron_hdp.runtime.health import is_communication_error


def require_sound(source: Path, *, contents: bool, say: Callable[[str], None]) -> None:
    """Refuses a checkpoint that is not what was saved; every rank must call this.

    Without `contents` only names, sizes and small files count, no tensor is read.

    Raises:
        ValueError: the same on every rank; names file, found, expected and remedy.
    """

    def contents_of_this_rank() -> tuple[bool, list[str]]:
        files = inventory(source)
        mine = share_of(files.sizes, dist.get_rank(), dist.get_world_size())
        return files.has_checksums, [fault for fault in map(files.fault_of, mine) if fault]

    def of_all(outcomes: list[tuple[bool, list[str]]]) -> tuple[bool, list[str]]:
        return outcomes[0][0], [fault for _, faults in outcomes for fault in faults]

    try:
        found = on_first_rank(lambda: inventory(source).outer_faults())
        if contents and not found:
            has_checksums, found = on_every_rank(contents_of_this_rank, of_all)
    except ValueError as error:
        raise ValueError(f"{error}. {_remedy(source)}") from None
    if found:
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise ValueError(f"{found[0]}{more}. {_remedy(source)}")
    if contents and not has_checksums:
        say(f"{source} was saved without checksums: only its structure is checked")


def read_common(source: Path) -> dict[str, Any]:
    """What all ranks hold alike.

    Raises:
        ValueError: it is damaged.
    """
    with _explained(source):
        return dict(dist_checkpointing.load_common_state_dict(str(source)))


def read(content: dict[str, Any], source: Path) -> dict[str, Any]:
    """What `content` describes, as Megatron wants it; every rank must call this.

    Raises:
        ValueError: the checkpoint is damaged, or of another model.
    """
    with _explained(source):
        return dict(dist_checkpointing.load(content, str(source)))


def holds_encoder(source: Path) -> bool:
    """Whether weights of an encoder are among a checkpoint's; every rank must call this.

    Raises:
        ValueError: it is damaged; the same on every rank.
    """

    def is_found() -> bool:
        with _explained(source):
            names = dist_checkpointing.load_tensors_metadata(str(source))
            return any(map(is_of_encoder, names))

    return on_first_rank(is_found)


@contextmanager
def _explained(source: Path) -> Iterator[None]:
    """Turns whatever reading a checkpoint raises into the user's error.

    What damaged files raise has no common type. Megatron's readers exchange their errors, so that
    every rank comes here.
    """
    try:
        with unpickling.as_data():
            yield
    except CheckpointException as error:
        reasons = [failure for failure, _ in error.failures.values()]
        if misfits := [one for one in reasons if isinstance(one, CheckpointingException)]:
            raise ValueError(
                f"{source} does not fit this model: give the flags of the saved one: {misfits[0]}"
            ) from error
        raise _unreadable(source, reasons[0] if reasons else error) from error
    except Exception as error:
        if is_communication_error(error):
            raise
        raise _unreadable(source, error) from error


def _unreadable(source: Path, error: BaseException) -> ValueError:
    if foreign := unpickling.foreign_class(error, source):
        return foreign
    reason = " ".join(str(error).split())[:300]
    return ValueError(
        f"{source}: found unreadable content ({type(error).__name__}: {reason}), expected a "
        f"checkpoint as it was saved. {_remedy(source)}"
    )


def _remedy(source: Path) -> str:
    folder = CheckpointFolder(source.parent)
    iteration = CheckpointFolder.iteration_of(source)
    before = [one for one in folder.iterations() if one < iteration]
    go_back = (
        f"add --ckpt-step {before[-1]} to resume from the checkpoint before it"
        if before
        else "there is no older checkpoint to resume from"
    )
    return f"The checkpoint is damaged: {go_back}; `megatron-hdp verify {folder.path}` checks all"
