"""Bytes that nodes fetch of a step, against what their ranks' slices hold; counted, not timed.

Roles run here without Ray: what they send each other is the same.
"""

import argparse
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from plane_bench.common import VOCABULARY, heading, planner_of, setup_of, table, write_sources

from megatron_hdp.data.mixture import Position
from megatron_hdp.data.spec import LoadersSpec
from megatron_hdp.data.steps import RankStep, Reader, StepTotals
from megatron_hdp.data_plane.roles import ConstructingService, LoadingService

_GOAL = 1.1
_TOKEN_BYTES = np.dtype(np.uint16).itemsize  # of this vocabulary


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what `run` heeds."""
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--ranks-per-node", type=int, default=8)
    parser.add_argument("--documents", type=int, default=3000)
    parser.add_argument("--sequences", type=int, default=40, help="a step and rank")
    parser.add_argument("--tokens-per-rank", type=int, default=512, help="less: more rings")
    parser.add_argument("--steps", type=int, default=3)


def run(options: argparse.Namespace) -> int:
    """Count; print a table; return 1 if a node fetches more than the goal."""
    print(heading())
    rows, worst = [], 0.0
    with tempfile.TemporaryDirectory() as own:
        path = write_sources(Path(own), 5, options.documents)
        for nodes in options.nodes:
            fetched, held, in_rings = _count(path, nodes, options)
            worst = max(worst, *(a / b for a, b in zip(fetched, held, strict=True)))
            rows.append(
                [
                    f"{nodes} x {options.ranks_per_node}",
                    f"{sum(held) / 1e6:.2f} MB",
                    f"{sum(fetched) / 1e6:.2f} MB",
                    f"{max(a / b for a, b in zip(fetched, held, strict=True)):.4f}",
                    f"<= {_GOAL}",
                    f"{in_rings:.0%}",
                ]
            )
    header = ["nodes x ranks", "slices", "fetched", "worst node", "goal", "tokens in rings"]
    print(table(header, rows))
    return 0 if worst <= _GOAL else 1


def _count(path: Path, nodes: int, options: Any) -> tuple[list[int], list[int], float]:
    """Bytes that each node fetched, that its ranks hold, and the share of tokens in rings."""
    per_node = options.ranks_per_node
    setup = setup_of(
        path,
        ranks=nodes * per_node,
        sequences=options.sequences * nodes * per_node,
        loaders=LoadersSpec(backend="ray"),
        tokens_per_rank=options.tokens_per_rank,
    )
    planner = planner_of(setup)
    loading = {
        one.name: LoadingService(setup.alone(one.name, lambda text: None).sources[0])
        for one in setup.spec.sources
    }
    names = list(loading)

    def ask(position: Position, ranks: Any) -> Any:
        planned = planner.plan(position)
        shares = planner.shares(planned).of(ranks)
        totals = StepTotals.of(planned, len(names))
        return SimpleNamespace(
            epoch=1,
            totals=totals,
            shares=shares,
            loaders={name: (name,) for name in names},
            num_serving=dict.fromkeys(names, 1),
        )

    fetched, held, tokens, in_rings = [], [], 0, 0
    for node in range(nodes):
        laid_out: list[RankStep] = []

        def keep(step: RankStep, laid_out: list[RankStep] = laid_out) -> RankStep:
            laid_out.append(step)
            return step

        service = ConstructingService(
            names, ask, lambda name, _, wanted: loading[name].load(wanted), keep, lambda _: None,
            steps_ahead=1,
        )  # fmt: skip
        readers = [Reader(node * per_node + i, VOCABULARY) for i in range(per_node)]
        for one in readers:
            service.add(one)
        position, held_here = Position(), 0
        for _ in range(options.steps):
            position = service.get(position, readers[0], 60).totals.after
        service.close()
        service._makers.shutdown(wait=True)  # what it makes ahead is counted on both sides
        for step in laid_out:
            for one in step.micro_batches:
                held_here += int((one.sequence_index >= 0).sum()) * _TOKEN_BYTES
                tokens += int((one.sequence_index >= 0).sum())
                in_rings += sum(one.ring_slices)
        fetched.append(service.figures.fetched_bytes)
        held.append(held_here)
    return fetched, held, in_rings / tokens
