"""Pictures in the gaps of pipelines: what they make a step longer, by the exact schedule.

Prints a Markdown table (``docs/benchmarks.md`` has it). Five published layouts, each with
micro-batches of equal length, so that all that a pipeline waits for is its bubble. Pictures have
the sizes of ``docs/example-sizes.txt``, those with more rows than a quarter of a micro-batch scaled
down to that, drawn until their rows are the given share of all tokens. Each is in a sequence by
chance. Compared are pictures that are encoded before and behind the schedule
by all ranks, in its gaps, and there with large ones kept apart from the step's ends.
"""

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from megatron_hdp.arrays import Int64Array
from megatron_hdp.cli.shared.item_sizes import read_sizes
from megatron_hdp.media import (
    ENCODERS,
    Encoder,
    ItemBatch,
    ItemCostModel,
    gap_choices,
    items_bound_s,
    plan_in_gaps,
    slots_of_micro_batches,
    with_items_apart,
)
from megatron_hdp.planner import CostModel, Evaluation, Plan, evaluate, plan
from megatron_hdp.simulator.joined import joined_step

SIZES = Path(__file__).parents[2] / "docs" / "example-sizes.txt"
FLOP_PER_S = 400e12
SMALL = ENCODERS["qwen3-vl"]
LARGE = replace(SMALL, layers=48, hidden=1664, ffn=8192, projectors=1)
"""Of 1.9 billion parameters, as ViT-G/14 has them."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A published job: its language model by active parameters, and how GPUs are arranged."""

    name: str
    parameters: float
    stages: int
    hdp_ranks: int
    tensor_ranks: int
    micro_batches: int
    tokens: int
    encoder: Encoder = SMALL
    share: float
    """Of tokens that are rows of pictures."""
    chunks: int = 1


LAYOUTS = (
    Layout(
        name="Llama-12B, ViT-2B (OVERLORD)",
        parameters=12e9,
        stages=9,
        hdp_ranks=16,
        tensor_ranks=4,
        micro_batches=64,
        tokens=8192,
        encoder=LARGE,
        share=0.03,
    ),
    Layout(
        name="Llama-3-70B (DistTrain)",
        parameters=70e9,
        stages=10,
        hdp_ranks=16,
        tensor_ranks=8,
        micro_batches=120,
        tokens=8192,
        share=0.3,
    ),
    Layout(
        name="Qwen3-VL-235B, 22B active (Megatron Bridge)",
        parameters=22e9,
        stages=16,
        hdp_ranks=8,
        tensor_ranks=4,
        micro_batches=64,
        tokens=8192,
        share=0.3,
    ),
    Layout(
        name="Kimi-K2.5, 32B active",
        parameters=32e9,
        stages=16,
        hdp_ranks=32,
        tensor_ranks=1,
        micro_batches=256,
        tokens=4096,
        share=0.15,
    ),
    Layout(
        name="LongCat-Flash-Omni, 27B active",
        parameters=27e9,
        stages=8,
        hdp_ranks=64,
        tensor_ranks=1,
        micro_batches=64,
        tokens=8192,
        share=0.15,
    ),
)


@dataclass(frozen=True, kw_only=True)
class Result:
    """Of one draw of pictures."""

    items: int
    of_bubble: float
    """Encoder work by what pipelines wait for."""
    outside: float
    inside: float
    apart: float
    """Steps by the one of text alone: encoded before and behind, in gaps, with items apart."""
    bound: float
    waves: int


