"""One HDP step's gradients on real ranks, and those of one rank that saw the whole batch.

The reference shares nothing with the code under test: megatron-core's stock GPTModel with its stock
attention (and experts) runs every sequence alone, and PyTorch's cross entropy gives the loss. What
routers add to it is computed from their logits, by the definition.
"""

import fnmatch
import functools
import json
import zlib
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as functional
from megatron.core import parallel_state

from megatron_hdp.data import TokenFile, TokenWriter
from megatron_hdp.data.chat import Conversations
from megatron_hdp.data.mixture import BatchSize, Position, TextSource
from megatron_hdp.data.tables import count_documents
from megatron_hdp.data.tokenizers import build_tokenizer
from megatron_hdp.megatron import parallel
from megatron_hdp.megatron.adapters import is_adapter
from megatron_hdp.megatron.model import building
from megatron_hdp.megatron.model.initialisation import (
    global_parameters,
    initialise_by_name,
    own_part,
    tensor_group,
    whole_shape,
)
from megatron_hdp.megatron.options import TrainingArguments
from megatron_hdp.megatron.parallel import compute_device
from megatron_hdp.megatron.step import hdp_steps, open_split, setup, split_specs
from megatron_hdp.runtime.timeline import Timeline

VOCABULARY = 257
COMPILES = False
"""Whether Megatron's fused functions are compiled, which costs more than all else here."""
EXPERTS = {
    "num_experts": 4,
    "moe_ffn_hidden_size": 12,
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_aux_loss_coeff": 0.3,
    "moe_z_loss_coeff": 0.02,
    "moe_token_dispatcher_type": "alltoall",
    "add_bias_linear": False,
}


def seldom_compiled(function):
    """The function, without compiling unless `COMPILES`."""

    @functools.wraps(function)
    def called(*args, **kwargs):
        with torch._dynamo.config.patch(disable=not COMPILES):
            return function(*args, **kwargs)

    return called


def write_corpus(folder, lengths, seed=0, corrupt=()):
    """Random documents of the given lengths as a .bin/.idx pair; returns the prefix.

    The last token of the `corrupt` ones is outside the vocabulary.
    """
    generator = np.random.default_rng(seed)
    prefix = Path(folder) / "corpus"
    with TokenWriter(prefix, VOCABULARY + 1) as writer:
        for i, length in enumerate(lengths):
            document = generator.integers(0, VOCABULARY, length)
            if i in corrupt:
                document[-1] = VOCABULARY
            writer.add(document)
    return str(prefix)


def tiny_arguments(prefix, **overrides):
    """A GPT of two small layers in float64, one global batch of everything (None: no data)."""
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
        "data_path": () if prefix is None else (prefix,),
        "split": "1,0,0",
        "distributed_timeout_minutes": 5,
        "stall_timeout_seconds": 300.0,
        "hybrid_data_parallel": True,
        "hdp_tokens_per_rank": 64,
        "global_batch_size": 1 if prefix is None else count_documents(prefix),
        "expert_tensor_parallel_size": overrides.get("tensor_model_parallel_size", 1),
    }
    return TrainingArguments(**(settings | overrides))


def moe_arguments(prefix, **overrides):
    """The same with four experts, two of them for a token, and every loss of the router."""
    return tiny_arguments(prefix, **(EXPERTS | overrides))


def hdp_gradients(arguments, *faults, plan=None):
    """Loss and whole gradients after one HDP step; see `hdp_step`."""
    report, grads = hdp_step(arguments, *faults, plan=plan)
    return report.loss, grads


def hdp_step(arguments, *faults, plan=None, repeats=1):
    """Report and whole gradients of one HDP step; what other ranks hold comes to the first one.

    Args:
        arguments: the run.
        faults: (target, replacement) pairs to plant, as for `mock.patch`.
        plan: what to run instead of the strategy's plan.
        repeats: how often it runs; Megatron's DDP does some things from the second time on.
    """
    *_, (report, chunks) = hdp_steps_of(arguments, [plan] * repeats, faults)
    return report, whole_gradients(chunks, arguments)


def hdp_steps_of(arguments, plans, faults=()):
    """Report and chunks of this rank after each of several HDP steps over one batch.

    No optimizer runs between them; a bias of experts moves.

    Args:
        arguments: the run.
        plans: what the steps run; a plan of None means the strategy's.
        faults: as of `hdp_step`.
    """
    parallel.set_seeds(arguments.seed)
    chunks = building.build_chunks(arguments, VOCABULARY)
    begin_with_biases(chunk.module for chunk in chunks)
    begin_with_adapters(getattr(chunk.module, "module", chunk.module) for chunk in chunks)
    executor = setup.build_executor(arguments, chunks, Timeline())
    cost_model = setup.cost_model_of(arguments, executor)
    corpus = open_split(arguments, split_specs(arguments)["train"])
    with planned_by(plans[0]):  # it looks whether the longest sequence can be planned
        steps = hdp_steps.HdpSteps(arguments, executor, cost_model, corpus, VOCABULARY)
    with ExitStack() as planted:
        planted.enter_context(torch._dynamo.config.patch(disable=not COMPILES))
        for target, replacement in faults:
            planted.enter_context(mock.patch(target, replacement))
        for plan in plans:
            for chunk in chunks:
                chunk.zero_grad_buffer()
            with planned_by(plan):
                report = steps.run(Position())
            yield report, chunks
        steps.close()
    assert steps.num_planner_failures == 0  # it was the strategy's plan that ran


