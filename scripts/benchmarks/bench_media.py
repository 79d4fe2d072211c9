"""Steps with pictures by who encodes them, side by side: same runtime, same gradients.

Ranks of a small model (gloo, a thread a rank) with a small encoder of Qwen3-VL's kind, whose cost
is measured first. Pictures are drawn as those of docs/example-sizes.txt, with a sixteenth of their
patches at Qwen3-VL, beside pages, with half of the patches that 4K has there; each has a sequence
of its own, or they are the pages of so many documents. Strategies take turns in each step. Where
cores are fewer than ranks no step takes less than the CPU time of all ranks / cores, which is
printed beside it.
Run: ``python scripts/benchmarks/bench_media.py``.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing

sys.path.insert(0, str(Path(__file__).parents[2]))

CHANNELS, PER_ROW = 48, 4
STRATEGIES = ("home", "replica", "micro-batch", "step")
FLAGS = ("--config", "configs/tiny-cpu.yaml", "--hdp-tokens-per-rank", "8192")
TEXT = {
    "hidden_size": 64,
    "rope_parameters": {"rope_theta": 1e4, "mrope_section": [6, 5, 5]},
}
VISION = {"patch_size": 4, "out_hidden_size": 64, "deepstack_visual_indexes": []}


def encoder_of(settings: argparse.Namespace) -> Any:
    """An encoder with the same random weights on every rank, and costs that the first measured."""
    from megatron_hdp.encoders import Qwen3VLEncoder
    from megatron_hdp.profile.items import measured_items

    class Timed(Qwen3VLEncoder):
        """Adds up the CPU time of its calls."""

        busy_s = 0.0

        def forward(self, items: Any) -> Any:
            begin = process_time()
            rows = super().forward(items)
            self.busy_s += process_time() - begin
            return rows

        def encode_piece(self, *given: Any) -> Any:
            begin = process_time()
            rows = super().encode_piece(*given)
            self.busy_s += process_time() - begin
            return rows

    width = {"hidden_size": settings.width, "intermediate_size": 4 * settings.width, "num_heads": 4}
    vision = VISION | width | {"depth": settings.layers}
    torch.manual_seed(0)
    encoder = Timed({"text_config": TEXT, "vision_config": vision}, patches_per_pack=8192)
    told = [None]
    if dist.get_rank() == 0:
        told = [measured_items(encoder, torch.device("cpu"), 10.0)]
    dist.broadcast_object_list(told, 0)
    encoder.measured = told[0]
    return encoder


def drawn(step: int, number: int, pages: int, page_side: int) -> list[tuple[int, int]]:
    """Patches in height and width of pictures: pages, then thumbnails, photos and documents."""
    data = np.random.default_rng(step)
    kind = data.choice(3, number, p=[0.35, 0.5, 0.15])
    middle, spread = np.array([0.05, 0.4, 2.5])[kind], np.array([0.3, 0.5, 0.6])[kind]
    pixels = 1e6 * np.minimum(np.exp(data.normal(np.log(middle), spread)), 8.3)
    sides = np.maximum(2, np.sqrt(pixels / 256 / 16).astype(int) // 2 * 2).tolist()
    return [(page_side, page_side)] * pages + [(side, side) for side in sides]


def batch_of(grids: list[tuple[int, int]], num_documents: int, num_texts: int, step: int) -> Any:
    """A sequence a picture, or fewer, with a text behind each, and sequences of text alone."""
    from megatron_hdp.media import Patches
    from megatron_hdp.session import MediaItem, TokenBatch

    data = np.random.default_rng(1000 + step)
    tokens: list[list[int]] = [[] for _ in range(num_documents or len(grids))]
    places = []
    for i, (h, w) in enumerate(grids):
        sequence = i % len(tokens)
        places.append((sequence, len(tokens[sequence])))
        tokens[sequence] += [0] * (h * w // PER_ROW) + data.integers(0, 256, 32).tolist()
    lengths = np.minimum(data.lognormal(np.log(200), 1.0, num_texts) + 2, 4000).astype(int)
    tokens += [data.integers(0, 256, length).tolist() for length in lengths]
    pictures = [
        Patches(data.integers(0, 256, (h * w, CHANNELS)).astype(np.uint8), (1, h, w))
        for h, w in grids
    ]
    items = [MediaItem(*place, one) for place, one in zip(places, pictures, strict=True)]
    return TokenBatch(tokens, media=items)


def measure(rank: int, settings: argparse.Namespace, folder: str) -> None:
    """Body of a rank; the first prints."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(settings.ranks), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(settings.port)}
    torch.set_num_threads(1)
    from megatron_hdp.session import HdpSession

    session = HdpSession.from_flags(FLAGS, vocab_size=257)
    encoder = encoder_of(settings)
    rows = []
    for step in range(settings.steps + 1):  # the first is not counted
        grids = drawn(step, settings.pictures, settings.pages, settings.page_side)
        batch = batch_of(grids, settings.documents, settings.texts, step)
        row: dict[str, dict[str, float]] = {}
        for name in STRATEGIES[:: 1 if step % 2 else -1]:  # they take turns
            session.attach_encoder(encoder, balance=name)
            encoder.busy_s = 0.0
            dist.barrier()
            begin, cpu = perf_counter(), process_time()
            report = session.step(batch)
            dist.barrier()
            taken = perf_counter() - begin
            busy = torch.tensor([encoder.busy_s, process_time() - cpu], dtype=torch.float64)
            every = [torch.empty_like(busy) for _ in range(settings.ranks)]
            dist.all_gather(every, busy)
            of_encoder, of_all = torch.stack(every).T
            norm = sum(float(one.grad.norm() ** 2) for one in encoder.parameters()) ** 0.5
            row[name] = {
                "s": taken,
                "encoder": float(of_encoder.max()),
                "even": float(of_encoder.mean() / of_encoder.max()),
                "rank": float(of_all.max()),
                "bound": float(of_all.sum()) / (os.cpu_count() or 1),
                "loss": report.loss,
                "norm": norm,
            }
        rows.append(row)
    if rank == 0:
        told(rows[1:])
    session.close()


