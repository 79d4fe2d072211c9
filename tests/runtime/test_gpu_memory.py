"""What a GPU holds beside PyTorch's memory, by what CUDA and PyTorch would answer."""

import torch

from megatron_hdp.runtime import gpu_memory


def test_it_is_what_cuda_has_given_and_pytorch_does_not_hold(monkeypatch):
    """The fullest GPU of the job counts; without GPUs nothing is asked."""
    gpu = torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (30 * 10**9, 80 * 10**9))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 45 * 10**9)
    monkeypatch.setattr(gpu_memory, "largest", lambda values, device: [max(*values, 6 * 10**9)])
    assert gpu_memory.runtime_bytes(gpu) == 6 * 10**9
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 43 * 10**9)
    assert gpu_memory.runtime_bytes(gpu) == 7 * 10**9
    monkeypatch.delattr(torch.cuda, "mem_get_info")
    assert gpu_memory.runtime_bytes(torch.device("cpu")) == 0
