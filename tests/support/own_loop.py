"""Steps of a session on real ranks, and the same of one rank that runs each sequence alone.

The reference is megatron-core's stock model; log-probabilities are PyTorch's, losses are summed as
they are defined, over whole sequences.
"""

from contextlib import ExitStack
from dataclasses import fields, replace
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

from megatron_hdp.megatron import parallel
from megatron_hdp.megatron.model import building
from megatron_hdp.megatron.model.initialisation import global_parameters, initialise_by_name
from megatron_hdp.megatron.options import num_model_chunks
from megatron_hdp.options import HdpOptions
from megatron_hdp.session import FromHidden, FromLogProbs, HdpSession, TokenBatch, weights_of
from tests.support import gradients
from tests.support.gradients import VOCABULARY, largest_error, tiny_arguments, whole_gradients
from tests.support.random_plans import in_streams, random_plan

LENGTHS = (1, 2, 30, 100, 64, 65, 7, 200, 129)
HIDDEN = 16


def arguments_of(**overrides):
    """A tiny model in float64 whose longest sequences need two ranks."""
    common = {"hdp_tokens_per_rank": 128, "seq_length": 200, "max_position_embeddings": 200}
    return tiny_arguments(None, **(common | overrides))


def batch_of(lengths=LENGTHS, seed=0):
    """Random tokens, masks, weights of both signs, and arrays for the losses below."""
    rng = np.random.default_rng(seed)

    def each(make):
        return [make(length) for length in lengths]

    return TokenBatch(
        tokens=each(lambda n: rng.integers(0, VOCABULARY, n)),
        loss_mask=each(lambda n: rng.random(n) < 0.7),
        weights=each(rng.standard_normal),
        arrays={
            "old": each(lambda n: torch.from_numpy(-6 + rng.standard_normal(n))),
            "advantage": each(lambda n: rng.standard_normal(n).astype(np.float32)),
            "teacher": each(lambda n: rng.standard_normal((n, HIDDEN))),
            "returns": each(lambda n: rng.standard_normal(n).tolist()),
        },
    )


def clipped(log_probs, arrays):
    """The clipped objective of PPO, and how many ratios were clipped."""
    ratio = (log_probs - arrays["old"]).exp()
    advantage = arrays["advantage"].double()
    losses = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    return losses, {"clipped": ((ratio - 1).abs() > 0.2).double(), "ratio": ratio}


def explored(found, arrays):
    """The same with a bonus for entropy, by its own share of each token."""
    losses, sums = clipped(found[:, 0], arrays)
    return losses - 0.1 * (1 + arrays["advantage"].square()) * found[:, 1], sums


def distilled(hidden, arrays):
    """Distance from a teacher's hidden states, summed by the function itself."""
    return (hidden - arrays["teacher"]).square().sum()


def preferred(found):
    """Margins between pairs of sequences (DPO), clipped ratios of whole ones (GSPO), entropies."""
    sums = torch.stack([one.sum() for one, _ in found])
    margins = 0.01 * (sums[[2, 4, 7]] - sums[[3, 5, 8]])
    ratios = torch.stack([(one + 6).mean().exp() for one, _ in found])
    clipped = torch.minimum(ratios, ratios.clamp(0.9, 1.5))
    most = torch.stack([entropies.max() for _, entropies in found])
    return clipped.sum() - torch.nn.functional.logsigmoid(margins).sum() - most.square().sum()


class Values:
    """A head that predicts returns; alike on every rank."""

    def __init__(self):
        generator = torch.Generator().manual_seed(3)
        head = torch.randn(HIDDEN, generator=generator, dtype=torch.float64)
        self.head = torch.nn.Parameter(head)

    def __call__(self, hidden, arrays):
        return (hidden @ self.head - arrays["returns"]).square()


def loss_of(kind):
    """(what a session is given, divisor) of a kind of loss."""
    if kind == "clipped":
        return FromLogProbs(clipped), len(LENGTHS)
    if kind == "hot":
        return FromLogProbs(explored, temperature=0.7, with_entropies=True), None
    if kind == "preferred":
        return FromLogProbs.weighed(0.8, with_entropies=True), 1
    if kind == "distilled":
        return FromHidden(distilled), None
    if kind == "values":
        values = Values()
        return FromHidden(values, [values.head]), 0.25
    return None, None