def told(rows: list[dict[str, dict[str, float]]]) -> None:
    """Prints a line for each strategy, and how far losses and gradients are apart."""

    def middle(name: str, what: str) -> float:
        return median(row[name][what] for row in rows)

    for name in STRATEGIES:
        least = max(middle(name, "bound"), middle(name, "rank"))
        ratio = median(row[name]["s"] / row["step"]["s"] for row in rows)
        busiest = median(row[name]["rank"] / row["step"]["rank"] for row in rows)
        print(
            f"{name:12} {middle(name, 's'):6.2f} s a step, {ratio:.2f} of step's, at least "
            f"{least:.2f} s by CPU time; busiest rank "
            f"{middle(name, 'rank'):.2f} s of CPU, {busiest:.2f} of step's; encoder's forwards "
            f"{middle(name, 'encoder'):.2f} s, even to {middle(name, 'even'):.2f}"
        )
    for what in ("loss", "norm"):
        apart = max(
            abs(row[name][what] / row["step"][what] - 1) for row in rows for name in STRATEGIES
        )
        print(f"largest relative difference of the {what}: {apart:.1e}")


def main() -> None:
    """Starts the ranks."""
    from megatron_hdp.processes.ports import free_port

    parser = argparse.ArgumentParser(description=__doc__)
    for flag, value in (
        ("--ranks", 4),
        ("--steps", 5),
        ("--pictures", 32),
        ("--pages", 0),
        ("--page-side", 128),
        ("--documents", 0),
        ("--texts", 32),
        ("--layers", 4),
        ("--width", 128),
    ):
        parser.add_argument(flag, type=int, default=value)
    settings = parser.parse_args()
    settings.port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(measure, (settings, folder), nprocs=settings.ranks)


if __name__ == "__main__":
    main()
