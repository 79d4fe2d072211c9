"""The weights of a model alone: as checkpoints hold them, and out of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer.module import Float16Module
from megatron.core.utils import unwrap_model

from megatron_hdp.megatron.adapters import is_adapter, is_of_encoder, require_same_adapters
from megatron_hdp.megatron.checkpoint import reading
from megatron_hdp.megatron.checkpoint.folder import CheckpointFolder
from megatron_hdp.megatron.checkpoint.together import on_first_rank, require_shared

OURS = "megatron_hdp"
"""The entry of a checkpoint that is not Megatron's."""
ADAPTERS = "adapters"
"""Where that says which adapters it holds; None or nothing: a whole model's weights."""
IN_ARGUMENTS = "hdp_adapters"
"""Where arguments of a Megatron-LM checkout, which its checkpoints hold, say the same."""
_WRAPPERS = (DistributedDataParallel, Float16Module)


def saved_adapters(common: dict[str, Any]) -> dict[str, Any] | None:
    """Which adapters a checkpoint holds, by what its ranks hold alike; None: a whole model."""
    found: dict[str, Any] | None = common.get(OURS, {}).get(ADAPTERS)
    return getattr(common.get("args"), IN_ARGUMENTS, None) if found is None else found


def layout_metadata() -> dict[str, Any]:
    """How Megatron lays a checkpoint out: by parameter, so that any other layout can load it."""
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }


def sharded_weights(
    chunks: Sequence[DistributedDataParallel],
    *,
    of_adapters: bool = False,
    of_encoder: bool = True,
) -> dict[str, Any]:
    """Those of each part, by a name that only this rank uses: in the files layers count on.

    Of a model with adapters either these or all the others, with those of its encoder or without.
    """

    def is_wanted(name: str) -> bool:
        return is_adapter(name) == of_adapters and (of_encoder or not is_of_encoder(name))

    weights = {}
    for key, chunk in _by_key(chunks):
        found = chunk.module.sharded_state_dict(metadata=layout_metadata())
        weights[key] = {name: one for name, one in found.items() if is_wanted(name)}
    return weights


def put_weights(
    chunks: Sequence[DistributedDataParallel],
    content: dict[str, Any],
    *,
    of_adapters: bool = False,
    of_encoder: bool = True,
) -> None:
    """Gives a rank's parts of the model what was read for `sharded_weights`.

    Those of an encoder may be missing unless `of_encoder`.

    Raises:
        RuntimeError: a weight is missing or not known.
    """
    for key, chunk in _by_key(chunks):
        # of a part without parameters nothing was read; in any other they would be missing
        model = unwrap_model(chunk, _WRAPPERS)  # in 16 bits a wrapper says nothing of keys
        found = model.load_state_dict(content.get(key, {}), strict=False)
        missing = [
            name
            for name in found.missing_keys
            if is_adapter(name) == of_adapters and (of_encoder or not is_of_encoder(name))
        ]
        if missing or found.unexpected_keys:
            raise RuntimeError(f"missing {missing}, unexpected {found.unexpected_keys}")


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
    saved = saved_adapters(reading.read_common(source))
    of_adapters = saved is not None
    if of_adapters and not has_adapters(chunks):
        require_same_adapters(None, saved, source)
    read_weights(chunks, source, of_adapters=of_adapters)
    say(f"loaded the weights of {source}")


def read_weights(
    chunks: Sequence[DistributedDataParallel], source: Path, *, of_adapters: bool = False
) -> None:
    """Gives a rank's parts of the model the weights of a checkpoint, of an encoder if it has one.

    Every rank must call this; see `sharded_weights`.

    Raises:
        ValueError: the checkpoint is damaged, or of another model.
    """
    of_encoder = reading.holds_encoder(source)
    weights = sharded_weights(chunks, of_adapters=of_adapters, of_encoder=of_encoder)
    content = reading.read(weights, source)
    put_weights(chunks, content, of_adapters=of_adapters, of_encoder=of_encoder)


def has_adapters(chunks: Sequence[DistributedDataParallel]) -> bool:
    """Whether this rank's parts of a model have some."""
    return any(is_adapter(name) for chunk in chunks for name, _ in chunk.named_parameters())


def _by_key(
    chunks: Sequence[DistributedDataParallel],
) -> Iterator[tuple[str, DistributedDataParallel]]:
    """The parts by Megatron's keys."""
    for number, chunk in enumerate(chunks):
        yield "model" if len(chunks) == 1 else f"model{number}", chunk
