"""One HDP step's gradients on real ranks, and those of one rank that saw the whole batch.

The reference shares nothing with the code under test: megatron-core's stock GPTModel with its stock
attention (and experts) runs every sequence alone, and PyTorch's cross entropy gives the loss. What
routers add to it is computed from their logits, by the definition.
"""

import re
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as functional
from megatron.core import parallel_state

from megatron_hdp.data import SequenceTable, StepSampler, TokenFile
from megatron_hdp.megatron import hdp_steps, model, parallel
from megatron_hdp.megatron.arguments import TrainingArguments
from megatron_hdp.megatron.indexed_writer import IndexedWriter
from megatron_hdp.megatron.parallel import compute_device

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
        "hybrid_data_parallel": True,
        "hdp_tokens_per_rank": 64,
        "global_batch_size": len(TokenFile(prefix).lengths),
        "expert_tensor_parallel_size": overrides.get("tensor_model_parallel_size", 1),
    }
    return TrainingArguments(**(settings | overrides))


def moe_arguments(prefix, **overrides):
    """The same with four experts, two of them for a token, and every loss of the router."""
    settings = {
        "num_experts": 4,
        "moe_ffn_hidden_size": 12,
        "moe_router_load_balancing_type": "seq_aux_loss",
        "moe_aux_loss_coeff": 0.3,
        "moe_z_loss_coeff": 0.02,
        "moe_token_dispatcher_type": "alltoall",
        "add_bias_linear": False,
    }
    return tiny_arguments(prefix, **(settings | overrides))


def hdp_gradients(arguments, *faults, plan=None, weights=None):
    """Loss and whole gradients after one HDP step, alike on every rank of an initialised job.

    Args:
        arguments: the run.
        faults: (target, replacement) pairs to plant, as for `mock.patch`.
        plan: what to run instead of the strategy's plan.
        weights: what to begin with, by global name; without it, what the seed gives.
    """
    parallel.set_seeds(arguments.seed)
    gpt = model.build_gpt(arguments, VOCABULARY)
    if weights is not None:
        expert_rank = parallel_state.get_expert_model_parallel_rank()
        for name, p in gpt.module.named_parameters():
            p.data.copy_(weights[_global_names(name, arguments)[expert_rank]])
    executor = hdp_steps.build_executor(arguments, gpt)
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
    grads = {}
    for name, p in gpt.module.named_parameters():
        names = _global_names(name, arguments)
        grad = _whole(p, p.main_grad, "local_experts" in name)
        grads |= zip(names, _of_all_expert_ranks(grad), strict=True)
    return report.loss, grads


def initial_weights(arguments):
    """What the seed gives the stock model, by name."""
    parallel.set_seeds(arguments.seed)
    gpt = model.build_gpt(_stock(arguments), VOCABULARY).module
    return {name: p.detach().clone() for name, p in gpt.named_parameters()}


def reference_gradients(arguments):
    """The same from this rank alone with megatron-core's stock model, sequence by sequence."""
    parallel.set_seeds(arguments.seed)
    gpt = model.build_gpt(_stock(arguments), VOCABULARY).module
    router_logits = _watch_routers(gpt)
    token_file = TokenFile(arguments.data_path[0])
    table = SequenceTable.build(token_file.lengths, max_length=arguments.seq_length)
    step = StepSampler(
        table.length, seed=arguments.seed, global_batch_size=arguments.global_batch_size
    ).step(0)
    total, routers, num_loss_tokens = torch.zeros(()).double(), torch.zeros(()).double(), 0
    for row in step.sequences.tolist():
        length = int(table.length[row])
        document = torch.from_numpy(token_file.read(int(table.document[row]), 0, length))
        mask = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
        logits = gpt(document[None], torch.arange(length)[None], mask)[0]
        total = total + functional.cross_entropy(logits[:-1], document[1:], reduction="sum")
        routers = routers + sum(_router_loss(arguments, seen) for seen in router_logits)
        router_logits.clear()
        num_loss_tokens += length - 1
    whole, loss = (total + routers) / max(num_loss_tokens, 1), total / max(num_loss_tokens, 1)
    grads = {}
    for name, p in gpt.named_parameters():
        (grads[name],) = torch.autograd.grad(whole, p, retain_graph=True)
    return loss.item(), grads


