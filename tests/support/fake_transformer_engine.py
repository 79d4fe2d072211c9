"""TransformerEngine by its interface, on a CPU: how it wants to be called, how it chooses kernels.

Its attention is our own ring's; the group that it is given is used as TransformerEngine does. It
chooses as version 2.20.2 does on a GPU of the Hopper generation, by what matters here.
"""

import logging
import os
import sys
import types
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_hdp.runtime.kernels.block import CpuFlashKernel
from megatron_hdp.runtime.kernels.padded import PaddedKernel
from megatron_hdp.runtime.kernels.segments import bucket
from megatron_hdp.runtime.ring.attention import RingAttention
from megatron_hdp.runtime.ring.layout import TokenLayout

flash_attn_is_installed = False
chosen = []
"""The parameters of every choice."""

_attention_backends = dict.fromkeys(
    ("attention_params", "use_unfused_attention")
    + ("use_flash_attention", "flash_attention_backend")
    + ("use_fused_attention", "fused_attention_backend")
)
_attention_backends["backend_selection_requires_update"] = False


@dataclass
class OldAttentionParams:
    """Those of its fields that matter here, by its names, as from 2.3 on."""

    batch_size: int
    num_heads: int
    num_gqa_groups: int
    max_seqlen_q: int
    max_seqlen_kv: int
    context_parallel: bool
    deterministic: bool


@dataclass
class AttentionParams(OldAttentionParams):
    """As of 2.20.2."""

    cp_size: int
    num_tokens_q: int
    num_tokens_kv: int


class AttentionLogging:
    _log_level = logging.WARNING


def get_attention_backend(attention_params=None):
    """(flash, its version, fused, its number, unfused, all that would do)."""
    params = attention_params
    chosen.append(params)
    flash = flash_attn_is_installed and os.environ.get("NVTE_FLASH_ATTN", "1") == "1"
    fused = os.environ.get("NVTE_FUSED_ATTN", "1") == "1"
    unfused = os.environ.get("NVTE_UNFUSED_ATTN", "1") == "1" and not params.context_parallel
    scores = params.batch_size * params.num_heads * params.max_seqlen_q * params.max_seqlen_kv
    fused &= not (params.deterministic and scores >= 1 << 30)
    if isinstance(params, AttentionParams):
        most = params.batch_size * params.max_seqlen_q // params.cp_size
        fused &= params.num_tokens_q <= most  # 2.20.2 puts all of them into a graph
    available = [flash, fused, unfused]
    flash &= not fused
    unfused &= not (fused or flash)
    logger = logging.getLogger("DotProductAttention")
    logger.setLevel(AttentionLogging._log_level)
    if not fused:
        logger.debug("Disabling FusedAttention due to NVTE_FUSED_ATTN=%s", 0)
    logger.debug("Available backends = {FusedAttention=%s}", fused)
    return flash, "2.8.3" if flash else None, fused, 1 if fused else None, unfused, available


