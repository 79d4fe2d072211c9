"""OVERLORD's orchestration (arXiv 2504.09844) by simulation: no balance, theirs, ours, one machine.

Prints Markdown tables (``docs/overlord.md`` has them). Every cell runs the same drawn steps in four
ways, by the exact 1F1B schedule and one set of constants: samples dealt in their order; samples
balanced by cost between data-parallel groups and their micro-batches, as the paper's backbone
balance; images balanced by cost over all ranks besides, as its hybrid balance; and ours, sequences
on rings of any size, images of the whole step in the gaps of the pipelines, large ones cut.
``python scripts/benchmarks/reproduce_overlord.py --cells '*16K*'`` takes a minute.
"""

import argparse
import fnmatch
import heapq
import itertools
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megatron_hdp.arrays import Float64Array, Int32Array, Int64Array
from megatron_hdp.media import (
    ENCODERS,
    ItemBatch,
    ItemCostModel,
    ItemPlan,
    evaluate_items,
    gap_choices,
    plan_in_gaps,
    plan_items,
    slots_of_micro_batches,
    with_items_apart,
)
from megatron_hdp.planner import CostModel, Evaluation, Plan, evaluate, plan

FLOP_PER_S = 60e12
"""That an L20 reaches, half of its 119.5 TFLOP/s."""
NODE_BYTES_PER_S, NETWORK_BYTES_PER_S = 20e9, 12e9
"""Between GPUs of a node, over PCIe, and for each GPU between nodes."""
CP = 2
STEPS = 3
TOKENS = 4_194_304
"""Of a step."""
VIT_1B = replace(ENCODERS["qwen3-vl"], layers=40, hidden=1408, ffn=6144, projectors=1)
VIT_2B = replace(VIT_1B, layers=48, hidden=1664, ffn=8192)