def _watch_routers(gpt):
    """A list that each router's logits ``[t, E]`` will be added to, differentiable."""
    seen = []

    def watch(router, inputs, _):
        seen.append(inputs[0].flatten(0, 1) @ router.weight.t())

    for name, module in gpt.named_modules():
        if name.endswith("mlp.router"):
            module.register_forward_hook(watch)
    return seen


def _router_loss(arguments, logits):
    """Balancing loss and z-loss of one whole sequence at one layer, each times its tokens."""
    (length, experts), topk = logits.shape, arguments.moe_router_topk
    probabilities = logits.softmax(-1)
    chosen = functional.one_hot(logits.topk(topk).indices, experts).sum(1).double()
    balance = experts * (chosen.mean(0) / topk) @ probabilities.mean(0)
    z = logits.logsumexp(-1).square().mean()
    balance_coeff, z_coeff = arguments.moe_aux_loss_coeff, arguments.moe_z_loss_coeff or 0.0
    return length * (balance_coeff * balance + z_coeff * z)


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
    weights = None
    if first.expert_model_parallel_size > 1:
        parallel.initialise(_stock(first))
        weights = initial_weights(first)
        parallel.finish()
    parallel.initialise(first)
    found = [
        hdp_gradients(arguments, *faults, plan=plan, weights=weights) for arguments, plan in cases
    ]
    if max(first.tensor_model_parallel_size, first.expert_model_parallel_size) > 1:
        parallel.finish()
        parallel.initialise(_stock(first))
    if dist.get_rank() > 0:
        return None
    expected = reference_gradients(first)
    return [largest_error(gradients, expected) for gradients in found]


def _stock(arguments):
    """Megatron without HDP, tensor and expert parallelism, recomputation and losses of routers.

    The vocabulary is padded alike.
    """
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
        expert_model_parallel_size=1,
        expert_tensor_parallel_size=1,
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
        moe_z_loss_coeff=None,
    )


def _global_names(name, arguments):
    """What one rank alone would call the parameters named `name` on each expert-parallel rank."""
    ranks = arguments.expert_model_parallel_size
    expert = re.search(r"local_experts\.(\d+)", name)
    if expert is None:
        return [name] * ranks
    numbers = [int(expert[1]) + rank * (arguments.num_experts // ranks) for rank in range(ranks)]
    return [name.replace(expert[0], f"local_experts.{number}") for number in numbers]


def _of_all_expert_ranks(grad):
    """What each expert-parallel rank holds, in their order."""
    group = parallel_state.get_expert_model_parallel_group()
    parts = [torch.empty_like(grad) for _ in range(group.size())]
    dist.all_gather(parts, grad.contiguous(), group=group)
    return parts


def _whole(parameter, grad, is_expert):
    """A tensor-parallel parameter's gradient put together."""
    if is_expert:
        group = parallel_state.get_expert_tensor_parallel_group()
    else:
        group = parallel_state.get_tensor_model_parallel_group()
    if group.size() == 1 or not getattr(parameter, "tensor_model_parallel", False):
        return grad.detach().clone()
    parts = [torch.empty_like(grad, device=compute_device()) for _ in range(group.size())]
    dist.all_gather(parts, grad.contiguous(), group=group)
    if parameter.partition_stride == 2:  # SwiGLU: each rank holds a piece of both halves
        parts = [half for i in range(2) for half in (part.chunk(2)[i] for part in parts)]
    return torch.cat(parts, dim=parameter.partition_dim)
