"""DeepEP by its interface, on a CPU: a token goes once to each rank that has experts for it.

Signatures and shapes are those of DeepEP 1.2.1's `Buffer` within a node. Megatron imports it when
its own module is imported, so `installed` loads that module anew.
"""

import importlib
import sys
import types
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.transformer.moe import fused_a2a, token_dispatcher

_NAMES = ("fused_dispatch", "fused_combine", "set_deepep_num_sms")


class EventHandle:
    """Everything is done when it was asked for."""

    def current_stream_wait(self):
        """Nothing to wait for."""


class EventOverlap:
    def __init__(self, event=None, extra_tensors=None):
        self.event = event

    def current_stream_wait(self):
        """Only where the call was asynchronous."""
        assert self.event is not None
        self.event.current_stream_wait()


class Config:
    def get_nvl_buffer_size_hint(self, hidden_bytes, num_ranks):
        """So many bytes for a token on each rank."""
        return hidden_bytes * num_ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes, num_ranks):
        """None within a node."""
        return 0


class Buffer:
    num_sms = 20
    dispatched = []
    """Numbers of tokens sent by the first and received, of each dispatch with a new layout."""

    def __init__(self, group, num_nvl_bytes=0, num_rdma_bytes=0, low_latency_mode=False):
        assert num_nvl_bytes > 0 and not low_latency_mode
        self.group, self.num_nvl_bytes, self.num_rdma_bytes = group, num_nvl_bytes, num_rdma_bytes

    @staticmethod
    def set_num_sms(new_num_sms):
        """An even number of them."""
        assert new_num_sms % 2 == 0
        Buffer.num_sms = new_num_sms

    @staticmethod
    def get_dispatch_config(num_ranks):
        """For these numbers of ranks alone."""
        assert num_ranks in (2, 4, 8), f"Unsupported number of EP ranks: {num_ranks}"
        return Config()

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(
        self,
        topk_idx,
        num_experts,
        previous_event=None,
        async_finish=False,
        allocate_on_comm_stream=False,
    ):
        """Tokens for each rank, None, for each expert; which token goes to which rank; an event."""
        assert topk_idx.dtype == torch.int64 and topk_idx.dim() == 2 and topk_idx.is_contiguous()
        to_expert = topk_idx.new_zeros(len(topk_idx), num_experts, dtype=torch.bool)
        to_expert.scatter_(1, topk_idx.clamp(min=0), topk_idx >= 0)
        in_rank = to_expert.unflatten(1, (self.group.size(), -1)).any(-1)
        counts = [x.sum(0, dtype=torch.int32) for x in (in_rank, to_expert)]
        return counts[0], None, counts[1], in_rank, _event(previous_event, async_finish)

    def dispatch(
        self,
        x,
        handle=None,
        num_tokens_per_rank=None,
        num_tokens_per_rdma_rank=None,
        is_token_in_rank=None,
        num_tokens_per_expert=None,
        topk_idx=None,
        topk_weights=None,
        expert_alignment=1,
        num_worst_tokens=0,
        config=None,
        previous_event=None,
        async_finish=False,
        allocate_on_comm_stream=False,
    ):
        """Tokens received, their experts of this rank and weights, counts, a handle, an event."""
        assert x.dim() == 2 and x.is_contiguous() and expert_alignment == 1 and not num_worst_tokens
        event = _event(previous_event, async_finish)
        if handle is not None:
            assert topk_idx is topk_weights is None
            in_rank, received = handle
            return self._sent(x, in_rank, received), None, None, None, None, event
        topk_weights = _float32(topk_weights)
        assert topk_weights.shape == topk_idx.shape
        assert is_token_in_rank.shape == (len(x), self.group.size())
        assert num_tokens_per_rank.dtype == num_tokens_per_expert.dtype == torch.int32
        counts = torch.empty_like(num_tokens_per_rank)
        dist.all_to_all_single(counts, num_tokens_per_rank, group=self.group)
        handle = (is_token_in_rank, counts.tolist())
        Buffer.dispatched.append((len(x), sum(handle[1])))
        found, experts, weights = (self._sent(one, *handle) for one in (x, topk_idx, topk_weights))
        num_local = len(num_tokens_per_expert) // self.group.size()
        experts = experts - self.group.rank() * num_local
        is_mine = (experts >= 0) & (experts < num_local)
        experts = experts.where(is_mine, -1)
        of_experts = [int((experts == expert).sum()) for expert in range(num_local)]
        return found, experts, weights.where(is_mine, 0), of_experts, handle, event

    def combine(
        self,
        x,
        handle,
        topk_weights=None,
        bias=None,
        config=None,
        previous_event=None,
        async_finish=False,
        allocate_on_comm_stream=False,
    ):
        """Each token's sum over ranks, that of its weights if there are any, an event."""
        assert x.dim() == 2 and x.is_contiguous() and bias is None
        in_rank, received = handle
        assert len(x) == sum(received)
        event = _event(previous_event, async_finish)
        if topk_weights is None:
            return self._back(x, in_rank, received), None, event
        weights = self._back(_float32(topk_weights), in_rank, received)
        return self._back(x, in_rank, received), weights, event

    def _sent(self, x, in_rank, received):
        parts = [x[goes] for goes in in_rank.T]
        found = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(
            found, torch.cat(parts), received, [len(part) for part in parts], group=self.group
        )
        return found

    def _back(self, x, in_rank, received):
        counts = in_rank.sum(0).tolist()
        found = x.new_empty(sum(counts), *x.shape[1:])
        dist.all_to_all_single(found, x, counts, received, group=self.group)
        total = x.new_zeros(len(in_rank), *x.shape[1:])
        for goes, part in zip(in_rank.T, found.split(counts), strict=True):
            total[goes] += part
        return total


def _float32(weights):
    """What it takes; on a CPU Megatron's own conversion leaves float64."""
    assert weights.dtype in (torch.float32, torch.float64)
    return weights.to(torch.float32)


def _event(previous_event, async_finish):
    assert (previous_event is None) != async_finish
    return EventOverlap(EventHandle() if async_finish else None)


@contextmanager
def installed():
    """Within it Megatron finds DeepEP."""
    package, utils = (types.ModuleType(name) for name in ("deep_ep", "deep_ep.utils"))
    package.Buffer, package.utils = Buffer, utils
    utils.EventHandle, utils.EventOverlap = EventHandle, EventOverlap
    modules = {"deep_ep": package, "deep_ep.utils": utils}
    with ExitStack() as stack:
        stack.callback(importlib.reload, fused_a2a)
        stack.enter_context(mock.patch.dict(sys.modules, modules))
        importlib.reload(fused_a2a)
        for name in _NAMES:
            found = getattr(fused_a2a, name)
            stack.enter_context(mock.patch.object(token_dispatcher, name, found))
        yield
