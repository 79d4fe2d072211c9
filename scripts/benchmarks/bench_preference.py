"""DPO on long-tailed pairs: packed and balanced, and pairs kept on one rank, padded, side by side.

Both run in the same processes (gloo, a thread a rank) over the same weights and take turns in each
step. *Kept* is what a loop does that needs a pair's loss in one place: a rank takes micro-batches
of pairs in the order of the data, padded to their longest side, forward and backward once.
*Balanced* is `preference_step`: any side anywhere, nothing padded, for one more forward. Then
larger steps of Llama 3.1 8B, the same placements by the planner's evaluator.
Run: ``python scripts/benchmarks/bench_preference.py``.
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

from megatron_hdp.arrays import Int64Array
from megatron_hdp.planner import CostModel, Plan, evaluate, plan
from megatron_hdp.runtime.loss import Preference

VOCABULARY = 256
OBJECTIVE = Preference(kind="dpo")
FLAGS = ("--config", "configs/tiny-cpu.yaml")
LLAMA_8B = CostModel.from_model_shape(
    num_layers=32, hidden_size=4096, num_parameters=8.03e9, kv_bytes_per_token=131_072
)
FORWARD = 1 / 3  # of the time of forward and backward


def drawn(seed: int, pairs: int, longest: int) -> tuple[Int64Array, Int64Array]:
    """Tokens of prompts ``[pairs]``, and of prompts with answers ``[pairs, 2]``; log-normal."""
    data = np.random.default_rng(seed)
    prompts = np.minimum(data.lognormal(np.log(longest / 32), 1.2, pairs) + 2, longest / 2)
    answers = data.lognormal(np.log(longest / 32), 1.0, (pairs, 2)) + 2
    sides = np.minimum(prompts.astype(int)[:, None] + answers.astype(int), longest)
    return prompts.astype(int), sides


def padded(sides: Int64Array, together: int) -> Int64Array:
    """Tokens of sides where those of `together` pairs are as long as the longest of them."""
    groups = np.arange(0, len(sides), together)
    longest = np.maximum.reduceat(sides.max(axis=1), groups)
    return np.repeat(longest, together)[: len(sides), None].repeat(2, axis=1)


def kept(lengths: Int64Array, ranks: int, together: int) -> Plan:
    """The plan in which ranks take micro-batches of pairs in turn, each on one rank."""
    num = len(lengths)
    of_each = np.append(np.arange(0, num, 2 * together), num)
    micro_batches = len(of_each) - 1
    return Plan(
        num_ranks=ranks,
        tokens_per_rank=int(np.add.reduceat(lengths, of_each[:-1]).max()),
        strategy="kept",
        lengths=lengths,
        rank_offsets=np.arange(micro_batches + 1),
        ranks=np.arange(micro_batches) % ranks,
        sequence_offsets=of_each,
        sequences=np.arange(num),
        local_offsets=np.zeros(micro_batches + 1),
        local_sequences=[],
        local_ranks=[],
        offload_ratios=np.zeros(micro_batches),
    )


def batch_of(step: int, settings: argparse.Namespace, together: int) -> Any:
    """A step's sides, chosen and rejected in turn; padded if `together` is not 0."""
    from megatron_hdp.session import TokenBatch

    prompts, sides = drawn(step, settings.pairs, settings.longest)
    data = np.random.default_rng(1000 + step)
    room = padded(sides, together) if together else sides
    tokens, answers = [], []
    for prompt, pair, wide in zip(prompts, sides, room, strict=True):
        before = data.integers(0, VOCABULARY, prompt)
        for length, end in zip(pair, wide, strict=True):
            side = np.append(before, data.integers(0, VOCABULARY, length - prompt))
            at = np.arange(end)
            tokens.append(np.append(side, np.zeros(end - length, dtype=int)))
            answers.append((at >= prompt) & (at < length))
    return TokenBatch(tokens, answers)


def reference_of(batch: Any) -> list[float]:
    """Sums of the answers by a model to which all tokens are the same."""
    return [-float(one.sum()) * float(np.log(VOCABULARY)) for one in batch.loss_mask]