def planned_by(plan):
    """Within the block a step runs this plan; None: the strategy's."""
    if plan is None:
        return nullcontext()
    return mock.patch("megatron_hdp.data.steps.planning.make_plan", lambda *_, **__: plan)


def begin_with_biases(models):
    """Gives every router that balances by a bias one that changes its choices."""
    for router in routers_of(models):
        if router.expert_bias is not None:
            generator = torch.Generator().manual_seed(router.layer_number)
            router.expert_bias.copy_(torch.rand(router.num_experts, generator=generator) / 5)


def begin_with_adapters(models):
    """Draws both matrices of every adapter: with a B of zeros A would have no gradient."""
    for model in models:
        for name, parameter in global_parameters(model):
            if is_adapter(name):
                whole = drawn_adapter(name, whole_shape(parameter))
                parameter.data.copy_(own_part(parameter, whole))


def drawn_adapter(name, shape):
    """A whole matrix of an adapter, the same wherever it is drawn."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=generator, dtype=torch.float64) / 3


def merged_adapters(gpt, arguments):
    """Adds what adapters add to the weights of a whole model; returns A and B by weights' names."""
    rank, adapters = arguments.lora_rank, {}
    for name, weight in global_parameters(gpt):
        linear, _, last = name.rpartition(".")
        if rank and last == "weight" and linear.rpartition(".")[-1] in arguments.lora_targets:
            a = drawn_adapter(f"{linear}.lora_a", (rank, weight.shape[1]))
            b = drawn_adapter(f"{linear}.lora_b", (weight.shape[0], rank))
            weight.data += arguments.lora_alpha / rank * b @ a
            adapters[name] = a, b
    return adapters


def routers_of(models):
    """All routers of experts in some models."""
    named = (pair for model in models for pair in model.named_modules())
    return [module for name, module in named if name.endswith("mlp.router")]


def whole_gradients(chunks, arguments):
    """The reduced gradients of all ranks' chunks by name; what other ranks hold comes to the first.

    Args:
        chunks: of this rank, each in Megatron's DDP.
        arguments: the run.
    """
    if arguments.use_distributed_optimizer:
        for chunk in chunks:
            _gather_shards(chunk)
    grads = {
        name: _whole(p, p.main_grad)
        for chunk in chunks
        for name, p in global_parameters(chunk.module)
        if p.requires_grad
    }
    grads = _together(grads, parallel_state.get_expert_model_parallel_group())
    return _together(grads, parallel_state.get_pipeline_model_parallel_group())


def stock_model(arguments):
    """Megatron's model of a run on this rank alone, with the weights and biases of the run."""
    parallel.set_seeds(arguments.seed)
    gpt = building.build_gpt(stock(arguments), VOCABULARY).module
    initialise_by_name(gpt, arguments.seed)
    begin_with_biases([gpt])
    return gpt


@seldom_compiled
def reference_gradients(arguments):
    """The same from this rank alone with megatron-core's stock model, sequence by sequence."""
    gpt = stock_model(arguments)
    adapters = merged_adapters(gpt, arguments)
    router_logits = _watch_routers(gpt)
    depths = arguments.mtp_num_layers or 0
    behind, num_behind = [torch.zeros(()).double()] * depths, [0] * depths
    total, routers, num_loss_tokens = torch.zeros(()).double(), torch.zeros(()).double(), 0
    for tokens, labels, is_trained in drawn_sequences(arguments):
        if max(tokens.max(), labels.max(initial=0)) >= VOCABULARY:
            continue
        tokens, labels = torch.from_numpy(tokens), torch.from_numpy(labels)
        length, is_trained = len(tokens), torch.from_numpy(is_trained)
        mask = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
        if depths:
            losses_behind, counts = _losses_behind(gpt, tokens, labels, is_trained, mask, depths)
            behind = [one + more for one, more in zip(behind, losses_behind, strict=True)]
            num_behind = [one + more for one, more in zip(num_behind, counts, strict=True)]
            logits = gpt.seen[0][0, : len(labels)]
        else:
            logits = gpt(tokens[None], torch.arange(length)[None], mask)[0, : len(labels)]
        losses = functional.cross_entropy(logits, labels, reduction="none")
        total = total + (losses * is_trained).sum()
        routers = routers + sum(_router_loss(arguments, seen) for seen in router_logits)
        router_logits.clear()
        num_loss_tokens += int(is_trained.sum())
    whole, loss = (total + routers) / max(num_loss_tokens, 1), total / max(num_loss_tokens, 1)
    for one, count in zip(behind, num_behind, strict=True):
        whole = whole + arguments.mtp_loss_scaling_factor / depths * one / max(count, 1)
    frozen = arguments.hdp_frozen
    parameters = {
        name: one
        for name, one in global_parameters(gpt)
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in frozen)
    }
    if adapters:
        parameters = {name: one for name, one in parameters.items() if name in adapters}
    grads = torch.autograd.grad(whole, list(parameters.values()))
    grads = dict(zip(parameters, grads, strict=True))
    return loss.item(), _of_adapters(grads, adapters, arguments) if adapters else grads


