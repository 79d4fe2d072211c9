"""TransformerEngine's attention as a backend: its own ring, over our communicator.

Its context-parallel attention (``thd``, point to point) cuts sequences as ours does: head and tail
chunk, every length a multiple of ``2 x degree``. Padding at a sequence's end counts as tokens, as
in our own ring: nothing before it sees it, and the loss leaves it out.
"""

from __future__ import annotations

import os
import re

import torch

from megatron_hdp.runtime.kernels import Segments
from megatron_hdp.runtime.ring import RingComm, RingGroups, TokenLayout

OLDEST = (2, 20, 2)  # earlier ones keep keys, values and output of every step of a ring


class TransformerEngineAttention:
    """Ring slices in one context-parallel call, whole local sequences in another beside it.

    A `DotProductAttention` holds no parameters and is not part of the model: all layers use the
    same two, one for rings (its group is set anew in every call; a backward pass keeps its own) and
    one without.

    Args:
        device: the GPU.

    Raises:
        ImportError, OSError, RuntimeError, AssertionError: it does not load, or a library of its.
        ValueError: it is older than `OLDEST`.
    """

    def __init__(self, device: torch.device) -> None:
        # its fallback of plain matmuls keeps all scores at once: refuse instead
        os.environ.setdefault("NVTE_UNFUSED_ATTN", "0")
        import transformer_engine
        from transformer_engine.pytorch import DotProductAttention

        version = transformer_engine.__version__
        if _numbers(version) < OLDEST:
            oldest = ".".join(map(str, OLDEST))
            raise ValueError(f"found TransformerEngine {version}, expected {oldest} or newer")
        self.name = f"transformer-engine {version}"
        self._new_module = DotProductAttention
        self._modules: dict[tuple[object, ...], torch.nn.Module] = {}
        self._groups: RingGroups | None = None  # of the communicator that is in use
        self._stream = torch.cuda.Stream(device)  # every second step of a ring runs on it

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layout: TokenLayout,
        comm: RingComm,
        scale: float,
    ) -> torch.Tensor:
        """See `attention.AttentionBackend`."""
        if q.shape[0] != layout.num_tokens:
            raise ValueError(f"{q.shape[0]} tokens were given, the layout has {layout.num_tokens}")
        if not layout.ring_slices:
            return self._local(q, k, v, layout.local_segments, scale)
        if not layout.local_lengths:
            return self._ring(q, k, v, layout, comm, scale)
        parts = [layout.ring_tokens, layout.num_tokens - layout.ring_tokens]
        q_ring, q_local = q.split(parts)
        k_ring, k_local = k.split(parts)
        v_ring, v_local = v.split(parts)
        in_ring = self._ring(q_ring, k_ring, v_ring, layout, comm, scale)
        local = self._local(q_local, k_local, v_local, layout.local_segments, scale)
        return torch.cat((in_ring, local))

    def _ring(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layout: TokenLayout,
        comm: RingComm,
        scale: float,
    ) -> torch.Tensor:
        module = self._module("ring", q, k, scale)
        if self._groups is None or self._groups.comm is not comm:
            self._groups = RingGroups(comm)
        group = self._groups.of(layout.ring)
        module.set_context_parallel_group(group, group.members, self._stream, "p2p")
        return _attend(module, q, k, v, layout.whole_segments, is_ring=True)

    def _local(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        segments: Segments,
        scale: float,
    ) -> torch.Tensor:
        return _attend(self._module("local", q, k, scale), q, k, v, segments, is_ring=False)

    def _module(self, kind: str, q: torch.Tensor, k: torch.Tensor, scale: float) -> torch.nn.Module:
        (_, heads, head_dim), kv_heads = q.shape, k.shape[1]
        key = (kind, heads, kv_heads, head_dim, scale)
        if key not in self._modules:
            self._modules[key] = self._new_module(
                heads,
                head_dim,
                num_gqa_groups=kv_heads,
                attention_dropout=0.0,
                qkv_format="thd",
                attn_mask_type="padding_causal",
                softmax_scale=scale,
            )
        return self._modules[key]


def _attend(
    module: torch.nn.Module,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    segments: Segments,
    is_ring: bool,
) -> torch.Tensor:
    """One call; with a ring, `segments` are whole sequences, of which q, k and v hold slices."""
    # it plans anew for every number of sequences; deterministic, it wants memory for each of them
    offsets = segments.offsets if module.deterministic else segments.bucketed_offsets
    longest = (
        -(-segments.longest // 64) * 64
    )  # a bound; rounded, so that fewer shapes are new to it
    # rings want offsets of padded lengths; the same object tells that there is nothing between
    padded = {"cu_seqlens_q_padded": offsets, "cu_seqlens_kv_padded": offsets} if is_ring else {}
    out = module(
        _from_start(q),
        _from_start(k),
        _from_start(v),
        cu_seqlens_q=offsets,
        cu_seqlens_kv=offsets,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        pad_between_seqs=False,
        **padded,
    )
    return out.view(q.shape)


def _from_start(x: torch.Tensor) -> torch.Tensor:
    """TransformerEngine knows no layout of a contiguous tensor that begins inside its storage."""
    return x.clone() if x.storage_offset() and x.is_contiguous() else x


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])