def measured(layout: Layout, seed: int) -> Result:
    """Return what one draw of pictures makes of a layout's step."""
    seconds = 6 * layout.parameters / layout.tensor_ranks / FLOP_PER_S
    cost = CostModel(a=0.0, b=seconds, g=0.0, kv_bytes_per_token=0.0)
    made = plan(
        [layout.tokens] * (layout.hdp_ranks * layout.micro_batches),
        ranks=layout.hdp_ranks,
        tokens_per_rank=layout.tokens,
        cost_model=cost,
        pipeline_stages=layout.stages,
        virtual_stages=layout.chunks,
    )
    times = evaluate(made, cost, layout.stages, layout.chunks)
    patches, owners = _pictures(layout, seed)
    largest = np.zeros(len(made.lengths), dtype=np.int64)
    np.maximum.at(largest, owners, patches)
    apart = with_items_apart(made, times.duration_s, largest, times.pipeline)
    items = ItemCostModel.from_encoder(layout.encoder, flop_per_s=FLOP_PER_S)
    work_s = float(((items.patch_s + items.patch2_s * patches) * patches).sum())
    bubble_s = times.makespan_s * layout.stages * layout.hdp_ranks - times.total_compute_s
    outside, _, _ = _step(layout, made, times, patches, owners, items, in_gaps=False)
    inside, _, _ = _step(layout, made, times, patches, owners, items)
    of_apart, bound, waves = _step(layout, apart, times, patches, owners, items)
    return Result(
        items=len(patches),
        of_bubble=work_s / (bubble_s * layout.tensor_ranks),
        outside=outside,
        inside=inside,
        apart=of_apart,
        bound=bound,
        waves=waves,
    )


def _pictures(layout: Layout, seed: int) -> tuple[Int64Array, Int64Array]:
    """Return patches, and the sequence of each."""
    known = read_sizes(str(SIZES), layout.encoder.resizing).patches
    known = np.minimum(known, layout.tokens // 4 * layout.encoder.patches_per_row)
    rows = layout.share * layout.tokens * layout.hdp_ranks * layout.micro_batches
    wanted = rows * layout.encoder.patches_per_row
    drawn = np.random.default_rng(seed)
    patches = drawn.choice(known, 2 * int(wanted / known.mean()))
    patches = patches[np.cumsum(patches) <= wanted]
    return patches, drawn.integers(0, layout.hdp_ranks * layout.micro_batches, len(patches))


def _step(
    layout: Layout,
    made: Plan,
    times: Evaluation,
    patches: Int64Array,
    owners: Int64Array,
    cost: ItemCostModel,
    *,
    in_gaps: bool = True,
) -> tuple[float, float, int]:
    """Return the step by the one of text alone, its bound, and how many waves it has."""
    tensor_ranks = layout.tensor_ranks
    of_sequence = np.zeros(len(made.lengths), dtype=np.int64)
    of_sequence[made.sequences] = np.arange(made.num_micro_batches)  # one in each
    micro_batches = of_sequence[owners]
    batch = ItemBatch(
        patches=patches,
        consumers=made.ranks[micro_batches] * np.int32(tensor_ranks),
        micro_batches=slots_of_micro_batches(made, times.pipeline)[micro_batches].astype(np.int32),
        num_ranks=layout.stages * layout.hdp_ranks * tensor_ranks,
    )
    choices = gap_choices(made, times, batch.micro_batches, tensor_ranks=tensor_ranks)
    planned, items = plan_in_gaps(batch, cost, choices if in_gaps else choices[:1])
    assert planned.gaps is not None, "it was planned in gaps"
    step_s = joined_step(made, times, planned, items, cost, tensor_ranks=tensor_ranks).step_s
    bound = 1 + items_bound_s(planned, cost) / times.makespan_s
    return step_s / times.makespan_s, bound, len(planned.gaps.wave_starts)


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--seeds", type=int, default=3, help="draws of pictures (default: 3)")
    parser.add_argument(
        "--pictures", type=float, default=1.0, metavar="F", help="as many times as many pictures"
    )
    arguments = parser.parse_args(argv)
    names = ("layout", "GPUs", "PP", "pictures", "work / bubble")
    names += ("outside", "in gaps", "apart", "bound", "waves")
    print(f"| {' | '.join(names)} |", f"|{'---|' * len(names)}", sep="\n")
    for one in LAYOUTS:
        layout = replace(one, share=arguments.pictures * one.share)
        found = [measured(layout, seed) for seed in range(arguments.seeds)]
        columns = [
            layout.name,
            f"{layout.stages * layout.hdp_ranks * layout.tensor_ranks:,}",
            str(layout.stages),
            f"{statistics.mean(one.items for one in found):,.0f}",
            *(
                f"{statistics.median(getattr(one, name) for one in found):.3f}"
                for name in ("of_bubble", "outside", "inside", "apart", "bound")
            ),
            f"{statistics.median(one.waves for one in found):.0f}",
        ]
        print(f"| {' | '.join(columns)} |", flush=True)


if __name__ == "__main__":
    main()
