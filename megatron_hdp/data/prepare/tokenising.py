"""Files to one pair: the shards are run, here or by workers, and put together in their order."""

import os
import shutil
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress

from megatron_hdp.data import media, sides
from megatron_hdp.data.prepare.decoding import Decoding
from megatron_hdp.data.prepare.shard_run import Tell, run_shard
from megatron_hdp.data.prepare.shards import Counts, Shard, cut, shard_bytes_for
from megatron_hdp.data.prepare.workers import Task, run_by_workers
from megatron_hdp.data.spans import concatenate_spans
from megatron_hdp.data.sums import SUFFIX, write_sums
from megatron_hdp.data.token_writer import concatenate_pairs, move_pair

_ON_A_TERMINAL_S, _IN_A_LOG_S = 0.2, 10.0


def write_pair(
    files: Sequence[str], prefix: str, decoding: Decoding, *, lines: bool, workers: int, name: str
) -> Counts:
    """Write the documents of files, in order, as one pair: all of it or nothing.

    What is no table by its name holds JSON lines if `lines` says so. This process does all of it
    if `workers` is 1 or there is little to do.

    Returns:
        What became of the documents; where none has a token, nothing is written.

    Raises:
        ValueError, OSError, ImportError: as of `run_by_workers`.
    """
    total = sum(map(os.path.getsize, files))
    shard_bytes = shard_bytes_for(total) if workers > 1 else max(total, 1)
    shards = cut(files, decoding.key, lines=lines, shard_bytes=shard_bytes)
    folder = f"{prefix}.tmp{os.getpid()}"
    counts = Counts()
    try:
        os.makedirs(folder)
        tasks = [(shard, os.path.join(folder, f"{shard.index:06d}")) for shard in shards]
        with progress_bar(name, total) as tell:
            several = workers > 1 and len(tasks) > 1
            with closing(run_tasks(decoding, tasks, workers if several else 0, tell)) as results:
                found = sorted(results, key=lambda result: result[0].index)
            for _, one in found:
                counts.add(one)
        if counts.documents:
            join(decoding, [one for _, one in tasks], prefix)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return counts


def run_tasks(
    decoding: Decoding, tasks: Sequence[Task], workers: int, tell: Tell
) -> Generator[tuple[Shard, Counts], None, None]:
    """Run shards and yield each with its counts once it is finished; 0 workers: in this process.

    Raises:
        ValueError, OSError, ImportError: as of `run_by_workers`.
    """
    if workers == 0:
        for shard, prefix in tasks:
            yield shard, run_shard(decoding, shard, prefix, tell)
    elif tasks:
        yield from run_by_workers(decoding, min(workers, len(tasks)), tasks, tell)


def join(decoding: Decoding, prefixes: Sequence[str], target: str) -> None:
    """Put finished shards together, in their order, as one pair with its sums.

    Raises:
        OSError: the disk is full, for one.
    """
    with suppress(FileNotFoundError):
        os.remove(target + SUFFIX)  # of an older pair
    if decoding.key is None:
        spans = [prefix + ".spans" for prefix in prefixes]
        concatenate_spans(spans, target + ".spans", durable=decoding.durable)
    if decoding.sides is not None:
        sides.concatenate_sides(prefixes, target + sides.SUFFIX, durable=decoding.durable)
    if decoding.media is not None:
        media.concatenate_items(prefixes, target, durable=decoding.durable)
    if len(prefixes) == 1:
        move_pair(prefixes[0], target)
    else:
        concatenate_pairs(prefixes, target, durable=decoding.durable)
    write_sums(target, durable=decoding.durable)


@contextmanager
def progress_bar(name: str, total: int, *, done: int = 0, delay_s: float = 0.0) -> Iterator[Tell]:
    """Show a bar over bytes on standard error; yields what is told how many more were read."""
    from tqdm import tqdm

    interval = _ON_A_TERMINAL_S if sys.stderr.isatty() else _IN_A_LOG_S
    how = {"unit": "B", "unit_scale": True, "mininterval": interval, "delay": delay_s}
    with tqdm(total=total, initial=done, desc=name, **how) as bar:
        yield bar.update