def session_of(arguments, by_megatron=False):
    """A session over a fresh model, in a job whose groups are there.

    Args:
        arguments: of the run.
        by_megatron: whether Megatron alone has built the model.
    """
    parallel.set_seeds(arguments.seed)
    if by_megatron:
        chunks = [stock_chunk(arguments, i) for i in range(num_model_chunks(arguments))]
        of_hdp = {item.name: getattr(arguments, item.name) for item in fields(HdpOptions)}
        seq_length = arguments.seq_length
        return HdpSession.of_model(chunks, vocab_size=VOCABULARY, seq_length=seq_length, **of_hdp)
    chunks = building.build_chunks(arguments, VOCABULARY)
    return HdpSession(arguments, chunks, vocab_size=VOCABULARY)


def stock_chunk(arguments, number, adapt=lambda model: None, **ddp):
    """A part of the model as a framework builds it from Megatron's classes.

    Args:
        arguments: of the run.
        number: of the part on this rank.
        adapt: changes the model before its weights are drawn.
        ddp: settings of Megatron's DDP in place of the run's.
    """
    num = num_model_chunks(arguments)
    config = building.transformer_config(arguments)
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(
            num_experts=arguments.num_experts, normalization=arguments.normalization
        ),
        vocab_size=building.padded_vocab_size(VOCABULARY, arguments),
        max_sequence_length=arguments.max_position_embeddings,
        pre_process=number == 0 and parallel_state.is_pipeline_first_stage(),
        post_process=number == num - 1 and parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=not arguments.untie_embeddings_and_output_weights,
        position_embedding_type="rope",
        vp_stage=number if num > 1 else None,
    )
    adapt(model)
    initialise_by_name(model, arguments.seed)
    model.to(torch.float64)
    ddp = {
        "use_distributed_optimizer": arguments.use_distributed_optimizer,
        "overlap_grad_reduce": arguments.overlap_grad_reduce,
        **ddp,
    }
    ddp_config = DistributedDataParallelConfig(**ddp)
    return DistributedDataParallel(config, ddp_config, model, disable_bucketing=number > 0)


def plan_of(session, batch, seed):
    """The session's plan, or a random one."""
    if seed is None:
        return None
    tokens_per_rank, streams = session.arguments.hdp_tokens_per_rank, session.arguments.streams
    made = random_plan(
        [len(one) for one in batch.tokens],
        ranks=session.place.num_hdp_ranks,
        tokens_per_rank=16 * tokens_per_rank if streams else tokens_per_rank,
        seed=seed,
        offload=session.arguments.hdp_offload != "off" and not streams,
        most_parts=session.arguments.sequence_parts,
    )
    return in_streams(made, tokens_per_rank=tokens_per_rank, seed=seed) if streams else made


def step_of(session, batch, kind, seed):
    """(loss, whole gradients) of a step, those of the loss's own parameters under ``head``."""
    loss, divisor = loss_of(kind)
    plan, value = plan_of(session, batch, seed), None
    if kind == "preferred":
        how = {"temperature": loss.temperature, "with_entropies": True}
        both = session.log_probs(batch, dtype=torch.float64, plan=plan, **how)
        value, weights = weights_of(preferred, both)
        batch = replace(batch, arrays={"weights": weights})
    report = session.step(batch, loss, divisor=divisor, plan=plan)
    if seed is not None and session.arguments.hdp_offload != "off":
        assert report.offloaded_bytes
    found = whole_gradients(session.chunks, session.arguments)
    if kind == "values":
        heads = [None] * dist.get_world_size()
        dist.all_gather_object(heads, loss.parameters[0].grad)
        found["head"] = next(one for one in heads if one is not None)
    return report.loss if value is None else value, found


