"""Steps with pictures by who encodes them, side by side: same runtime, same gradients.

Ranks of a small model (gloo, a thread a rank); the encoder is a small transformer over patches,
whose cost is measured first. Pictures are drawn as those of docs/example-sizes.txt, with a
sixteenth of their patches at Qwen3-VL; each has a sequence of its own, or they are the pages of so
many documents. Strategies take turns in each step. Where cores are fewer than ranks no step takes
less than the CPU time of all ranks / cores, which is printed beside it.
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

HIDDEN, CHANNELS, PER_ROW = 64, 48, 4
STRATEGIES = ("home", "replica", "micro-batch", "step")
FLAGS = ("--config", "configs/tiny-cpu.yaml", "--hdp-tokens-per-rank", "2048")


class Encoder(torch.nn.Module):
    """Layers of attention within each picture, and four patches merged into a row."""

    patches_per_row, patches_per_pack = PER_ROW, 8192

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.enter = torch.nn.Linear(CHANNELS, width)
        layer = torch.nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True)
        self.layers = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.leave = torch.nn.Linear(PER_ROW * width, HIDDEN)
        self.busy_s = 0.0

    def measure_cost(self) -> None:
        """Of one picture of each of two sizes, forward, on the first rank."""
        from megatron_hdp.media import ItemCostModel

        sizes, taken = (256, 2048), torch.ones(2, dtype=torch.float64)
        if dist.get_rank() == 0:
            for i, n in enumerate(sizes):
                times = []
                for _ in range(5):
                    begin = process_time()
                    self.layers(self.enter(torch.randn(n, CHANNELS))[None]).sum().backward()
                    times.append(process_time() - begin)
                taken[i] = median(times)
        dist.broadcast(taken, 0)
        small, large = (float(s) / n for s, n in zip(taken, sizes, strict=True))
        slope = max(large - small, 0.0) / (sizes[1] - sizes[0])
        self.cost = ItemCostModel(patch_s=max(small - slope * sizes[0], 1e-9), patch2_s=slope)

    def patches(self, picture: torch.Tensor) -> int:
        """Of an array ``[patches, channels]``."""
        return len(picture)

    def forward(self, pictures: list[torch.Tensor]) -> torch.Tensor:
        """Rows of pictures, one behind another."""
        begin = process_time()
        found = [self.layers(self.enter(one)[None])[0] for one in pictures]
        rows = self.leave(torch.cat([one.reshape(len(one) // PER_ROW, -1) for one in found]))
        self.busy_s += process_time() - begin
        return rows


def drawn(step: int, number: int) -> list[int]:
    """Patches of pictures: thumbnails, photos, documents."""
    data = np.random.default_rng(step)
    kind = data.choice(3, number, p=[0.35, 0.5, 0.15])
    middle, spread = np.array([0.05, 0.4, 2.5])[kind], np.array([0.3, 0.5, 0.6])[kind]
    pixels = 1e6 * np.minimum(np.exp(data.normal(np.log(middle), spread)), 8.3)
    return [max(PER_ROW, int(one / 256 / 16) // PER_ROW * PER_ROW) for one in pixels]


def batch_of(patches: list[int], num_documents: int, num_texts: int, step: int) -> Any:
    """A sequence a picture, or fewer, with a text behind each, and sequences of text alone."""
    from megatron_hdp.session import MediaItem, TokenBatch

    data = np.random.default_rng(1000 + step)
    tokens: list[list[int]] = [[] for _ in range(num_documents or len(patches))]
    places = []
    for i, n in enumerate(patches):
        sequence = i % len(tokens)
        places.append((sequence, len(tokens[sequence])))
        tokens[sequence] += [0] * (n // PER_ROW) + data.integers(0, 256, 32).tolist()
    lengths = np.minimum(data.lognormal(np.log(200), 1.0, num_texts) + 2, 4000).astype(int)
    tokens += [data.integers(0, 256, length).tolist() for length in lengths]
    pictures = [torch.from_numpy(data.standard_normal((n, CHANNELS), np.float32)) for n in patches]
    items = [MediaItem(*place, one) for place, one in zip(places, pictures, strict=True)]
    return TokenBatch(tokens, media=items)


def measure(rank: int, settings: argparse.Namespace, folder: str) -> None:
    """Body of a rank; the first prints."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(settings.ranks), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(settings.port)}
    torch.set_num_threads(1)
    from megatron_hdp.session import HdpSession

    session = HdpSession.from_flags(FLAGS, vocab_size=257)
    torch.manual_seed(0)
    encoder = Encoder(settings.layers, settings.width)
    encoder.measure_cost()
    rows = []
    for step in range(settings.steps + 1):  # the first is not counted
        patches = drawn(step, settings.pictures)
        batch = batch_of(patches, settings.documents, settings.texts, step)
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
    for name, value in (
        ("ranks", 4),
        ("steps", 5),
        ("pictures", 32),
        ("documents", 0),
        ("texts", 32),
        ("layers", 4),
        ("width", 128),
    ):
        parser.add_argument(f"--{name}", type=int, default=value)
    settings = parser.parse_args()
    settings.port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(measure, (settings, folder), nprocs=settings.ranks)


if __name__ == "__main__":
    main()
