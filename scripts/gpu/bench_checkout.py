"""Training speed of a Megatron-LM checkout on one GPU: stock, and under HDP.

Prints a Markdown table. The model, its kernels and the documents are the same in each row; stock
trains on samples of ``--seq-length`` tokens in which documents follow each other and see the ones
before, HDP on documents by themselves, as many as make the same tokens a step on average. Figures
are medians over the steps behind the first ones, of which Megatron logs the time.

    MEGATRON_LM_PATH=~/Megatron-LM python scripts/gpu/bench_checkout.py
    MEGATRON_LM_PATH=... python scripts/gpu/bench_checkout.py --device cpu --small    # HDP alone
"""

import os
import re
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import orjson
from common import Budget, machine, parse, row, table

from megatron_hdp.data import TokenWriter

ROOT = Path(__file__).parents[2]
HEADER = ("run", "tokens/s", "of HDP's", "ms a step", "TFLOP/s by Megatron", "peak GiB", "steps")
COMMON = """
    --micro-batch-size 1 --lr 1e-4 --lr-decay-iters 1000 --clip-grad 1.0
    --position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear
    --untie-embeddings-and-output-weights
    --attention-dropout 0 --hidden-dropout 0 --tokenizer-type NullTokenizer --split 100,0,0
    --log-interval 1 --log-throughput --eval-iters 0 --eval-interval 1000 --num-workers 1
    --use-distributed-optimizer --no-gradient-accumulation-fusion
"""
ON_GPU = """
    --bf16 --transformer-impl transformer_engine --num-layers 16 --hidden-size 2048
    --ffn-hidden-size 5632 --num-attention-heads 16 --group-query-attention --num-query-groups 8
    --vocab-size 31999 --no-create-attention-mask-in-dataloader
"""
ON_CPU = """
    --num-layers 2 --hidden-size 32 --num-attention-heads 4 --vocab-size 300
    --distributed-backend gloo --transformer-impl local --no-persist-layer-norm
    --no-masked-softmax-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion
    --use-cpu-initialization
    --no-create-attention-mask-in-dataloader
"""
FP8 = "--fp8-format hybrid --fp8-recipe tensorwise"
RUNS = {"HDP": "hdp", "stock": "", "HDP, FP8": f"hdp {FP8}", "stock, FP8": FP8}
_FIRST = 4  # steps that also build and compile
_STEP = re.compile(
    r"elapsed time per iteration \(ms\): ([\d.]+) \|"
    r"(?: throughput per GPU \(TFLOP/s/GPU\): ([\d.]+))?"
)
_PEAK = re.compile(r"max allocated: ([\d.]+)")


@dataclass(frozen=True)
class Sizes:
    """What is trained on."""

    context: int
    samples: int
    """Of `context` tokens in a step of stock."""
    median_length: int
    steps: int
    vocabulary: int


def sizes_of(small: bool) -> Sizes:
    """Return sizes for a GPU of 80 GB, or for any CPU."""
    return Sizes(256, 2, 32, 6, 300) if small else Sizes(32_768, 2, 1024, 12, 31_999)


