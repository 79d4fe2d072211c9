"""What drawing a step's sequences costs, and what tables of sequences take of a node.

``python scripts/benchmarks/bench_data.py`` draws steps of epochs of growing length, every time
another epoch, and prints medians and private memory (USS) that the order added; then whole steps of
`Mixture`, lengths gathered, of one source and of many. numpy's permutation, which keeps a table of
the epoch, is measured up to ``--table-up-to`` rows, once.

``python scripts/benchmarks/bench_data.py --tables 1000000 50000000`` makes up a ``.idx`` of so many
documents (log-normal lengths, 20 bytes each on disk; the ``.bin`` is a hole), and lets processes of
their own build the table in a cache, then two ranks at once open it and draw. Beside them, up to
``--beside-up-to`` documents: the table in memory of the process, and Megatron-Core's blend of one
`GPTDataset` with its own caches. ``--sparse N`` opens and draws from a cache of N rows whose
lengths were written and whose places are a hole.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from megatron_hdp.data.mixture import BatchSize, Mixture, Position, Schedule
from megatron_hdp.data.mixture.draw import MixedSource
from megatron_hdp.data.mixture.stream import SourceStream
from megatron_hdp.data.shuffles import Feistel
from megatron_hdp.data.tables import SequenceTable, TableFacts, open_source
from megatron_hdp.data.tables.cache_file import TableOrigin, TableWriter, read_table

_MB = 1e6
_MAX_LENGTH = 8192
_PIECE = 1 << 22
_RANKS = 2
_SOURCES = (4, 20, 100)
_ROWS_OF_MANY = 200_000


def main() -> None:
    """Measures and prints tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--rows",
        type=int,
        nargs="+",
        default=[1_000_000, 50_000_000, 200_000_000, 1_000_000_000],
        help="of an epoch (default: 1M 50M 200M 1G)",
    )
    for name, default, what in (
        ("draws", 60_000, "of a step"),
        ("rounds", 51, "of measuring"),
        ("table-up-to", 50_000_000, "rows, of 16 bytes each"),
        ("step-rows", 50_000_000, "of a whole step"),
        ("beside-up-to", 50_000_000, "documents"),
    ):
        about = f"{what} (default: {default:,})"
        parser.add_argument(f"--{name}", type=int, default=default, help=about)
    parser.add_argument("--tables", type=int, nargs="+", metavar="N", help="documents, see above")
    parser.add_argument("--sparse", type=int, metavar="N", help="rows of a cache with a hole")
    parser.add_argument("--folder", type=Path, help="for files (default: a temporary one)")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        _work(**json.loads(options.worker))
    elif options.tables or options.sparse:
        _tables(options)
    else:
        _orders(options)


def _orders(options: argparse.Namespace) -> None:
    print(f"{options.draws:,} draws, median of {options.rounds} epochs (private MB added)")
    print(f"{'rows':>15} {'version 2':>20} {'numpy, once':>20}")
    for num_rows in options.rows:
        count = min(options.draws, num_rows)
        cells = [_draws(num_rows, count, options.rounds)]
        if num_rows <= options.table_up_to:
            cells.append(_numpys(num_rows))
        print(f"{num_rows:15,} " + " ".join(f"{cell:>20}" for cell in cells), flush=True)
    print(_whole_steps(options.step_rows, options.draws, options.rounds))
    for num_sources in _SOURCES:
        rows = min(options.step_rows, _ROWS_OF_MANY)
        print(_steps_of_many(num_sources, rows, options.draws, options.rounds), flush=True)


def _draws(num_rows: int, count: int, rounds: int) -> str:
    before, order = _private(), Feistel(num_rows, seed=1)
    first = (num_rows - count) // 2
    ms = [1e3 * _timed(lambda epoch=i: order.rows(epoch, first, count))[0] for i in range(rounds)]
    return f"{statistics.median(ms):.2f} ms ({(_private() - before) / _MB:.1f})"


def _numpys(num_rows: int) -> str:
    before = _private()
    seconds, kept = _timed(lambda: np.random.default_rng(1).permutation(num_rows))
    added = _private() - before
    del kept
    return f"{seconds * 1e3:,.0f} ms ({added / _MB:,.0f})"