def kept_step(session: Any, batch: Any, together: int) -> float:
    """The loss of a step whose pairs are whole on their ranks: forward and backward once."""
    from megatron_hdp.session import FromLogProbs, TokenBatch

    known = torch.tensor(reference_of(batch), dtype=torch.float64)
    lengths = np.array([len(one) for one in batch.tokens])

    def loss(found: torch.Tensor, arrays: Any) -> torch.Tensor:
        ids, places = arrays["side"].unique(return_inverse=True)  # of whole pairs, by the plan
        sums = torch.zeros(len(ids), dtype=torch.float64).index_add(0, places, found.double())
        counts, pairs = places.bincount(), torch.arange(len(ids)).view(-1, 2)
        return OBJECTIVE.losses(sums - known[ids], counts, pairs)[0].sum()

    sides = [np.full(length, i) for i, length in enumerate(lengths)]
    given = TokenBatch(batch.tokens, batch.loss_mask, arrays={"side": sides})
    made = kept(lengths, dist.get_world_size(), together)
    report = session.step(given, FromLogProbs(loss), divisor=len(sides) // 2, plan=made)
    return float(report.loss)


def balanced_step(session: Any, batch: Any) -> float:
    """The loss of a step by `preference_step`."""
    from megatron_hdp.session import preference_step

    pairs = np.arange(len(batch.tokens)).reshape(-1, 2).tolist()
    return preference_step(session, batch, pairs, OBJECTIVE, reference_of(batch)).loss


def measure(rank: int, settings: argparse.Namespace, folder: str) -> None:
    """Body of a rank; the first prints."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(settings.ranks), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(settings.port)}
    torch.set_num_threads(1)
    from megatron_hdp.session import HdpSession

    sizes = ("--seq-length", settings.longest, "--hdp-tokens-per-rank", settings.tokens)
    session = HdpSession.from_flags([*FLAGS, *map(str, sizes)], vocab_size=VOCABULARY)
    parameters = [one for chunk in session.chunks for one in chunk.parameters()]
    rows, ways = [], [0, *settings.together]
    for step in range(settings.steps + 1):  # the first is not counted
        row: dict[int, dict[str, float]] = {}
        for together in ways[:: 1 if step % 2 else -1]:  # they take turns
            batch = batch_of(step, settings, together)
            dist.barrier()
            begin, cpu = perf_counter(), process_time()
            if together:
                loss = kept_step(session, batch, together)
            else:
                loss = balanced_step(session, batch)
            busy = torch.tensor(process_time() - cpu, dtype=torch.float64)
            dist.barrier()
            taken_s = perf_counter() - begin
            every = [torch.empty_like(busy) for _ in range(settings.ranks)]
            dist.all_gather(every, busy)
            norm = sum(float(one.main_grad.double().norm() ** 2) for one in parameters) ** 0.5
            row[together] = {
                "s": taken_s,
                "busiest": max(map(float, every)),
                "all": sum(map(float, every)),
                "tokens": sum(map(len, batch.tokens)),
                "loss": loss,
                "norm": norm,
            }
        rows.append(row)
    if rank == 0:
        told(rows[1:], settings)
    session.close()


def told(rows: list[dict[int, dict[str, float]]], settings: argparse.Namespace) -> None:
    """Prints a row for each way, and how far losses and gradients are apart."""
    keys = ("tokens", "s", "busiest", "all")
    print(
        f"{settings.ranks} ranks, {settings.pairs} pairs a step of sides up to "
        f"{settings.longest:,} tokens; medians of {len(rows)} steps, in parentheses those of each "
        "step's ratio to balanced\n\n"
        "| pairs | tokens a step | s a step | CPU s, busiest rank | CPU s, all ranks |\n"
        "|---|---|---|---|---|"
    )
    for together in (0, *settings.together):
        cells = [f"kept, micro-batches of {together}" if together else "balanced"]
        for key in keys:
            middle = median(row[together][key] for row in rows)
            cell = f"{middle:,.0f}" if key == "tokens" else f"{middle:.2f}"
            ratio = median(row[together][key] / row[0][key] for row in rows)
            cells.append(f"{cell} ({ratio:.2f})" if together else cell)
        print(f"| {' | '.join(cells)} |")
    for what in ("loss", "norm"):
        apart = max(
            abs(row[one][what] / row[0][what] - 1) for row in rows for one in settings.together
        )
        print(f"largest relative difference of the {what}: {apart:.1e}")


def simulate(settings: argparse.Namespace) -> None:
    """Prints a row for each number of ranks, and of pairs in a micro-batch where they are kept."""
    longest, room = settings.simulated_longest, settings.simulated_tokens
    print(
        f"\nLlama 3.1 8B, {settings.simulated_pairs} pairs a rank of sides up to {longest:,} "
        f"tokens, balanced in {room:,} tokens a rank; medians of {settings.steps} steps\n\n"
        "| ranks | pairs in a micro-batch that is kept | tokens, kept / balanced | balanced, s | "
        "kept, s | kept / balanced |\n|---|---|---|---|---|---|"
    )
    for ranks in settings.simulated_ranks:
        for together in settings.together:
            rows = []
            for step in range(settings.steps):
                _, sides = drawn(step, settings.simulated_pairs * ranks, longest)
                lengths = padded(sides, together).ravel()
                made = plan(sides.ravel(), ranks=ranks, tokens_per_rank=room, cost_model=LLAMA_8B)
                ours_s = (1 + FORWARD) * evaluate(made, LLAMA_8B).makespan_s
                others_s = evaluate(kept(lengths, ranks, together), LLAMA_8B).makespan_s
                rows.append((lengths.sum() / sides.sum(), ours_s, others_s, others_s / ours_s))
            cells = [f"{median(one):.2f}" for one in zip(*rows, strict=True)]
            print(f"| {ranks:,} | {together} | {' | '.join(cells)} |")


def main() -> None:
    """Starts the ranks, then simulates."""
    from megatron_hdp.processes.ports import free_port

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for flag, number, of in (
        ("ranks", 4, "processes"),
        ("steps", 5, "steps that are measured"),
        ("pairs", 32, "pairs a step"),
        ("longest", 8192, "tokens of a side at most"),
        ("tokens", 4096, "tokens that a rank can hold where they are not"),
        ("simulated-pairs", 8, "the same by simulation, for each rank"),
        ("simulated-longest", 32768, "the same by simulation"),
        ("simulated-tokens", 16384, "the same by simulation"),
    ):
        parser.add_argument(f"--{flag}", type=int, default=number, help=f"{of} ({number})")
    for flag, numbers, of in (
        ("together", [1, 4], "pairs of a micro-batch where they are kept on one rank (1 4)"),
        ("simulated-ranks", [64, 1024], "the ranks of the simulation (64 1024)"),
    ):
        parser.add_argument(f"--{flag}", type=int, nargs="+", default=numbers, help=of)
    settings = parser.parse_args()
    settings.port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(measure, (settings, folder), nprocs=settings.ranks)
    simulate(settings)


if __name__ == "__main__":
    main()
