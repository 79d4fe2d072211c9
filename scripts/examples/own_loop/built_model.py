"""A GPT that a framework has built from Megatron's classes, run by a session."""

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_hdp.megatron.cpu import shim
from megatron_hdp.session import HdpSession, TokenBatch


def built_by_a_framework():
    """What it does before its loop; ranks of Megatron's data-parallel group become HDP's."""
    if not dist.is_initialized():
        dist.init_process_group()
    parallel_state.initialize_model_parallel(context_parallel_size=1)
    model_parallel_cuda_manual_seed(1)
    torch.manual_seed(1)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=2,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        calculate_per_token_loss=True,  # the session divides once
        use_cpu_initialization=True,
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=384,
        max_sequence_length=8192,
        position_embedding_type="rope",
    )
    return DistributedDataParallel(config, DistributedDataParallelConfig(), model)


if not torch.cuda.is_available():
    shim.apply()  # Megatron wants a GPU
chunk = built_by_a_framework()
session = HdpSession.of_model([chunk], vocab_size=257, seq_length=8192, hdp_tokens_per_rank=4096)
data = np.random.default_rng(seed=0)

for step in range(1, 4):
    tokens = [data.integers(0, 257, length) for length in (3000, 40, 700, 1500, 200)]
    report = session.step(TokenBatch(tokens))
    with torch.no_grad():  # the framework's optimizer, from Megatron's buffers of gradients
        for parameter in chunk.parameters():
            parameter -= 0.1 * parameter.main_grad
    if session.is_first_rank:
        print(f"step {step}: loss {report.loss:.6f}")
session.close()
