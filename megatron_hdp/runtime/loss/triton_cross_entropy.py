"""The fused loss's elementwise work in two Triton kernels: each reads the logits once.

Import it only where Triton is installed. With ``TRITON_INTERPRET=1`` in the environment before that
it runs on the CPU, slowly, for tests.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megatron_hdp.runtime.loss.rows import TorchRows

_BLOCK = 4096  # columns at a time: 32 bytes a thread in bfloat16, so that loads keep memory busy
_NUM_WARPS = 8
# A model has one vocabulary, so its WIDTH is a constant of the compiled kernel.


@triton.jit
def _statistics(logits, columns, figures, num_rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """One program a row: figures 0 to 2 of the row, see `TorchRows.statistics`."""
    row = tl.program_id(0).to(tl.int64)  # 64K tokens x 128K columns do not fit in 32 bits
    logits += row * WIDTH
    largest = -float("inf")
    total = 0.0
    for start in range(0, WIDTH, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        x = tl.load(logits + offsets, mask=offsets < WIDTH, other=-float("inf"))
        x = x.to(tl.float32)
        before = largest
        largest = tl.maximum(before, tl.max(x, 0))
        total = total * tl.exp(before - largest) + tl.sum(tl.exp(x - largest), 0)
    column = tl.load(columns + row)
    here = (column >= 0) & (column < WIDTH)
    target = tl.load(logits + column, mask=here, other=0.0).to(tl.float32)
    tl.store(figures + row, largest)
    tl.store(figures + num_rows + row, total)
    tl.store(figures + 2 * num_rows + row, target)


@triton.jit
def _gradient(logits, columns, log_sums, weights, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """One program a row and block of columns: the gradient in place of the logits."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * WIDTH
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < WIDTH
    column = tl.load(columns + row)
    log_sum = tl.load(log_sums + row)
    weight = tl.load(weights + row)
    x = tl.load(logits + offsets, mask=inside, other=0.0).to(tl.float32)
    one_hot = tl.where(offsets == column, 1.0, 0.0)
    dlogits = (tl.exp(x - log_sum) - one_hot) * weight
    tl.store(logits + offsets, dlogits.to(logits.dtype.element_ty), mask=inside)


class TritonRows(TorchRows):
    """For bfloat16, float16 or float32 logits; figures are float32."""

    def statistics(
        self, logits: torch.Tensor, columns: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `TorchRows.statistics`; the scores are the logits themselves."""
        assert logits.is_contiguous() and logits.dtype != torch.float64
        num_rows, num_columns = logits.shape
        figures = torch.empty(3, num_rows, dtype=torch.float32, device=logits.device)
        _statistics[(num_rows,)](
            logits,
            columns.contiguous(),
            figures,
            num_rows,
            WIDTH=num_columns,
            BLOCK=_BLOCK,
            num_warps=_NUM_WARPS,
        )
        return logits, figures

    def gradient(
        self,
        scores: torch.Tensor,
        figures: torch.Tensor,
        columns: torch.Tensor,
        log_sums: torch.Tensor,
        weights: torch.Tensor,
    ) -> None:
        """See `TorchRows.gradient`."""
        num_rows, num_columns = scores.shape
        _gradient[(num_rows, triton.cdiv(num_columns, _BLOCK))](
            scores,
            columns.contiguous(),
            log_sums.contiguous(),
            weights.contiguous(),
            WIDTH=num_columns,
            BLOCK=_BLOCK,
            num_warps=_NUM_WARPS,
        )