@gradients.seldom_compiled
def errors_of(arguments, kinds, seeds=(None, 0), *faults, by_megatron=False):
    """Body of a rank: by kind of loss and plan the largest error, on the first rank."""
    parallel.initialise(arguments)
    batch, found = batch_of(), {}
    with ExitStack() as planted:
        for target, replacement in faults:
            planted.enter_context(mock.patch(target, replacement))
        session = session_of(arguments, by_megatron)
        for chunk in session.chunks:
            chunk.eval()  # a step trains, whatever a loop did before
        for kind in kinds:
            for seed in seeds:
                if kind == "log-probs":
                    plan = plan_of(session, batch, seed)
                    how = {"dtype": torch.float64, "with_entropies": True, "plan": plan}
                    found[kind, seed] = session.log_probs(batch, **how)
                else:
                    found[kind, seed] = step_of(session, batch, kind, seed)
    parallel.finish()
    parallel.initialise(gradients.stock(arguments))
    if dist.get_rank():
        return None
    expected = {kind: reference(arguments, batch, kind) for kind in kinds}
    return {
        (kind, seed): (
            largest_difference(one, expected[kind])
            if kind == "log-probs"
            else largest_error(one, expected[kind])
        )
        for (kind, seed), one in found.items()
    }


def largest_difference(found, expected):
    """Of arrays, sequence by sequence."""
    assert [one.shape for one in found] == [one.shape for one in expected]
    return max((a - b).abs().max().item() for a, b in zip(found, expected, strict=True))


def reference(arguments, batch, kind):
    """Loss and gradients, or log-probabilities and entropies, from this rank alone, one by one."""
    gpt = gradients.stock_model(arguments)
    routers, hidden = gradients._watch_routers(gpt), []
    gpt.decoder.register_forward_hook(lambda *found: hidden.append(found[-1][:, 0]))
    loss, divisor = loss_of(kind)
    total, num, of_sequences = torch.zeros(()).double(), 0, []
    of_routers = torch.zeros(()).double()
    depths = arguments.mtp_num_layers or 0
    behind, num_behind = [torch.zeros(()).double()] * depths, [0] * depths
    for i, tokens in enumerate(map(torch.as_tensor, batch.tokens)):
        length, mask = len(tokens), torch.as_tensor(batch.loss_mask[i])
        causal = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
        if depths:
            given = gpt, tokens, tokens[1:], mask[1:], causal, depths
            losses, counts = gradients._losses_behind(*given)
            behind = [one + more for one, more in zip(behind, losses, strict=True)]
            num_behind = [one + more for one, more in zip(num_behind, counts, strict=True)]
            logits = gpt.seen[0][0]
        else:
            logits = gpt(tokens[None], torch.arange(length)[None], causal)[0]
        of_routers = of_routers + sum(gradients._router_loss(arguments, seen) for seen in routers)
        routers.clear()
        logits = logits / getattr(loss, "temperature", 1.0)
        all_of_them = logits[:-1].log_softmax(-1)
        predicted = all_of_them.gather(1, tokens[1:, None])[:, 0]
        if kind in ("hot", "preferred", "log-probs"):
            entropies = -(all_of_them.exp() * all_of_them).sum(-1)
            predicted = torch.stack((predicted, entropies), dim=1)
        arrays = {name: torch.as_tensor(np.asarray(one[i])) for name, one in batch.arrays.items()}
        if kind in ("distilled", "values"):
            rows, given = mask, hidden.pop()[mask]
        else:
            rows, given = mask.clone(), predicted[mask[1:]]
            rows[0] = False
        num += int(rows.sum())
        arrays = {name: one[rows] for name, one in arrays.items()}
        if kind in ("preferred", "log-probs"):
            whole = torch.zeros(length, 2).double().index_put((rows,), given)
            of_sequences.append(whole.T)
        elif loss is None:
            weights = torch.as_tensor(batch.weights[i])[rows]
            total = total - (weights * given).sum()
        else:
            losses = loss.function(given, arrays)
            losses = losses[0] if isinstance(losses, tuple) else losses
            total = total + losses.sum()
    if kind == "log-probs":
        return [one.detach() for one in of_sequences]
    if kind == "preferred":
        total = preferred(of_sequences)
    divisor = divisor or num
    names, parameters = zip(*global_parameters(gpt), strict=True)
    if kind == "values":
        names, parameters = (*names, "head"), (*parameters, loss.parameters[0])
    whole = (total + of_routers) / divisor
    for one, count in zip(behind, num_behind, strict=True):
        whole = whole + arguments.mtp_loss_scaling_factor / depths * one / count
    grads = torch.autograd.grad(whole, parameters, allow_unused=True)
    grads = [
        torch.zeros_like(p) if g is None else g for g, p in zip(grads, parameters, strict=True)
    ]
    return (total / divisor).item(), dict(zip(names, grads, strict=True))
