"""Selective activation offload on one GPU: time and peak memory by ratio, predicted and measured.

A 7B-shaped stack of layers, as many as fit, runs forward and backward of one micro-batch through
the executor of the training command. The memory model gets its coefficients from two small
micro-batches without offload; it decides how many layers fit and predicts every peak in the table.
"""

import gc
import os
from dataclasses import dataclass, replace

import numpy as np
import torch
from common import Budget, machine, parse, peak_bytes, row, seconds_of, table

from megatron_hdp.data.steps import RankMicroBatch, padding_micro_batch
from megatron_hdp.megatron import parallel
from megatron_hdp.megatron.execution import HdpExecutor
from megatron_hdp.megatron.model import build_chunks
from megatron_hdp.megatron.options import TrainingArguments, parse_arguments
from megatron_hdp.megatron.step import build_executor
from megatron_hdp.runtime.timeline import Timeline

VOCABULARY = 32_000
FLAGS = """
    --group-query-attention --normalization RMSNorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --train-iters 1
    --lr 1e-4 --global-batch-size 1 --hybrid-data-parallel --stall-timeout-seconds 600
"""
LLAMA_7B = """
    --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32 --num-query-groups 8
    --kv-channels 128 --bf16
"""
TINY = """
    --hidden-size 64 --ffn-hidden-size 160 --num-attention-heads 4 --num-query-groups 2
    --kv-channels 16
"""
RATIOS = (0.0, 1.0, 0.5, 0.25, 0.75)  # the most telling ones first, should time run out
HEADER = ("tokens", "layers", "ratio", "seconds", "of r = 0", "peak GB", "of r = 0", "predicted GB")


@dataclass(frozen=True)
class Sizes:
    """What to measure."""

    tokens: tuple[int, ...]
    small_tokens: tuple[int, int]
    """Micro-batches that the memory model is fitted to."""
    shape: str
    """Flags of the training command."""
    host_bytes: float
    """How much may wait in host memory."""
    most_layers: int


def sizes_of(small: bool) -> Sizes:
    """Return sizes for a GPU of 80 GB or more, or for any CPU.

    A GiB of host memory takes half a second to pin, so not all that a GPU may fill leaves.
    """
    if small:
        return Sizes((256, 512), (64, 128), TINY, 1e9, 4)
    tokens = (65_536, 262_144, 131_072, 32_768)
    return Sizes(tokens, (4096, 8192), LLAMA_7B, 24e9, 16)


def arguments_of(sizes: Sizes, num_layers: int) -> TrainingArguments:
    """Return a run of so many layers on this one rank."""
    longest = max(sizes.tokens)
    flags = f"{FLAGS} {sizes.shape} --num-layers {num_layers} --seq-length {longest}"
    flags += f" --max-position-embeddings {longest} --hdp-tokens-per-rank {longest}"
    return parse_arguments(flags.split(), needs_data=False)


def executor_of(sizes: Sizes, num_layers: int) -> HdpExecutor:
    """Return so many layers, ready to run."""
    arguments = arguments_of(sizes, num_layers)
    parallel.set_seeds(1)
    return build_executor(arguments, build_chunks(arguments, VOCABULARY), Timeline())


def micro_batch_of(tokens: int, ratio: float) -> RankMicroBatch:
    """One sequence of random tokens, all of which carry loss."""
    draw = np.random.default_rng(0)
    return replace(
        padding_micro_batch(0, tokens),
        tokens=draw.integers(0, VOCABULARY, tokens),
        labels=draw.integers(0, VOCABULARY, tokens),
        loss_mask=np.ones(tokens, dtype=np.bool_),
        offload_ratio=ratio,
    )


def run(executor: HdpExecutor, tokens: int, ratio: float) -> None:
    """Runs forward and backward of one micro-batch."""
    executor.chunks[0].zero_grad_buffer()
    executor.run([micro_batch_of(tokens, ratio)], tokens)


@dataclass(frozen=True)
class MemoryModel:
    """Peak memory of a rank, by tokens and offload ratio (paper, equation 3)."""

    num_layers: int
    activation_bytes_per_token: float
    """What one layer keeps of one token between forward and backward."""
    workspace_bytes_per_token: float
    """More at the busiest moment: gradients of activations, the loss."""
    fixed_bytes: float
    """Whatever is run: weights, gradients, optimizer state, buffers."""

    def peak_bytes(self, tokens: int, ratio: float) -> float:
        """Of a micro-batch; two layers never leave the device."""
        return self.fixed_bytes + tokens * self._bytes_per_token(ratio)

    def most_tokens(self, memory_bytes: float, ratio: float) -> int:
        """Tokens of the largest micro-batch whose peak is within the memory; 0 if none is."""
        return max(0, int((memory_bytes - self.fixed_bytes) / self._bytes_per_token(ratio)))

    def _bytes_per_token(self, ratio: float) -> float:
        kept = min(2, self.num_layers)
        resident = kept + (1 - ratio) * (self.num_layers - kept)
        return resident * self.activation_bytes_per_token + self.workspace_bytes_per_token


