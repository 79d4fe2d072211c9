"""The loss's time and memory, from hidden states to gradients: fused against Megatron's logits.

Prints one Markdown table. Rows are measured in turns, in one run: the median of forward + backward,
and the peak of memory above weights and hidden states, which are there anyway. The first row is the
bound: the three matrix products that no exact loss can leave out, chunk by chunk, and nothing else.

    python scripts/gpu/bench_loss.py                          # 32K tokens x 128K vocabulary, bf16
    python scripts/gpu/bench_loss.py --device cpu --small     # float32
"""

import ctypes
import gc
import importlib.metadata
import importlib.util
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from unittest import mock

import torch
import torch.distributed as dist
from common import Budget, machine, parse, table

from megatron_hdp.runtime.loss import fused_cross_entropy as fused
from megatron_hdp.runtime.loss import token_sum_loss

FULL = 32768, 131072, 4096
"""Tokens, entries of the vocabulary, hidden size."""
SMALL = 2048, 8192, 64
BOUND = "the three matrix products alone"
FUSED = "fused (ours)"
MEGATRON = "Megatron, vocab_parallel_cross_entropy"
FUSION = "Megatron, --cross-entropy-loss-fusion"
ROUNDS, SMALL_ROUNDS = 15, 5
HEADER = (
    *("loss", "ms", "/ bound", "/ Megatron's"),
    *("peak GiB", "/ Megatron's", "nats a token", "norm dW"),
)
COMPILING_S = 45.0  # left for it, or it is not begun: the fusion is compiled when it first runs


@dataclass(frozen=True)
class Case:
    """Tensors of one last pipeline stage."""

    hidden: torch.Tensor
    weight: torch.Tensor
    labels: torch.Tensor
    mask: torch.Tensor


@dataclass
class Row:
    """One implementation, and what was measured of it."""

    name: str
    loss: Callable[[Case], torch.Tensor]
    """Loss sum; its backward gives the gradients."""
    times_s: list[float] = field(default_factory=list)
    peak_bytes: int | None = None
    loss_sum: float | None = None
    gradient_norm: float | None = None
    problem: str | None = None


def make_case(sizes: Sequence[int], device: str) -> Case:
    """Random hidden states and weights, one token in sixteen without loss."""
    tokens, vocabulary, hidden_size = sizes
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    generator = torch.Generator(device).manual_seed(1)
    make = partial(torch.randn, generator=generator, device=device, dtype=dtype)
    hidden, weight = make(tokens, hidden_size), make(vocabulary, hidden_size)
    weight.mul_(hidden_size**-0.5)
    labels = torch.randint(vocabulary, (tokens,), generator=generator, device=device)
    mask = torch.arange(tokens, device=device) % 16 != 0
    return Case(hidden.requires_grad_(), weight.requires_grad_(), labels, mask)


def products_alone(case: Case) -> torch.Tensor:
    """Logits, and from them as they are both gradients; the sum of nothing."""
    with torch.no_grad():
        size = len(case.weight) * case.weight.itemsize
        most = fused.LOGITS_BYTES[case.weight.device.type]
        chunk = fused.chunk_tokens(len(case.hidden), size, most)
        dtype = torch.promote_types(case.weight.dtype, torch.float32)
        dweight = torch.zeros_like(case.weight, dtype=dtype)
        dhidden = torch.empty_like(case.hidden)
        buffer = case.weight.new_empty(chunk, len(case.weight))
        for part in case.hidden.split(chunk):
            logits = buffer[: len(part)]
            torch.mm(part, case.weight.t(), out=logits)
            torch.mm(logits, case.weight, out=dhidden[: len(part)])
            fused.add_product(dweight, logits.t(), part)
        return torch.zeros((), device=case.hidden.device)


def fused_loss(case: Case) -> torch.Tensor:
    """What the training command runs."""
    return fused.linear_cross_entropy(case.hidden, case.weight, case.labels, case.mask)


def fused_without_triton(case: Case) -> torch.Tensor:
    """The same with plain PyTorch between the matrix products."""
    with mock.patch.object(fused, "rows_for", lambda *_: fused.TorchRows()):
        return fused_loss(case)