class DotProductAttention(torch.nn.Module):
    made = 0

    def __init__(self, num_heads, head_dim, num_gqa_groups, **how):
        super().__init__()
        type(self).made += 1
        assert how.pop("qkv_format") == "thd" and how.pop("attn_mask_type") == "padding_causal"
        assert how.pop("attention_dropout") == 0.0
        sizes = head_dim if isinstance(head_dim, tuple) else (head_dim, head_dim)
        self.shapes = (num_heads, num_gqa_groups, *sizes)
        self.scale = how.pop("softmax_scale")
        assert not how
        self.group = self.members = None
        self.deterministic = torch.are_deterministic_algorithms_enabled()

    def set_context_parallel_group(self, group, members, stream, kind):
        assert isinstance(group, dist.ProcessGroup) and kind == "p2p" and stream == "a stream"
        self.group, self.members = group, members

    def forward(self, q, k, v, *, cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv, **how):
        assert (q.shape[1], k.shape[1], q.shape[2], v.shape[2]) == self.shapes
        for x in (q, k, v):  # what it knows a memory layout for
            assert x.stride() == (x.shape[1] * x.shape[2], x.shape[2], 1)
            assert x.storage_offset() == 0
        assert cu_seqlens_q is cu_seqlens_kv and cu_seqlens_q.dtype == torch.int32
        assert not how.pop("pad_between_seqs")
        counts = tuple(cu_seqlens_q.diff().tolist())
        lengths = tuple(n for n in counts if n)
        assert counts[: len(lengths)] == lengths, "empty ones are behind"
        assert len(counts) == (len(lengths) if self.deterministic else bucket(len(lengths)))
        assert max_seqlen_q == max_seqlen_kv >= max(lengths) and max_seqlen_q % 64 == 0
        self._choose(q, k, len(counts), max_seqlen_q)
        kernel = RingAttention(PaddedKernel(CpuFlashKernel()))
        if self.group is None:
            assert not how
            layout = TokenLayout((0,), 0, (), lengths)
            return kernel(q, k, v, layout, None, self.scale).flatten(1)
        assert how.pop("cu_seqlens_q_padded") is how.pop("cu_seqlens_kv_padded") is cu_seqlens_q
        assert not how
        size, place = dist.get_world_size(self.group), dist.get_rank(self.group)
        assert all(n % (2 * size) == 0 for n in lengths)
        layout = TokenLayout(tuple(range(size)), place, tuple(n // size for n in lengths), ())
        comm = OverGroup(self.group, self.members)
        return kernel(q, k, v, layout, comm, self.scale).flatten(1)

    def _choose(self, q, k, num_sequences, longest):
        """Anew where the parameters are not those of the last choice."""
        size = 1 if self.group is None else dist.get_world_size(self.group)
        sizes = (num_sequences, q.shape[1], k.shape[1], longest, longest)
        how = (*sizes, size > 1, self.deterministic)
        is_old = sys.modules["transformer_engine"].__version__ != "2.20.2"
        params = OldAttentionParams(*how) if is_old else AttentionParams(*how, size, len(q), len(k))
        last = _attention_backends
        if last["attention_params"] != params:
            own = sys.modules["transformer_engine.pytorch.attention.dot_product_attention"]
            flash, version, fused, number, unfused, _ = own.utils.get_attention_backend(params)
            last["attention_params"] = params
            last["use_flash_attention"], last["flash_attention_backend"] = flash, version
            last["use_fused_attention"], last["fused_attention_backend"] = fused, number
            last["use_unfused_attention"] = unfused
        if not any(last[f"use_{name}_attention"] for name in ("flash", "fused", "unfused")):
            raise ValueError("No dot product attention backend is available")


class OverGroup:
    """Passes tensors on by isend and irecv over a group, with job's ranks."""

    def __init__(self, group, members):
        self.group, self.members = group, members

    def buffer(self, name, num_values, like, dtype=None):
        return torch.empty(num_values, dtype=dtype or like.dtype)  # new ones, as the library does

    def group_size(self, ring):
        return 0  # the library knows no double rings

    def pass_on(self, tensor, ring, index, into):
        received = into
        following, previous = self.members[(index + 1) % len(ring)], self.members[index - 1]
        works = [
            dist.isend(tensor, following, self.group),
            dist.irecv(received, previous, self.group),
        ]

        class Both:
            def wait(self):
                for work in works:
                    work.wait()
                return received

        return Both()


def install(version="2.20.2"):
    """Puts it in place of the library, for the process that calls this."""
    names = ("", ".pytorch", ".pytorch.attention", ".pytorch.attention.dot_product_attention")
    modules = [types.ModuleType(f"transformer_engine{name}") for name in names]
    for module in modules:
        sys.modules[module.__name__] = module
    package, pytorch, attention, own = modules
    package.__version__ = version
    package.pytorch, pytorch.attention, attention.dot_product_attention = modules[1:]
    pytorch.DotProductAttention = DotProductAttention
    own._attention_backends = _attention_backends
    own.utils = types.ModuleType(f"{own.__name__}.utils")
    own.utils.get_attention_backend = get_attention_backend
    own.utils.AttentionLogging = AttentionLogging
    torch.cuda.Stream = lambda device: "a stream"
