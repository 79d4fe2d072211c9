"""What the measurements share: made-up sources, a plane on this machine, tables."""

import hashlib
import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np

from megatron_hdp.data import TokenWriter
from megatron_hdp.data.mixture import BatchSize, Opening, open_corpus, read_data_file
from megatron_hdp.data.spec import LoadersSpec
from megatron_hdp.data.steps import LocalLoaders, PlanSettings, RankStep, Reader
from megatron_hdp.data_plane.hooks import VARIABLE
from megatron_hdp.data_plane.setup import SplitSetup
from megatron_hdp.data_plane.starting import PlanePlace, node_of_plane
from megatron_hdp.data_plane.wire import pack
from megatron_hdp.planner import CostModel

VOCABULARY = 50_000
_MAX_LENGTH = 2048
_SCRIPTS = Path(__file__).parents[1]


def heading() -> str:
    """Return a line: machine, load and versions."""
    versions = " ".join(f"{name} {importlib.metadata.version(name)}" for name in ("ray", "numpy"))
    load = " ".join(f"{one:.0f}" for one in os.getloadavg())
    return (
        f"{len(os.sched_getaffinity(0))} CPUs ({platform.machine()}), load {load}, "
        f"Python {platform.python_version()}, {versions}"
    )


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def write_sources(folder: Path, num_sources: int, num_documents: int) -> Path:
    """Write sources of random tokens and the file that names them; return the file's path."""
    lines = ["sources:"]
    for number in range(num_sources):
        rng = np.random.default_rng(number)
        lengths = np.clip(rng.lognormal(5.0, 1.2, num_documents), 2, _MAX_LENGTH)
        with TokenWriter(folder / f"source-{number}", VOCABULARY) as writer:
            for length in lengths.astype(np.int64).tolist():
                writer.add(rng.integers(0, VOCABULARY, length))
        lines.append(f"  s{number}: {{path: {folder / f'source-{number}'}}}")
    path = folder / "data.yaml"
    path.write_text("\n".join([*lines, ""]))
    return path


def setup_of(path: Path, *, ranks: int, sequences: int, loaders: LoadersSpec) -> SplitSetup:
    """Return the training split of a file of --hdp-data, its caches warm.

    Args:
        path: of the file.
        ranks: HDP ranks.
        sequences: of a step.
        loaders: who loads.
    """
    folder = path.parent / "caches"
    spec = read_data_file(path).training
    opening = Opening(
        max_length=_MAX_LENGTH, long_sequence="truncate", tokenizer=None, cache_folder=folder
    )
    corpus = open_corpus(spec, replace(opening, say=lambda text: None))
    settings = PlanSettings(
        batch=BatchSize(sequences=sequences),
        seed=1,
        num_ranks=ranks,
        num_stages=1,
        lockstep_ranks=1,
        tokens_per_rank=_MAX_LENGTH,
        strategy="auto",
        max_length=_MAX_LENGTH,
        slice_multiple=1,
        offload="off",
        cost_model=CostModel(a=2e-8, b=2.5e-5, kv_bytes_per_token=1000),
    )
    return SplitSetup(
        split="train",
        spec=spec,
        max_length=_MAX_LENGTH,
        long_sequence="truncate",
        tokenizer=None,
        cache_folder=str(folder),
        settings=settings,
        orders=corpus.orders(),
        loaders=loaders,
    )


def local_loaders(setup: SplitSetup, reader: Reader) -> LocalLoaders:
    """Return the loaders of a rank that loads for itself."""
    return LocalLoaders(setup.planner(lambda text: None, lambda source: source), reader)


def digest(step: RankStep) -> str:
    """Return a fingerprint of all that a rank gets of a step, but for what planning took."""
    packed = pack(replace(step, totals=replace(step.totals, planning_ms=0.0), planned=None))
    buffer = bytearray(packed.num_bytes)
    packed.write_into(memoryview(buffer))
    return hashlib.blake2b(buffer, digest_size=8).hexdigest()


@contextmanager
def hooked(name: str, **figures: float) -> Iterator[None]:
    """Processes that are started in the block call a function of `hooks`, with these figures."""
    path = os.pathsep.join(filter(None, [str(_SCRIPTS), os.environ.get("PYTHONPATH", "")]))
    changes = {variable: str(figure) for variable, figure in figures.items()}
    changes |= {"PYTHONPATH": path, VARIABLE: f"plane_bench.hooks:{name}"}
    with mock.patch.dict(os.environ, changes):
        yield


@contextmanager
def running_plane(num_spares: int = 0) -> Iterator[Path]:
    """A data plane of one node on this machine; yields the node's folder.

    Args:
        num_spares: loaders that it starts before it is asked, as a job does.
    """
    with node_of_plane(PlanePlace.make("127.0.0.1", 1), 0, 120.0, num_spares) as folder:
        try:
            yield folder
        except BaseException:
            print((folder / "log").read_text()[-4000:], file=sys.stderr)
            raise