def loss_of_logits(case: Case) -> torch.Tensor:
    """--no-hdp-fused-loss: Megatron's wrapper makes logits float32, then our cross entropy."""
    logits = case.hidden @ case.weight.t()
    return token_sum_loss(logits.float(), case.labels, case.mask)


class Megatron:
    """Megatron's output layer and cross entropy, as GPTModel calls them, on one rank."""

    def __init__(self, stack: ExitStack) -> None:
        from megatron.core import parallel_state
        from megatron.core.model_parallel_config import ModelParallelConfig
        from megatron.core.tensor_parallel import ColumnParallelLinear

        from megatron_hdp.megatron.cpu import shim

        backend = "nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        stack.callback(dist.destroy_process_group)
        if shim.needed():
            stack.enter_context(shim.applied())
        parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
        stack.callback(parallel_state.destroy_model_parallel)
        self.group = parallel_state.get_tensor_model_parallel_group()
        self.config = ModelParallelConfig()
        self.make_layer = partial(
            ColumnParallelLinear,
            config=self.config,
            init_method=torch.nn.init.zeros_,
            bias=False,
            skip_weight_param_allocation=True,
        )

    def _logits(self, case: Case) -> torch.Tensor:
        """``[s, 1, V]``."""
        layer = self.make_layer(case.weight.shape[1], case.weight.shape[0])
        return layer(case.hidden[:, None], weight=case.weight)[0]

    def loss(self, case: Case) -> torch.Tensor:
        """Megatron's default."""
        from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

        losses = vocab_parallel_cross_entropy(self._logits(case), case.labels[:, None])
        return (losses[:, 0].float() * case.mask).sum()

    def fusion(self, case: Case) -> torch.Tensor:
        """--cross-entropy-loss-fusion."""
        from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy

        logits = self._logits(case)
        losses = fused_vocab_parallel_cross_entropy(logits, case.labels[:, None], self.group)
        return (losses[:, 0].float() * case.mask).sum()


