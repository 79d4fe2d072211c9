"""The weights of a model alone: as checkpoints hold them, and out of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel

from megatron_hdp.megatron.checkpoint import reading
from megatron_hdp.megatron.checkpoint.folder import CheckpointFolder
from megatron_hdp.megatron.checkpoint.together import on_first_rank, require_shared


def layout_metadata() -> dict[str, Any]:
    """How Megatron lays a checkpoint out: by parameter, so that any other layout can load it."""
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }


def sharded_weights(chunks: Sequence[DistributedDataParallel]) -> dict[str, Any]:
    """Those of each part, by a name that only this rank uses: in the files layers count on."""
    weights = {}
    for key, chunk in _by_key(chunks):
        weights[key] = dict(chunk.module.sharded_state_dict(metadata=layout_metadata()))
    return weights


def put_weights(chunks: Sequence[DistributedDataParallel], content: dict[str, Any]) -> None:
    """Gives a rank's parts of the model what was read for `sharded_weights`."""
    for key, chunk in _by_key(chunks):
        # of a part without parameters nothing was read; in any other they would be missing
        chunk.module.load_state_dict(content.get(key, {}))


def load_weights(
    chunks: Sequence[DistributedDataParallel],
    path: Path,
    *,
    checksums: bool,
    say: Callable[[str], None],
) -> None:
    """Loads the weights of the latest checkpoint in a folder, of runs or of a release.

    Every rank must call this. With `checksums` files are read to be checked; `say` prints a line.

    Raises:
        ValueError: there is none, it is damaged, or it is of another model.
    """
    source = on_first_rank(CheckpointFolder(path).newest)
    if source is None:
        raise ValueError(
            f"{path} holds no checkpoint, expected one: name the folder that --save or "
            "`megatron-hdp convert --to` was given"
        )
    require_shared(source, "the session")
    reading.require_sound(source, contents=checksums, say=say)
    put_weights(chunks, reading.read(sharded_weights(chunks), source))
    say(f"loaded the weights of {source}")


def _by_key(
    chunks: Sequence[DistributedDataParallel],
) -> Iterator[tuple[str, DistributedDataParallel]]:
    """The parts by Megatron's keys."""
    for number, chunk in enumerate(chunks):
        yield "model" if len(chunks) == 1 else f"model{number}", chunk