def memory_model(executor: HdpExecutor, sizes: Sizes) -> MemoryModel:
    """Fitted to two small micro-batches; the first run of each also warms the device up."""
    peaks = []
    for tokens in sizes.small_tokens:
        run(executor, tokens, 0.0)
        peak = peak_bytes(lambda tokens=tokens: run(executor, tokens, 0.0))
        peaks.append((tokens, float(peak)))
    slope, fixed = np.polyfit(*zip(*peaks, strict=True), 1)
    layers, of_layer = len(executor.layers), executor.activation_bytes_per_token()
    return MemoryModel(layers, of_layer, float(slope) - layers * of_layer, float(fixed))


def layers_that_fit(model: MemoryModel, tokens: int, memory_bytes: float, sizes: Sizes) -> int:
    """The most layers that train `tokens` without offload, 3 at least so that one may leave."""
    of_layer = model.activation_bytes_per_token * tokens
    weights = model.fixed_bytes / model.num_layers  # embeddings included: rather too much
    workspace = model.workspace_bytes_per_token * tokens
    by_memory = (0.92 * memory_bytes - workspace) / (of_layer + weights)
    by_host = 2 + sizes.host_bytes / of_layer
    return max(3, min(int(by_memory), int(by_host), sizes.most_layers))


def measure(
    executor: HdpExecutor, tokens: int, ratio: float, device: str
) -> tuple[float, int | None]:
    """Seconds and peak bytes of one micro-batch, after one that fills the pool of host memory."""
    run(executor, tokens, ratio)
    times: list[float] = []

    def timed() -> None:
        times.append(seconds_of(lambda: run(executor, tokens, ratio), device))

    if device == "cuda":
        peak = peak_bytes(timed)
        return times[0], peak
    timed()
    return times[0], None


def print_rows(
    tokens: int, executor: HdpExecutor, model: MemoryModel | None, device: str, budget: Budget
) -> list[str]:
    """Prints the table's rows of one length, one by one; returns its figures in short."""
    base: tuple[float, int | None] | None = None
    figures = []
    for ratio in RATIOS:
        first = [f"{tokens:,}", str(len(executor.layers)), f"{ratio:.2f}"]
        predicted = f"{model.peak_bytes(tokens, ratio) / 1e9:.1f}" if model else "-"
        if base is not None and budget.left_s < 3 * base[0]:
            print(row([*first, "no time left", "", "", "", predicted]), flush=True)
            continue
        try:
            seconds, peak = measure(executor, tokens, ratio, device)
        except torch.cuda.OutOfMemoryError:
            torch.cuda.empty_cache()
            print(row([*first, "out of memory", "", "", "", predicted]), flush=True)
            continue
        if ratio == 0.0:
            base = (seconds, peak)
        slower = f"{seconds / base[0] - 1:+.0%}" if base else "-"
        measured = f"{peak / 1e9:.1f}" if peak else "-"
        saved = f"{peak / base[1] - 1:+.0%}" if peak and base and base[1] else "-"
        cells = [*first, f"{seconds:.3f}", slower, measured, saved, predicted]
        print(row(cells), flush=True)
        if ratio > 0:
            figures.append(f"{tokens:,} r = {ratio}: time {slower}, memory {saved}")
    return figures


def on_gpu(sizes: Sizes, budget: Budget) -> list[str]:
    """As many layers as fit at each length; then how long a micro-batch may be."""
    figures = []
    memory_bytes = torch.cuda.mem_get_info()[1]
    probed = memory_model(executor_of(sizes, 3), sizes)
    for tokens in sizes.tokens:
        gc.collect()  # models that are gone give their memory back
        torch.cuda.empty_cache()
        executor = executor_of(sizes, layers_that_fit(probed, tokens, memory_bytes, sizes))
        model = memory_model(executor, sizes)
        figures += print_rows(tokens, executor, model, "cuda", budget)
        del executor
    # embeddings count as layers: rather too much
    fixed_bytes = 8 * probed.fixed_bytes / probed.num_layers
    larger = replace(probed, num_layers=8, fixed_bytes=fixed_bytes)
    most = [(ratio, larger.most_tokens(0.95 * memory_bytes, ratio)) for ratio in (0.0, 0.5, 1.0)]
    told = ", ".join(f"{tokens:,} at r = {ratio}" for ratio, tokens in most)
    print(f"\nLongest micro-batch of 8 such layers here, by the memory model: {told}", flush=True)
    return figures


def main() -> None:
    """Prints the table."""
    options, budget = parse(__doc__ or "", seconds=150)
    sizes = sizes_of(options.small)
    os.environ.update({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"})
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "0")
    arguments = arguments_of(sizes, 3)
    parallel.join_job(arguments)
    parallel.initialise(arguments)
    print(f"Offload: {machine(options.device)}\n")
    print(table(HEADER), flush=True)
    figures = on_gpu(sizes, budget) if options.device == "cuda" else []
    for tokens in sizes.tokens if options.device == "cpu" else ():
        executor = executor_of(sizes, sizes.most_layers)
        figures += print_rows(tokens, executor, None, "cpu", budget)
    print(f"\nfigures: {'; '.join(figures)}", flush=True)
    parallel.finish()
    parallel.leave_job()


if __name__ == "__main__":
    main()
