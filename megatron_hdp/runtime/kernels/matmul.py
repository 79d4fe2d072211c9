"""An exact attention kernel of plain matrix products, for any dtype and device; slow.

It serves float32 and float64 on GPUs, where no flash kernel computes in them, and is what other
kernels are compared with.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megatron_hdp.runtime.kernels.segments import Block, Forward, Gradients

_MAX_SCORES = 1 << 25  # at a time: 128 MiB in float32
_SHORTEST = 64  # queries at a time with a window, however short


class MatmulKernel:
    """Scores of a chunk of queries against all keys that it may see, in at least float32."""

    name = "torch-matmul (exact, slow)"

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: Block, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `kernels.AttentionKernel.forward`."""
        out = torch.empty_like(q)
        lse = torch.empty(q.shape[:2], dtype=_wide(q), device=q.device)
        for rows, keys, scores in _chunks(q, k, block, scale):
            chunk_lse = scores.logsumexp(-1, keepdim=True)
            weights = (scores - chunk_lse).exp()
            out[rows] = _to_rows(weights @ _by_head(v[keys])[:, None]).to(out.dtype)
            lse[rows] = _to_rows(chunk_lse)[..., 0]
        return out, lse

    def backward(self, dout: torch.Tensor, of: Forward, block: Block, scale: float) -> Gradients:
        """See `kernels.AttentionKernel.backward`."""
        q, k, v, out, lse = of
        groups = k.shape[1]
        dq = torch.empty_like(q)
        dk, dv = (torch.zeros(x.shape, dtype=_wide(x), device=x.device) for x in (k, v))
        for rows, keys, scores in _chunks(q, k, block, scale):
            weights = (scores - _to_heads(lse[rows][..., None], groups)).exp()
            dout_c, q_c = (_to_heads(x[rows], groups) for x in (dout, q))
            row_sum = (dout[rows].to(_wide(q)) * out[rows]).sum(-1, keepdim=True)
            dweights = dout_c @ _by_head(v[keys])[:, None].mT - _to_heads(row_sum, groups)
            dscores = weights * dweights * scale
            dq[rows] = _to_rows(dscores @ _by_head(k[keys])[:, None]).to(dq.dtype)
            dk[keys] += (dscores.mT @ q_c).sum(1).transpose(0, 1)  # over the heads of a group
            dv[keys] += (weights.mT @ dout_c).sum(1).transpose(0, 1)
        return dq, dk.to(k.dtype), dv.to(v.dtype)


def _chunks(
    q: torch.Tensor, k: torch.Tensor, block: Block, scale: float
) -> Iterator[tuple[slice, slice, torch.Tensor]]:
    """Rows of some queries, rows of their keys, scores ``[kv_heads, heads / kv_heads, q, k]``.

    With a window, a chunk is about as long as it, so that work grows with the tokens.
    """
    q_start = k_start = 0
    causal, window = block.causal, block.window
    lengths = block.q_segments.lengths, block.k_segments.lengths
    for num_q, num_k in zip(*lengths, strict=True):
        step, later = max(1, _MAX_SCORES // (q.shape[1] * num_k)), num_k - num_q
        if window is not None:
            step = min(max(window, _SHORTEST), max(1, _MAX_SCORES // (q.shape[1] * 2 * window)))
        for first in range(0, num_q, step):
            last = min(first + step, num_q)
            rows, begin = slice(q_start + first, q_start + last), 0
            end = last + later if causal else num_k
            if window is not None:
                begin = max(0, first + later + 1 - window)
            keys = slice(k_start + begin, k_start + end)
            queries = _to_heads(q[rows], k.shape[1])
            scores = queries @ _by_head(k[keys])[:, None].mT * scale
            if causal:
                own = first + later - begin  # the first query's own key
                visible = torch.ones(last - first, end - begin, dtype=torch.bool, device=q.device)
                visible.tril_(own)
                if window is not None:
                    visible.triu_(own + 1 - window)
                scores.masked_fill_(~visible, float("-inf"))
            yield rows, keys, scores
        q_start, k_start = q_start + num_q, k_start + num_k


def _wide(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _by_head(x: torch.Tensor) -> torch.Tensor:
    return x.to(_wide(x)).transpose(0, 1)  # [t, kv_heads, d] -> [kv_heads, t, d]


def _to_heads(x: torch.Tensor, groups: int) -> torch.Tensor:
    """``[t, heads, n]`` -> ``[kv_heads, heads / kv_heads, t, n]``."""
    return x.to(_wide(x)).unflatten(1, (groups, -1)).permute(1, 2, 0, 3)


def _to_rows(x: torch.Tensor) -> torch.Tensor:
    """The inverse of `_to_heads`."""
    return x.permute(2, 0, 1, 3).flatten(1, 2)
