"""What a GPU cannot do is refused with the remedy, and what it does otherwise than a CPU is set."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.tensor_parallel import layers

from megatron_hdp.megatron import parallel
from megatron_hdp.megatron.checkpoint import rng_state
from megatron_hdp.megatron.model import building
from megatron_hdp.megatron.options import parse_arguments

FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 64 --train-iters 1 "
    "--lr 1e-3 --data-path unused --bf16"
)


def test_more_ranks_than_gpus_and_float64(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match=r"rank 1 of this machine .* found 1, .*nproc-per-node"):
        parallel._require_gpu(torch.device("cuda", 1), SimpleNamespace(fp64=False))
    with pytest.raises(ValueError, match="CUDA_VISIBLE_DEVICES=''"):
        parallel._require_gpu(torch.device("cuda", 0), SimpleNamespace(fp64=True))
    parallel._require_gpu(torch.device("cuda", 0), SimpleNamespace(fp64=False))


@pytest.mark.parametrize("saved", [{}, {"cuda": None}])
def test_random_generators_of_the_other_kind(monkeypatch, saved):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: not saved)
    with pytest.raises(ValueError, match="add --no-load-rng"):
        rng_state.restore(saved)


@pytest.mark.parametrize("has_kernels", [True, False])
def test_what_apex_fuses_is_fused_only_where_its_kernels_are(monkeypatch, has_kernels):
    """Megatron imports the softmax's when the first one runs, in the middle of a step."""
    monkeypatch.setattr(building, "compute_device", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(building, "_is_found", lambda name: has_kernels)
    monkeypatch.setattr(layers, "_grad_accum_fusion_available", has_kernels)
    config = building.transformer_config(parse_arguments(FLAGS.split()))
    assert config.masked_softmax_fusion == has_kernels
    assert config.gradient_accumulation_fusion == has_kernels
    assert config.bias_dropout_fusion


@pytest.mark.parametrize(("backend", "more"), [("gloo", 0), ("nccl", 2), ("auto", 2)])
def test_heartbeats_come_before_nccl_ends_the_process(monkeypatch, backend, more):
    monkeypatch.setattr(parallel, "compute_device", lambda: torch.device("cuda", 0))
    arguments = parse_arguments([*FLAGS.split(), "--distributed-backend", backend])
    assert parallel.communication_minutes(arguments) * 60 == (
        arguments.stall_timeout_seconds + more * 60
    )