def lengths_of(sizes: Sizes) -> np.ndarray:
    """Of documents for all steps: lognormal, at most the context; each a document's tokens."""
    draw = np.random.default_rng(0)
    needed = sizes.context * sizes.samples * sizes.steps * 2
    drawn = np.exp(draw.normal(np.log(sizes.median_length), 1.4, size=needed // 8))
    lengths = np.clip(drawn, 8, sizes.context).astype(np.int64)
    return lengths[: int(np.searchsorted(np.cumsum(lengths), needed))]


def write(prefix: Path, lengths: np.ndarray, vocabulary: int) -> None:
    """Write random documents of these lengths."""
    draw = np.random.default_rng(1)
    with TokenWriter(prefix, vocabulary + 1) as writer:
        for length in lengths.tolist():
            writer.add(draw.integers(0, vocabulary, length))


def command_of(
    name: str, folder: Path, sizes: Sizes, lengths: np.ndarray, device: str
) -> list[str]:
    """The command of a run, which writes its metrics into the folder under HDP."""
    words = shlex.split(RUNS[name])
    is_hdp = "hdp" in words
    flags = shlex.split(COMMON) + shlex.split(ON_GPU if device == "cuda" else ON_CPU)
    flags += [word for word in words if word != "hdp"]
    flags += ["--seq-length", str(sizes.context), "--max-position-embeddings", str(sizes.context)]
    flags += ["--data-path", str(folder / "corpus"), "--train-iters", str(sizes.steps)]
    number = sizes.samples
    if is_hdp:
        number = round(sizes.samples * sizes.context / float(lengths.mean()))
        flags += ["--hybrid-data-parallel", "--hdp-tokens-per-rank", str(sizes.context)]
        flags += ["--metrics-path", str(folder / "metrics.jsonl")]
    flags += ["--global-batch-size", str(number)]
    script = Path(os.environ["MEGATRON_LM_PATH"], "pretrain_gpt.py")
    plugin = ["-m", "megatron_hdp", "run"] if is_hdp else []
    return [sys.executable, *plugin, str(script), *flags]


def cells_of(text: str, folder: Path, sizes: Sizes) -> list[float] | None:
    """Tokens a second, milliseconds, TFLOP/s, peak GiB, steps; None where there are no steps."""
    steps = _STEP.findall(text)[_FIRST:]
    if not steps:
        return None
    milliseconds = [float(ms) for ms, _ in steps]
    metrics = folder / "metrics.jsonl"
    tokens = [sizes.samples * sizes.context] * len(steps)
    if metrics.exists():
        lines = [orjson.loads(line) for line in metrics.read_bytes().splitlines()]
        tokens = [line["tokens"] for line in lines[_FIRST:]]
    rates = [1e3 * one / ms for one, ms in zip(tokens, milliseconds, strict=True)]
    flops = [float(rate or 0) for _, rate in steps]
    peak = max(map(float, _PEAK.findall(text)), default=0.0) / 1024
    return [median(rates), median(milliseconds), median(flops), peak, len(steps)]


def run(command: list[str], timeout_s: float) -> str:
    """Run one rank; returns its output.

    Raises:
        RuntimeError: it failed or took too long, with its last line.
    """
    paths = [os.environ["MEGATRON_LM_PATH"], str(ROOT), *sys.path]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29507",
    }
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=timeout_s
        )
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"not ready after {timeout_s:.0f} s") from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise RuntimeError(" / ".join(lines[-3:])[-400:] or "no word")
    return done.stdout + done.stderr


def main() -> int:
    """Print the table; returns the exit code: 1 if a run failed."""
    options, budget = parse(__doc__.splitlines()[0], seconds=240)
    if "MEGATRON_LM_PATH" not in os.environ:
        print("found no MEGATRON_LM_PATH: expected a checkout's folder")
        return 2
    sizes = sizes_of(options.small)
    lengths = lengths_of(sizes)
    print(f"Megatron-LM checkout: {machine(options.device)}\n")
    print(
        f"{len(lengths):,} documents, median {np.median(lengths):,.0f} tokens, mean "
        f"{lengths.mean():,.0f}, longest {lengths.max():,}; {sizes.samples} x {sizes.context:,} "
        "tokens a step\n"
    )
    print(table(HEADER), flush=True)
    return _print_rows(sizes, lengths, options.device, budget)


def _print_rows(sizes: Sizes, lengths: np.ndarray, device: str, budget: Budget) -> int:
    figures, failed, first = [], False, None
    for name in RUNS if device == "cuda" else ("HDP",):  # stock needs a GPU
        if budget.left_s < 20:
            print(row([name, "no time left", "", "", "", "", ""]))
            continue
        with tempfile.TemporaryDirectory() as text:
            folder = Path(text)
            write(folder / "corpus", lengths, sizes.vocabulary)
            try:
                output = run(command_of(name, folder, sizes, lengths, device), budget.left_s)
                cells = cells_of(output, folder, sizes)
            except RuntimeError as error:
                failed, cells = True, None
                print(row([name, str(error).replace("|", "/"), "", "", "", "", ""]), flush=True)
                continue
        if cells is None:
            failed = True
            print(row([name, "no steps in its log", "", "", "", "", ""]), flush=True)
            continue
        rate, milliseconds, flops, peak, number = cells
        first = first or rate
        figures.append(f"{name}: {rate:,.0f} tokens/s")
        ratio = f"{rate / first:.2f}"
        numbers = f"{milliseconds:,.0f}", f"{flops:.0f}", f"{peak:.1f}", f"{number:.0f}"
        print(row([name, f"{rate:,.0f}", ratio, *numbers]), flush=True)
    print(f"\nfigures: {'; '.join(figures)}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
