"""Whether a checkpoint is what was saved: no file is missing, added, shorter, longer or changed.

One with checksums is compared with them; of an older one, `structure` tells what can be told. It
also refuses lists of tensors that would run code, whatever their checksums.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from megatron_hdp.megatron.checkpoint.checksums import SUMS, FileSum, Inventory, read_sums
from megatron_hdp.megatron.checkpoint.named_classes import fault_of_list

_THREADS = 8


class SummedFiles(Inventory):
    """A checkpoint with checksums."""

    has_checksums, lists = True, (SUMS,)

    def __init__(self, folder: Path, sums: dict[str, FileSum]) -> None:
        super().__init__(folder, {name: one.num_bytes for name, one in sums.items()})
        self._sums = sums

    def fault_of(self, name: str) -> str | None:
        """Whether the file is the one that was summed."""
        path, expected = self._folder / name, self._sums[name]
        try:
            found = FileSum.of_file(path)
        except OSError as error:
            return f"{path}: found {error.strerror}, expected {expected.num_bytes:,} bytes"
        if found == expected:
            return None
        return f"{path}: found the XXH3 {found.xxh3}, expected {expected.xxh3}"


def inventory(folder: Path) -> Inventory:
    """What is known of the files of a checkpoint; a ValueError: its list of sums is damaged."""
    sums = read_sums(folder)
    if sums is not None:
        return SummedFiles(folder, sums)
    from megatron_hdp.megatron.checkpoint.structure import Structure  # needs torch

    return Structure(folder)


@dataclass(frozen=True)
class Verdict:
    """What was found of one checkpoint."""

    iteration: int
    num_bytes: int
    has_checksums: bool
    faults: tuple[str, ...]
    """Why it cannot be loaded; nothing of a good one."""
    added_files: tuple[str, ...]
    """Names of files that were not saved with it; they harm nothing."""

    @property
    def is_good(self) -> bool:
        """Whether it can be loaded, as far as its files tell."""
        return not self.faults


def verify(place: Path, iteration: int) -> Verdict:
    """Reads the whole checkpoint in a folder."""
    num_bytes = sum(path.stat().st_size for path in place.iterdir() if path.is_file())
    try:
        files = inventory(place)
    except ValueError as error:
        return Verdict(iteration, num_bytes, True, (str(error),), ())
    faults = files.outer_faults()
    if not faults:
        with ThreadPoolExecutor(_THREADS) as pool:
            faults = [fault for fault in pool.map(files.fault_of, files.sizes) if fault]
    if not faults and files.has_checksums:  # which whoever can write the folder can write, too
        faults = list(filter(None, [fault_of_list(place)]))
    added = tuple(files.added_files())
    return Verdict(iteration, num_bytes, files.has_checksums, tuple(faults), added)


def share_of(sizes: dict[str, int], rank: int, num_ranks: int) -> list[str]:
    """The files that a rank checks: each file is one rank's, and all have about equally much."""
    return sorted(sizes, key=lambda name: (-sizes[name], name))[rank::num_ranks]