def _of_adapters(grads, adapters, arguments):
    """The gradients of both matrices of each adapter from those of merged weights."""
    scale = arguments.lora_alpha / arguments.lora_rank
    found = {}
    for name, (a, b) in adapters.items():
        linear = name.removesuffix("weight")
        found[f"{linear}lora_a"] = scale * b.t() @ grads[name]
        found[f"{linear}lora_b"] = scale * grads[name] @ a.t()
    return found


def _losses_behind(gpt, tokens, labels, is_trained, mask, depths, is_item=None, embedded=None):
    """Sums of losses and their tokens at each depth behind the label, by Megatron's own layers.

    They roll the sequence. ``gpt.seen`` becomes all logits. No depth that learns is given an item.
    """
    length, weight = len(tokens), gpt.shared_embedding_or_output_weight()
    if not gpt.share_embeddings_and_output_weights:
        weight = gpt.output_layer.weight
    states = []
    watch = gpt.mtp.register_forward_hook(lambda *found: states.append(found[-1]))
    everything = functional.pad(labels, (0, length - len(labels)))
    more = {"labels": everything[None], "decoder_input": embedded}
    gpt(tokens[None], torch.arange(length)[None], mask, **more)
    watch.remove()
    gpt.seen = [part.transpose(0, 1) @ weight.t() for part in states[0].chunk(1 + depths)]
    losses, counts = [], []
    for depth in range(1, depths + 1):
        left = max(0, len(labels) - depth)
        trained = is_trained[depth:]
        for place in range(1, depth + 1) if is_item is not None else ():
            trained = trained & ~is_item[place : place + left]
        found = functional.cross_entropy(
            gpt.seen[depth][0, :left], labels[depth:], reduction="none"
        )
        losses.append((found * trained).sum())
        counts.append(int(trained.sum()))
    return losses, counts


def drawn_sequences(arguments):
    """Tokens, labels and which labels are trained of each sequence of the first step.

    Which sequences these are is what the run draws; what is in them is read by document.
    """
    corpus = open_split(arguments, split_specs(arguments)["train"])
    batch = BatchSize(arguments.global_batch_size, arguments.hdp_global_batch_tokens)
    step = corpus.mixture(corpus.orders(), batch, arguments.seed).step(Position())
    for i in range(len(step)):
        source, row = corpus.sources[step.sources[i]], step.rows[i : i + 1]
        row = row + source.first_row
        if isinstance(source, TextSource):
            yield _of_text(source, int(row[0]), step, i)
            continue
        document = int(source.table.documents(row)[0])
        begin = int(source.table.starts(row)[0] + step.starts[i])
        end, last = begin + int(step.lengths[i]), begin + int(step.num_labels[i])
        tokens = TokenFile(source.prefix).read(document, begin, max(end, last + 1))
        is_trained = np.ones(last - begin, dtype=bool)
        if source.spans is not None:
            is_trained[:] = False
            for first, stop in source.spans.of(document):
                is_trained[max(0, first - begin - 1) : max(0, stop - begin - 1)] = True
        yield tokens[: end - begin], tokens[1 : last - begin + 1], is_trained


def _of_text(source, row, step, i):
    """The same of one that is tokenised on the fly: its record is read and tokenised alone."""
    tokenizer = build_tokenizer("byte")
    lines = [line for line in Path(source.spec.path).read_text().split("\n") if line.strip()]
    record = json.loads(lines[row])
    if source.spec.format == "chat":
        (made,) = Conversations(tokenizer, source.spec.template).render(record)
        ids, spans = made.ids, made.spans.tolist()
    else:
        ids = np.append(tokenizer.tokenize_batch([record["text"]]).ids, tokenizer.eod)
        spans = [(1, len(ids))]
    assert step.starts[i] == 0
    is_trained = np.zeros(len(ids), dtype=bool)
    for first, stop in spans:
        is_trained[first:stop] = True
    last = int(step.num_labels[i])
    return ids[: int(step.lengths[i])], ids[1 : last + 1], is_trained[1 : last + 1]


