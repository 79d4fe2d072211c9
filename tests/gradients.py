"""One HDP step's gradients on real ranks, and those of one rank that saw the whole batch.

The reference shares nothing with the code under test: megatron-core's stock GPTModel with its stock
attention runs every sequence alone, and PyTorch's cross entropy gives the loss.
"""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as functional

from megatron_hdp.data import SequenceTable, StepSampler, TokenFile
from megatron_hdp.megatron import hdp_steps, model, parallel
from megatron_hdp.megatron.arguments import TrainingArguments
from megatron_hdp.megatron.indexed_writer import IndexedWriter
from megatron_hdp.megatron.parallel import compute_device
from megatron_hdp.runtime.timeline import Timeline

VOCABULARY = 257


def write_corpus(folder, lengths, seed=0):
    """Random documents of the given lengths as a .bin/.idx pair; returns the prefix."""
    generator = np.random.default_rng(seed)
    prefix = Path(folder) / "corpus"
    with IndexedWriter(prefix, VOCABULARY) as writer:
        for length in lengths:
            writer.add(generator.integers(0, VOCABULARY, length))
    return str(prefix)


def tiny_arguments(prefix, **overrides):
    """A GPT of two small layers in float64, one global batch of everything."""
    settings = {
        "num_layers": 2,
        "hidden_size": 16,
        "ffn_hidden_size": 24,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "group_query_attention": True,
        "kv_channels": 4,
        "seq_length": 512,
        "max_position_embeddings": 512,
        "normalization": "RMSNorm",
        "swiglu": True,
        "untie_embeddings_and_output_weights": True,
        "init_method_std": 0.3,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "fp64": True,
        "train_iters": 20,
        "lr": 1e-3,
        "data_path": (prefix,),
        "split": "1,0,0",
        "distributed_timeout_minutes": 5,
        "stall_timeout_seconds": 300.0,
        "hybrid_data_parallel": True,
        "hdp_tokens_per_rank": 64,
        "global_batch_size": len(TokenFile(prefix).lengths),
    }
    return TrainingArguments(**(settings | overrides))


def hdp_gradients(arguments, *faults, plan=None):
    """Loss and whole gradients after one HDP step, alike on every rank of an initialised job.

    Args:
        arguments: the run.
        faults: (target, replacement) pairs to plant, as for `mock.patch`.
        plan: what to run instead of the strategy's plan.
    """
    parallel.set_seeds(arguments.seed)
    gpt = model.build_gpt(arguments, VOCABULARY)
    executor = hdp_steps.build_executor(arguments, gpt, Timeline())
    token_file = TokenFile(arguments.data_path[0])
    cost_model = hdp_steps.cost_model_of(arguments, 10_000)
    documents = range(len(token_file.lengths))
    steps = hdp_steps.HdpSteps(arguments, executor, cost_model, token_file, documents, VOCABULARY)
    with ExitStack() as planted:
        for target, replacement in faults:
            planted.enter_context(mock.patch(target, replacement))
        if plan is not None:
            planted.enter_context(
                mock.patch("megatron_hdp.megatron.hdp_steps.plan", lambda *_, **__: plan)
            )
        report = steps.run(0)
    grads = {name: _whole(p, p.main_grad) for name, p in gpt.module.named_parameters()}
    return report.loss, grads


def reference_gradients(arguments):
    """The same from this rank alone with megatron-core's stock model, sequence by sequence."""
    parallel.set_seeds(arguments.seed)
    gpt = model.build_gpt(_stock(arguments), VOCABULARY).module
    token_file = TokenFile(arguments.data_path[0])
    table = SequenceTable.build(token_file.lengths, max_length=arguments.seq_length)
    step = StepSampler(
        table.length, seed=arguments.seed, global_batch_size=arguments.global_batch_size
    ).step(0)
    total, num_loss_tokens = torch.zeros((), dtype=torch.float64), 0
    for row in step.sequences.tolist():
        length = int(table.length[row])
        document = torch.from_numpy(token_file.read(int(table.document[row]), 0, length))
        mask = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
        logits = gpt(document[None], torch.arange(length)[None], mask)[0]
        total = total + functional.cross_entropy(logits[:-1], document[1:], reduction="sum")
        num_loss_tokens += length - 1
    loss = total / max(num_loss_tokens, 1)
    grads = {}
    for name, p in gpt.named_parameters():
        (grads[name],) = torch.autograd.grad(loss, p, retain_graph=True)
    return loss.item(), grads


def largest_error(found, expected):
    """Largest relative error (norm by norm) of the loss and of any parameter's gradient."""
    (loss, grads), (expected_loss, expected_grads) = found, expected
    assert grads.keys() == expected_grads.keys()
    scale = max(grad.norm().item() for grad in expected_grads.values())
    errors = [abs(loss - expected_loss) / max(abs(expected_loss), 1e-300)]
    for name, grad in grads.items():
        norm = max(expected_grads[name].norm().item(), 1e-3 * scale, 1e-300)
        errors.append((grad - expected_grads[name]).norm().item() / norm)
    return max(errors)


def errors_of(cases, *faults):
    """Body of a rank: `largest_error` of each case on the first rank, None on the others.

    Args:
        cases: (arguments, plan) pairs of one model and batch; a plan of None means the strategy's.
        faults: see `hdp_gradients`.
    """
    first, _ = cases[0]
    parallel.initialise(first)
    found = [hdp_gradients(arguments, *faults, plan=plan) for arguments, plan in cases]
    if first.tensor_model_parallel_size > 1:
        parallel.finish()
        parallel.initialise(_stock(first))
    if dist.get_rank() > 0:
        return None
    expected = reference_gradients(first)
    return [largest_error(gradients, expected) for gradients in found]


def _stock(arguments):
    """Megatron without HDP, tensor parallelism and recomputation, the vocabulary padded alike."""
    vocabulary_multiple = (
        arguments.make_vocab_size_divisible_by * arguments.tensor_model_parallel_size
    )
    return replace(
        arguments,
        hybrid_data_parallel=False,
        tensor_model_parallel_size=1,
        make_vocab_size_divisible_by=vocabulary_multiple,
        recompute_granularity=None,
        recompute_method=None,
        recompute_num_layers=None,
    )


def _whole(parameter, grad):
    """A tensor-parallel parameter's gradient put together."""
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_model_parallel_group()
    if group.size() == 1 or not getattr(parameter, "tensor_model_parallel", False):
        return grad.detach().clone()
    parts = [torch.empty_like(grad, device=compute_device()) for _ in range(group.size())]
    dist.all_gather(parts, grad.contiguous(), group=group)
    if parameter.partition_stride == 2:  # SwiGLU: each rank holds a piece of both halves
        parts = [half for i in range(2) for half in (part.chunk(2)[i] for part in parts)]
    return torch.cat(parts, dim=parameter.partition_dim)