def _whole_steps(num_rows: int, count: int, rounds: int) -> str:
    lengths = np.random.default_rng(1).integers(1, _MAX_LENGTH, num_rows)
    table = SequenceTable.build(lengths, max_length=_MAX_LENGTH)
    sizes = {"sequences": count, "tokens": count * int(table.mean_length)}
    cells = []
    for unit, size in sizes.items():
        one = _mixture([table], BatchSize(**{unit: size}))
        starts = [i * num_rows // rounds for i in range(rounds)]
        ms = [1e3 * _timed(lambda at=at, it=one: it.step(_position(at)))[0] for at in starts]
        cells.append(f"{statistics.median(ms):.1f} ms by {unit}")
    return f"a step of about {count:,} sequences of {num_rows:,}: {', '.join(cells)}"


def _steps_of_many(num_sources: int, num_rows: int, count: int, rounds: int) -> str:
    """Says what steps cost that follow each other: what each source is owed differs then."""
    draw = np.random.default_rng(num_sources)
    tables = [
        SequenceTable.build(draw.integers(1, _MAX_LENGTH, num_rows), max_length=_MAX_LENGTH)
        for _ in range(num_sources)
    ]
    mixture, position, ms = _mixture(tables, BatchSize(sequences=count)), Position(), []
    for _ in range(rounds):
        seconds, step = _timed(lambda at=position: mixture.step(at))
        position = step.after
        ms.append(1e3 * seconds)
    return f"of {num_sources} sources of {num_rows:,}: {statistics.median(ms):.1f} ms"


def _tables(options: argparse.Namespace) -> None:
    """Measures every way at every number of documents, each in processes of its own."""
    print(
        f"{'documents':>13} {'':>8} {'build s':>8} {'peak MB':>8} {'open ms':>8} {'1st ms':>8} "
        f"{'step ms':>8} {'private MB a rank':>17} {'bytes/document a node':>21}"
    )
    for num_documents in options.tables or []:
        with tempfile.TemporaryDirectory(dir=options.folder) as own:
            folder = Path(own)
            _write_index(folder / "data", num_documents)
            _measure("cached", folder, num_documents, options)
            if num_documents <= options.beside_up_to:
                _measure("private", folder, num_documents, options)
                _measure("megatron", folder, num_documents, options)
    if options.sparse:
        with tempfile.TemporaryDirectory(dir=options.folder) as own:
            _write_sparse(Path(own) / "caches", options.sparse)
            _measure("sparse", Path(own), options.sparse, options)


def _measure(way: str, folder: Path, num_documents: int, options: argparse.Namespace) -> None:
    """Prints a line: what one process took to build, then what two ranks at once took to open."""
    work = {"way": way, "folder": str(folder), "draws": min(options.draws, num_documents)}
    work["rounds"] = options.rounds
    built = _run([work]) if way in ("cached", "megatron") else None
    ranks = _run([work] * _RANKS)
    on_disk = sum(path.stat().st_blocks * 512 for path in (folder / "caches").glob("*"))
    on_node = on_disk + sum(one["private_bytes"] for one in ranks) * (way == "private")
    worst = {key: max(one[key] for one in ranks) for key in ranks[0]}
    cells = [f"{num_documents:13,}", f"{way:>8}", " " * 8, " " * 8]
    if built:
        cells[2:] = [f"{built[0]['open_s']:8.1f}", f"{built[0]['peak_bytes'] / _MB:8.0f}"]
    cells += [f"{1e3 * worst[key]:8.1f}" for key in ("open_s", "first_s", "step_s")]
    cells += [f"{worst['private_bytes'] / _MB:17.1f}", f"{on_node / num_documents:21.1f}"]
    print(" ".join(cells), flush=True)
    if way == "private":  # it leaves nothing; what the other ways left is theirs
        return
    for path in (folder / "caches").glob("*"):
        path.unlink()


def _run(works: list[dict[str, Any]]) -> list[dict[str, float]]:
    """Lets processes work at once; their memory is read while all of them are there."""
    command = [sys.executable, "-W", "ignore", __file__, "--worker"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen([*command, json.dumps(work)], **pipes) for work in works]
    found = []
    try:
        times = [json.loads(_line(process)) for process in processes]
        for process, said in zip(processes, times, strict=True):
            print("now", file=process.stdin, flush=True)
            found.append(said | json.loads(_line(process)))
    finally:
        for process in processes:
            process.stdin.close()
            process.wait()
    return found


def _line(process: Any) -> str:
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"a process ended with {process.wait()} before it said anything")
    return str(line)


def _work(way: str, folder: str, draws: int, rounds: int) -> None:
    """The body of a process: opens, draws, says how long it took, then what memory it holds."""
    openers = {"megatron": _open_megatron, "sparse": _open_sparse}
    begin = openers.get(way, _open_ours)
    if way == "megatron":
        import megatron.core.datasets.blended_dataset
        import megatron.core.datasets.gpt_dataset  # noqa: F401
        import torch.distributed as dist

        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    before, peak_before = _private(), _peak()
    open_s, step = _timed(lambda: begin(Path(folder), draws, way == "cached"))
    peak_bytes = _peak() - peak_before  # later pages of mapped files would count
    first_s = _timed(lambda: step(0))[0]
    later = [_timed(lambda at=at: step(at))[0] for at in range(1, rounds + 1)]
    times = {"open_s": open_s, "first_s": first_s, "step_s": statistics.median(later)}
    print(json.dumps(times | {"peak_bytes": peak_bytes}), flush=True)
    sys.stdin.readline()
    print(json.dumps({"private_bytes": _private() - before}), flush=True)
    sys.stdin.readline()  # while others look, what is shared with them stays shared


def _open_ours(folder: Path, draws: int, is_cached: bool) -> Callable[[int], Any]:
    table, reader = open_source(
        folder / "data",
        max_length=_MAX_LENGTH,
        cache_folder=folder / "caches" if is_cached else None,
    )
    return _steps(table, draws, reader)