def _watch_routers(gpt):
    """A list that each router's logits ``[t, E]`` will be added to, differentiable."""
    seen = []

    def watch(router, inputs, _):
        bias = 0 if router.bias is None else router.bias
        seen.append(inputs[0].flatten(0, 1) @ router.weight.t() + bias)

    for router in routers_of([gpt]):
        router.register_forward_hook(watch)
    return seen


def _router_loss(arguments, logits):
    """Balancing loss and z-loss of one whole sequence at one layer, each times its tokens."""
    (length, experts), topk = logits.shape, arguments.moe_router_topk
    scores = logits.softmax(-1)
    if arguments.moe_router_score_function == "sigmoid":
        scores = logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True)
    chosen = functional.one_hot(logits.topk(topk).indices, experts).sum(1).to(logits.dtype)
    balance = experts * (chosen.mean(0) / topk) @ scores.mean(0)
    z = logits.logsumexp(-1).square().mean()
    balance_coeff, z_coeff = arguments.moe_aux_loss_coeff, arguments.moe_z_loss_coeff or 0.0
    return length * (balance_coeff * balance + z_coeff * z)


def largest_error(found, expected):
    """Largest relative error (norm by norm) of the loss and of any parameter's gradient."""
    (loss, grads), (expected_loss, expected_grads) = found, expected
    assert grads.keys() == expected_grads.keys()
    scale = max((grad.norm().item() for grad in expected_grads.values()), default=0.0)
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
    expected = reference_on_first_rank(first)
    if expected is None:
        return None
    return [largest_error(gradients, expected) for gradients in found]


def reference_on_first_rank(arguments):
    """`reference_gradients` after a parallel run; None on the other ranks."""
    stages, expert_ranks = (
        arguments.pipeline_model_parallel_size,
        arguments.expert_model_parallel_size,
    )
    if arguments.tensor_model_parallel_size * stages * expert_ranks > 1:
        parallel.finish()
        parallel.initialise(stock(arguments))
    return reference_gradients(arguments) if dist.get_rank() == 0 else None


_ALONE = {
    **dict.fromkeys(("tensor_model_parallel_size", "pipeline_model_parallel_size"), 1),
    **dict.fromkeys(("expert_model_parallel_size", "expert_tensor_parallel_size"), 1),
    **dict.fromkeys(("hybrid_data_parallel", "sequence_parallel"), False),
    **{f"account_for_{one}_in_pipeline_split": False for one in ("embedding", "loss")},
    **{f"decoder_{one}_pipeline_num_layers": None for one in ("first", "last")},
    **{f"recompute_{one}": None for one in ("granularity", "method", "modules", "num_layers")},
    "num_layers_per_virtual_pipeline_stage": None,
    "num_virtual_stages_per_pipeline_rank": None,
    "pipeline_model_parallel_layout": None,
    **{"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0},
    "moe_z_loss_coeff": None,
    "moe_token_dispatcher_type": "alltoall",
}


def stock(arguments):
    """Megatron without HDP, parallelism, recomputation and losses of routers.

    The vocabulary is padded alike.
    """
    return replace(arguments, **_ALONE)


def _gather_shards(gpt):
    """Completes gradient buckets of which each rank has reduced only its own shard."""
    for buffer in gpt.buffers + gpt.expert_parallel_buffers:
        group = buffer.data_parallel_group
        for bucket in buffer.buckets:
            mine = bucket.grad_data.chunk(group.size())[group.rank()].clone()
            dist.all_gather_into_tensor(bucket.grad_data, mine, group=group)


def _together(grads, group):
    """The gradients that the group's ranks hold, on each of them."""
    everyone = [None] * group.size()
    dist.all_gather_object(everyone, grads, group=group)
    together = {}
    for held in everyone:
        for name, grad in held.items():
            assert name not in together or torch.equal(together[name], grad), f"{name} differs"
            together[name] = grad
    return together


def _whole(parameter, grad):
    """A tensor-parallel parameter's gradient put together."""
    group = tensor_group(parameter)
    if group.size() == 1 or not getattr(parameter, "tensor_model_parallel", False):
        return grad.detach().clone()
    parts = [torch.empty_like(grad, device=compute_device()) for _ in range(group.size())]
    dist.all_gather(parts, grad.contiguous(), group=group)
    if parameter.partition_stride == 2:  # SwiGLU: each rank holds a piece of both halves
        parts = [half for i in range(2) for half in (part.chunk(2)[i] for part in parts)]
    return torch.cat(parts, dim=parameter.partition_dim)
