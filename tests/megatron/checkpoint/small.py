"""A checkpoint of a few small tensors as Megatron and our command write it, without a model."""

import io
import json
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from megatron_hdp.megatron.checkpoint import checksums
from megatron_hdp.megatron.checkpoint.folder import CheckpointFolder


def save_small(
    path: Path, iteration: int, *, with_checksums: bool = True, common_file: bool = True
) -> Path:
    """Saves it into the folder at `path`; returns its place.

    Without `common_file` what all ranks hold alike lies among the tensors, as from 0.19 on.
    """
    folder = CheckpointFolder(path)
    partial = folder.begin(iteration)
    tensors: dict[str, object]
    tensors = {name: torch.arange(64.0) + iteration for name in ("weight", "bias")}
    common = {"iteration": iteration}
    if not common_file:
        tensors["common_state/shard_0_1"] = held = io.BytesIO()
        torch.save([common], held)
    dcp.save(tensors, storage_writer=dcp.FileSystemWriter(partial), no_dist=True)
    if common_file:
        torch.save(common, partial / "common.pt")
    (partial / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    if with_checksums:
        checksums.write_and_sum(lambda: None, partial, 0)
        checksums.merge(partial, [checksums.take_part(partial, 0)])
    folder.publish(partial, iteration)
    return folder.find(iteration)


def flip(path: Path, position: int) -> None:
    """Changes one byte of a file; a negative position counts from the end."""
    data = bytearray(path.read_bytes())
    data[position] ^= 0xFF
    path.write_bytes(data)