def liger_loss(case: Case) -> torch.Tensor:
    """Liger-Kernel's fused loss, its own chunks and precision of sums."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    labels = case.labels.where(case.mask, -100)
    return LigerFusedLinearCrossEntropyLoss(reduction="sum")(case.weight, case.hidden, labels)


def make_rows(device: str, stack: ExitStack) -> list[Row]:
    """What can run here; what cannot is a row that says why."""
    on_gpu = device == "cuda"
    rows = [Row(BOUND, products_alone), Row(FUSED, fused_loss)]
    if on_gpu:
        rows.append(Row("fused, without Triton", fused_without_triton))
    rows.append(Row("logits, then ours (--no-hdp-fused-loss)", loss_of_logits))
    stock = Row(MEGATRON, loss_of_logits)
    fusion = Row(FUSION, loss_of_logits)
    if importlib.util.find_spec("megatron") is None:
        stock.problem = fusion.problem = "megatron-core is not installed"
    else:
        try:
            megatron = Megatron(stack)
            stock.loss, fusion.loss = megatron.loss, megatron.fusion
        except Exception as error:  # ours is measured all the same
            stock.problem = fusion.problem = _in_a_line(error)
        if not on_gpu:
            fusion.problem = "not run on a CPU, for which it would be compiled first"
    liger = Row("Liger-Kernel", liger_loss)
    if not on_gpu or importlib.util.find_spec("liger_kernel") is None:
        liger.problem = "liger-kernel is not installed" if on_gpu else "needs a GPU"
    return [*rows, stock, liger, fusion]


def run_once(row: Row, case: Case) -> float:
    """Seconds of one forward and backward, on a CPU its own; notes a failure in the row."""
    case.hidden.grad = case.weight.grad = None
    _synchronise(case)
    clock = time.perf_counter if case.weight.is_cuda else time.process_time
    start = clock()
    try:
        loss = row.loss(case)
        if loss.requires_grad:
            loss.backward()
        _synchronise(case)
        seconds = clock() - start
        if row.loss_sum is None and loss.requires_grad:
            row.loss_sum = loss.item()
            norm = torch.linalg.vector_norm(case.weight.grad, dtype=torch.float64)
            row.gradient_norm = norm.item()
    except torch.OutOfMemoryError:
        row.problem = "out of memory"
    except Exception as error:  # another implementation's trouble must not end the benchmark
        if row.name in (BOUND, FUSED):
            raise
        row.problem = _in_a_line(error)
    if row.problem is None:
        return seconds
    case.hidden.grad = case.weight.grad = None
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return 0.0


def _in_a_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip()[:80]}".replace("\n", " ")


def measure(rows: Sequence[Row], case: Case, budget: Budget, rounds: int) -> None:
    """Warms up, takes the peaks, then times the rows in turns while there is time."""
    for row in rows:
        if row.name == FUSION and budget.left_s < COMPILING_S:
            row.problem = row.problem or "no time left to compile it"
        if row.problem is None:
            run_once(row, case)
        if row.problem is None:
            peak_bytes = _peak_bytes(row, case)
            row.peak_bytes = peak_bytes if row.problem is None else None
    for _ in range(rounds):
        for row in rows:
            if row.problem is None and (not row.times_s or budget.left_s > 2):
                row.times_s.append(run_once(row, case))


def _synchronise(case: Case) -> None:
    if case.weight.is_cuda:
        torch.cuda.synchronize()


def _peak_bytes(row: Row, case: Case) -> int | None:
    """Bytes above what is there before: of the CUDA allocator, or of the process (Linux)."""
    case.hidden.grad = case.weight.grad = None
    if case.weight.is_cuda:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run_once(row, case)
        return torch.cuda.max_memory_allocated() - before
    if not Path("/proc/self/clear_refs").exists():
        return None
    with suppress(AttributeError):  # pages that malloc keeps would not be seen to be used again
        ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the kernel forgets the peak so far
    before = _status_bytes("VmRSS")
    run_once(row, case)
    return _status_bytes("VmHWM") - before


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/self/status has no {name}")


def cells(rows: Sequence[Row], loss_tokens: int) -> list[list[str]]:
    """The table's lines; ratios are to Megatron's row where it ran."""
    by_name = {row.name: row for row in rows}
    stock, bound = by_name[MEGATRON], by_name[BOUND]
    lines = []
    for row in rows:
        if row.problem is not None:
            lines.append([row.name, row.problem, *[""] * (len(HEADER) - 2)])
            continue
        figures = ["", ""]
        if row.loss_sum is not None and row.gradient_norm is not None:
            figures = [f"{row.loss_sum / loss_tokens:.5f}", f"{row.gradient_norm:.5g}"]
        lines.append(
            [
                row.name,
                f"{1e3 * median(row.times_s):.1f} ({len(row.times_s)} runs)",
                _ratio(median(row.times_s), median(bound.times_s)),
                _ratio(median(row.times_s), median(stock.times_s) if stock.times_s else None),
                "-" if row.peak_bytes is None else f"{row.peak_bytes / 2**30:.3f}",
                _ratio(row.peak_bytes, stock.peak_bytes),
                *figures,
            ]
        )
    return lines


def _ratio(value: float | None, other: float | None) -> str:
    return "-" if value is None or not other else f"{value / other:.2f}"


def versions() -> str:
    """Of the other implementations."""
    found = []
    for name in ("triton", "megatron-core", "liger-kernel"):
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"no {name}")
    return ", ".join(found)


def main() -> None:
    """Runs the benchmark."""
    options, budget = parse((__doc__ or "").splitlines()[0])
    sizes = SMALL if options.small else FULL
    print(f"{machine(options.device)}, {versions()}")
    print("{:,} tokens x {:,} entries x {:,} hidden; ".format(*sizes), end="")
    print(f"logits of a chunk at most {fused.LOGITS_BYTES[options.device] / 2**20:,.0f} MiB\n")
    case = make_case(sizes, options.device)
    with ExitStack() as stack:
        rows = make_rows(options.device, stack)
        measure(rows, case, budget, SMALL_ROUNDS if options.small else ROUNDS)
    lines = cells(rows, int(case.mask.sum()))
    print(table(HEADER, lines))
    ours = next(line for line in lines if line[0] == FUSED)
    print(f"figures: time {ours[3]} (at most 1), peak {ours[5]} (at most 0.25) of Megatron's")


if __name__ == "__main__":
    main()