@dataclass(frozen=True, kw_only=True)
class Model:
    """A language model by its active parameters, and its pipelines."""

    name: str
    parameters: float
    layers: int
    hidden: int
    kv_heads: int
    stages: int
    tensor_ranks: int
    groups: int
    """Data-parallel groups of `CP` ranks each."""

    @property
    def num_gpus(self) -> int:
        """Of the job."""
        return self.stages * self.tensor_ranks * self.groups * CP

    def cost(self) -> CostModel:
        """Seconds of one HDP rank by FLOP and bytes."""
        rate = FLOP_PER_S * self.tensor_ranks
        heads_bytes = 2 * 2 * 128 * self.kv_heads * self.layers
        return CostModel(
            a=6 * self.layers * self.hidden / rate,
            b=6 * self.parameters / rate,
            kv_bytes_per_token=heads_bytes / self.tensor_ranks,
            intra_node_bytes_per_s=NODE_BYTES_PER_S,
            inter_node_bytes_per_s=NETWORK_BYTES_PER_S,
            ranks_per_node=max(1, 8 // self.tensor_ranks),
            num_layers=self.layers // self.stages,
        )


@dataclass(frozen=True, kw_only=True)
class Mix:
    """Samples: text by a log-normal length, images by log-normal pixels."""

    name: str
    text: tuple[float, float]
    """Median tokens and spread."""
    images: float
    """Of a sample in the mean; each has at least one."""
    pixels: tuple[float, float]
    """Median megapixels and spread."""


MODELS = (
    Model(
        name="Llama-12B",
        parameters=12e9,
        layers=45,
        hidden=4608,
        kv_heads=36,
        stages=9,
        tensor_ranks=4,
        groups=8,
    ),
    Model(
        name="tMoE-25B",
        parameters=6e9,
        layers=32,
        hidden=4096,
        kv_heads=32,
        stages=4,
        tensor_ranks=4,
        groups=9,
    ),
    Model(
        name="Mixtral-8x7B",
        parameters=12.9e9,
        layers=32,
        hidden=4096,
        kv_heads=8,
        stages=8,
        tensor_ranks=4,
        groups=9,
    ),
)
ENCODERS_OF = {"ViT-1B": VIT_1B, "ViT-2B": VIT_2B}
MIXES = (
    Mix(name="coyo", text=(30, 0.6), images=1, pixels=(0.3, 0.7)),
    Mix(name="navit", text=(300, 1.2), images=3, pixels=(0.6, 0.9)),
)
CONTEXTS = {"4K": 4096, "8K": 8192, "16K": 16_384}


@dataclass(frozen=True)
class Samples:
    """Of one step: their lengths, and the patches and the sample of each image."""

    lengths: Int64Array
    patches: Int64Array
    owners: Int64Array


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What is simulated."""

    model: Model
    encoder: str
    mix: Mix
    context: str

    @property
    def name(self) -> str:
        """As ``--cells`` matches it."""
        return f"{self.model.name} {self.encoder} {self.mix.name} {self.context}"


def all_cells() -> list[Cell]:
    """Every model with every encoder, mix and context."""
    return [
        Cell(model=model, encoder=encoder, mix=mix, context=context)
        for model, encoder, mix, context in itertools.product(MODELS, ENCODERS_OF, MIXES, CONTEXTS)
    ]


def drawn(cell: Cell, seed: int) -> Samples:
    """Samples until a step is full; none is longer than the context."""
    rng, context = np.random.default_rng(seed), CONTEXTS[cell.context]
    encoder, mix = ENCODERS_OF[cell.encoder], cell.mix
    per_row = encoder.patches_per_row
    lengths: list[int] = []
    patches: list[int] = []
    owners: list[int] = []
    total = 0
    while total < TOKENS:
        length = 1 + int(rng.lognormal(np.log(mix.text[0]), mix.text[1]))
        length = min(length, context // 2)
        for _ in range(rng.geometric(1 / mix.images)):
            pixels = 1e6 * rng.lognormal(np.log(mix.pixels[0]), mix.pixels[1])
            sides = np.sqrt(min(pixels, 8.3e6) * np.exp(rng.normal(0, 0.3) * np.array([1, -1])))
            found = int(encoder.resizing.patches(*map(int, np.maximum(sides, 32)))[0])
            found = min(found, context // 4 * per_row)  # a limit of pixels, as processors have
            if length + found // per_row > context:
                break
            length += found // per_row
            patches.append(found)
            owners.append(len(lengths))
        length = -(-length // (2 * CP)) * 2 * CP  # a slice has two chunks of equal length
        lengths.append(length)
        total += length
    return Samples(*(np.array(one, dtype=np.int64) for one in (lengths, patches, owners)))


# How samples come to micro-batches of data-parallel groups: lists of samples, group by group.

Groups = list[list[list[int]]]


def in_order(samples: Samples, cell: Cell) -> Groups:
    """Micro-batches filled up to the context in the order of samples, dealt to groups in turn."""
    context, filled = CONTEXTS[cell.context], [[0]]
    held = int(samples.lengths[0])
    for i, length in enumerate(samples.lengths[1:].tolist(), start=1):
        if held + length > context:
            filled.append([])
            held = 0
        filled[-1].append(i)
        held += length
    return [filled[group :: cell.model.groups] for group in range(cell.model.groups)]


def karmarkar_karp(weights: Float64Array, num_bins: int) -> list[list[int]]:
    """Bins of the largest differencing method: the two most unequal partitions are joined."""
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    for i, weight in enumerate(weights.tolist()):
        bins: list[tuple[float, list[int]]] = [(0.0, []) for _ in range(num_bins - 1)]
        bins.append((weight, [i]))
        heap.append((-weight, i, bins))
    heapq.heapify(heap)
    number = itertools.count(len(heap))
    while len(heap) > 1:
        *_, left = heapq.heappop(heap)
        *_, right = heapq.heappop(heap)
        joined = [
            (a + b, one + other) for (a, one), (b, other) in zip(left, reversed(right), strict=True)
        ]
        joined.sort(key=lambda one: one[0])
        heapq.heappush(heap, (joined[0][0] - joined[-1][0], next(number), joined))
    return [items for _, items in heap[0][2]]


def balanced(samples: Samples, cell: Cell, cost: CostModel) -> Groups:
    """Groups by Karmarkar-Karp, in each micro-batches longest first to the one that costs least.

    As few micro-batches as hold all tokens, up to 2 more: whichever makes the step shortest.
    """
    context, lengths = CONTEXTS[cell.context], samples.lengths
    weights = cost.a * lengths.astype(float) ** 2 + cost.b * lengths
    shares = karmarkar_karp(weights, cell.model.groups)

    def with_bins(share: list[int], more: int) -> list[list[int]]:
        num = -(-int(lengths[share].sum()) // context) + more
        bins: list[list[int]] = [[] for _ in range(num)]
        loads, held = [0.0] * num, [0] * num
        for i in sorted(share, key=lambda i: -weights[i]):
            room = [k for k in range(len(bins)) if held[k] + lengths[i] <= context]
            if not room:
                bins.append([])
                loads.append(0.0)
                held.append(0)
                room = [len(bins) - 1]
            best = min(room, key=lambda k: loads[k])
            bins[best].append(i)
            loads[best] += weights[i]
            held[best] += int(lengths[i])
        return [one for one in bins if one]

    found = [[with_bins(share, more) for share in shares] for more in range(3)]
    return min(found, key=lambda one: _text_s(one, samples, cell, cost).makespan_s)


def plan_of(groups: Groups, samples: Samples, cell: Cell) -> Plan:
    """The plan in which each group of `CP` ranks shares all of its micro-batches."""
    of_groups = [[(group, one) for one in lists] for group, lists in enumerate(groups)]
    rows = [one for row in itertools.zip_longest(*of_groups) for one in row if one is not None]
    counts = [len(one) for _, one in rows]
    num, none = len(rows), np.zeros(0, dtype=np.int64)
    return Plan(
        num_ranks=cell.model.groups * CP,
        tokens_per_rank=CONTEXTS[cell.context] // CP,
        strategy="static",
        lengths=samples.lengths,
        rank_offsets=np.arange(num + 1) * CP,
        ranks=np.concatenate([CP * group + np.arange(CP) for group, _ in rows]).astype(np.int32),
        sequence_offsets=np.cumsum([0, *counts]),
        sequences=np.array([i for _, one in rows for i in one]),
        local_offsets=np.zeros(num + 1, dtype=np.int64),
        local_sequences=none,
        local_ranks=none.astype(np.int32),
        offload_ratios=np.zeros(num),
    )


def _text_s(groups: Groups, samples: Samples, cell: Cell, cost: CostModel) -> Evaluation:
    return evaluate(plan_of(groups, samples, cell), cost, cell.model.stages)


def item_batch(made: Plan, times: Evaluation, samples: Samples, cell: Cell) -> ItemBatch:
    """The images, each with a rank that holds its sample, and the slot of its micro-batch."""
    of_sample = np.zeros(len(made.lengths), dtype=np.int64)
    owners = np.repeat(np.arange(made.num_micro_batches), np.diff(made.sequence_offsets))
    of_sample[made.sequences] = owners
    owners = np.repeat(np.arange(made.num_micro_batches), np.diff(made.local_offsets))
    of_sample[made.local_sequences] = owners
    micro_batches = of_sample[samples.owners]
    slots = slots_of_micro_batches(made, times.pipeline)
    model = cell.model
    return ItemBatch(
        patches=samples.patches,
        consumers=made.ranks[made.rank_offsets[micro_batches]] * np.int32(model.tensor_ranks),
        micro_batches=slots[micro_batches].astype(np.int32),
        num_ranks=model.num_gpus,
        patches_per_pack=65_536,
    )


def whole_items(batch: ItemBatch, ranks: Int32Array) -> ItemPlan:
    """A plan in which each image is whole on a rank."""
    zeros = np.zeros(len(ranks), dtype=np.int32)
    return ItemPlan(
        strategy="home", first_ranks=ranks, degrees=zeros + 1, turns=zeros, phases=zeros
    )


@dataclass(frozen=True)
class Steps:
    """Seconds of a step in four ways, and the bound: all work over all GPUs."""

    unbalanced: float
    backbone: float
    hybrid: float
    kept: float
    """Hybrid, were activations of all images kept until backward: three passes and not four."""
    ours: float
    bound: float


def simulated(cell: Cell, seed: int) -> Steps:
    """One step in every way."""
    samples, cost = drawn(cell, seed), cell.model.cost()
    encoder = ENCODERS_OF[cell.encoder]
    items = ItemCostModel.from_encoder(encoder, flop_per_s=FLOP_PER_S, bytes_per_s=NODE_BYTES_PER_S)
    plain = plan_of(in_order(samples, cell), samples, cell)
    level = plan_of(balanced(samples, cell, cost), samples, cell)
    of_plain, of_level = (evaluate(one, cost, cell.model.stages) for one in (plain, level))
    by_count = (np.arange(len(samples.patches)) % cell.model.num_gpus).astype(np.int32)

    def encoding_s(made: Plan, times: Evaluation, how: Callable[[ItemBatch], ItemPlan]) -> float:
        batch = item_batch(made, times, samples, cell)
        return evaluate_items(batch, how(batch), items).makespan_s

    def longest_first(batch: ItemBatch) -> ItemPlan:
        return plan_items(replace(batch, most_ranks=1), items)

    in_turn_s = encoding_s(plain, of_plain, lambda batch: whole_items(batch, by_count))
    hybrid_s = encoding_s(level, of_level, longest_first)
    work_s = float(((items.patch_s + items.patch2_s * samples.patches) * samples.patches).sum())
    return Steps(
        unbalanced=of_plain.makespan_s + in_turn_s,
        backbone=of_level.makespan_s + in_turn_s,
        hybrid=of_level.makespan_s + hybrid_s,
        kept=of_level.makespan_s + 3 / 4 * hybrid_s,
        ours=_ours_s(cell, samples, cost, items),
        bound=(of_plain.total_compute_s * cell.model.tensor_ranks + work_s) / cell.model.num_gpus,
    )


def _ours_s(cell: Cell, samples: Samples, cost: CostModel, items: ItemCostModel) -> float:
    model, found = cell.model, []
    for parts in (1, 8):
        made = plan(
            samples.lengths,
            ranks=model.groups * CP,
            tokens_per_rank=CONTEXTS[cell.context] // CP,
            cost_model=cost,
            pipeline_stages=model.stages,
            sequence_parts=parts,
        )
        times = evaluate(made, cost, model.stages)
        largest = np.zeros(len(samples.lengths), dtype=np.int64)
        np.maximum.at(largest, samples.owners, samples.patches)
        made = with_items_apart(made, times.duration_s, largest, times.pipeline)
        times = evaluate(made, cost, model.stages)
        batch = item_batch(made, times, samples, cell)
        choices = gap_choices(made, times, batch.micro_batches, tensor_ranks=model.tensor_ranks)
        more = evaluate_items(*plan_in_gaps(batch, items, choices), items).makespan_s
        found.append(times.makespan_s + more)
    return min(found)


def table(cells: Sequence[Cell], steps: int) -> list[dict[str, Any]]:
    """Medians of steps, printed as they come."""
    names = ("cell", "GPUs", "unbalanced", "backbone", "hybrid", "kept", "ours", "bound")
    print(f"| {' | '.join(names)} |", f"|{'---|' * len(names)}", sep="\n")
    found = []
    for cell in cells:
        runs = [simulated(cell, seed) for seed in range(steps)]
        row = {name: statistics.median(getattr(one, name) for one in runs) for name in names[2:]}
        told = [
            f"{row['unbalanced']:.2f} s",
            *(f"{row['unbalanced'] / row[name]:.2f}" for name in names[3:]),
        ]
        print(f"| {cell.name} | {cell.model.num_gpus} | {' | '.join(told)} |", flush=True)
        found.append({"context": cell.context} | row)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables; return an exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--cells", default="*", metavar="GLOB", help="names of cells (default: *)")
    parser.add_argument("--steps", type=int, default=STEPS, help="drawn steps (default: 3)")
    options = parser.parse_args(argv)
    cells = [one for one in all_cells() if fnmatch.fnmatch(one.name, options.cells)]
    if not cells:
        parser.error(f"--cells {options.cells}: no such cell")
    found = table(cells, options.steps)
    print("\n| context | backbone | hybrid | kept | ours |\n|---|---|---|---|---|")
    for context in CONTEXTS:
        rows = [one for one in found if one["context"] == context]
        if rows:
            means = [
                statistics.mean(one["unbalanced"] / one[name] for one in rows)
                for name in ("backbone", "hybrid", "kept", "ours")
            ]
            print(f"| {context} | {' | '.join(f'{one:.2f}' for one in means)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