def _open_sparse(folder: Path, draws: int, _: bool) -> Callable[[int], Any]:
    (path,) = (folder / "caches").glob("*.table")
    found = read_table(path)
    return _steps(SequenceTable(found.facts, found.columns), draws, None)


def _steps(table: SequenceTable, draws: int, kept: Any) -> Callable[[int], Any]:
    drawing = _mixture([table], BatchSize(sequences=draws))
    return lambda at: (drawing.step(_position(at * len(table) // 97)), kept)


class _Rows:
    """A whole table as a source's rows."""

    def __init__(self, table: SequenceTable) -> None:
        self.num_rows = len(table)
        self.lengths = table.lengths
        self.num_labels = table.num_labels

    def num_trained(self, rows: Any, starts: Any, stops: Any) -> Any:
        return stops - starts


def _mixture(tables: Sequence[SequenceTable], batch: BatchSize) -> Mixture:
    sources, weights = [], {}
    for i, table in enumerate(tables):
        order = Feistel(len(table), seed=1, source=i)
        stream = SourceStream(_Rows(table), order, splits_long=False)
        sources.append(MixedSource(f"data{i}", stream, table.mean_length))
        weights[f"data{i}"] = 1.0 + i % 7
    return Mixture(sources, Schedule().resolved(weights, _MAX_LENGTH), batch)


def _position(sequences: int) -> Position:
    return Position.of_one_source("data0", sequences)


def _open_megatron(folder: Path, draws: int, _: bool) -> Callable[[int], Any]:
    """An epoch of one `GPTDataset`, as stock training blends it; a draw looks up what it reads."""
    from megatron.core.datasets.blended_dataset import BlendedDataset
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.utils import Split

    class Tokenizer:
        vocab_size, eod, pad = 60_000, 0, 1
        unique_identifiers = "none"

    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=_MAX_LENGTH,
        blend=([str(folder / "data")], [1.0]),
        split="1,0,0",
        path_to_cache=str(folder / "caches"),
        tokenizer=Tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    )
    index = GPTDataset.build_low_level_dataset(str(folder / "data"), config)
    documents = np.arange(GPTDataset.numel_low_level_dataset(index), dtype=np.int32)
    train = GPTDataset(index, str(folder / "data"), documents, None, Split.train, config)
    blend = BlendedDataset([train], [1.0], len(train), config)

    def step(at: int) -> Any:
        size = len(blend)
        rows = (at * size // 97 + np.arange(min(draws, size))) % size
        samples = train.shuffle_index[blend.dataset_sample_index[rows]]
        return (
            blend.dataset_index[rows],
            train.sample_index[samples],
            train.sample_index[samples + 1],
        )

    return step


def _write_index(prefix: Path, num_documents: int) -> None:
    """Writes an ``.idx`` of documents of log-normal lengths, and a ``.bin`` that is a hole."""
    with open(f"{prefix}.idx", "wb") as file:
        file.write(b"MMIDIDX\x00\x00" + (1).to_bytes(8, "little") + b"\x08")
        for count in (num_documents, num_documents + 1):
            file.write(count.to_bytes(8, "little"))
        for lengths in _lengths(num_documents):
            lengths.astype("<i4").tofile(file)
        end = 0
        for lengths in _lengths(num_documents):
            pointers = end + 2 * np.cumsum(lengths)
            (pointers - 2 * lengths).tofile(file)
            end = int(pointers[-1])
        for first in range(0, num_documents + 1, _PIECE):
            np.arange(first, min(first + _PIECE, num_documents + 1)).tofile(file)
        file.flush()
        os.fsync(file.fileno())  # else building waits for its pages too
    with open(f"{prefix}.bin", "wb") as file:
        file.truncate(end)


def _lengths(num_documents: int) -> Iterator[Any]:
    """Tokens of documents: median 400, mean about 770, at most the context."""
    for first in range(0, num_documents, _PIECE):
        draw = np.random.default_rng([7, first])
        lengths = draw.lognormal(6.0, 1.2, min(_PIECE, num_documents - first))
        yield np.clip(lengths, 1, _MAX_LENGTH).astype(np.int64)


def _write_sparse(folder: Path, num_rows: int) -> None:
    """A cache whose column of places is a hole, which is what drawing a step does not touch."""
    folder.mkdir()
    facts = {"corpus": 0, "first_document": 0, "num_empty": 0, "num_truncated": 0, "num_split": 0}
    with TableWriter(folder / "made-up.table", num_rows, {"begin": "<i8", "length": "<u4"}) as file:
        num_tokens = first = 0
        for lengths in _lengths(num_rows):
            file.put("length", first, lengths.astype("<u4"))
            num_tokens, first = num_tokens + int(lengths.sum()), first + len(lengths)
        counts = {"num_sequences": num_rows, "num_documents": num_rows, "num_tokens": num_tokens}
        made_up = TableOrigin("", 0, "", "<u2", 2 * num_tokens)
        file.publish(TableFacts(longest=_MAX_LENGTH, **counts, **facts), made_up)


def _timed(action: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    result = action()
    return time.perf_counter() - began, result


def _private() -> int:
    return int(psutil.Process().memory_full_info().uss)


def _peak() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    main()
