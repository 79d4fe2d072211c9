"""Steps with items among the tokens, and the same of one rank that encodes and runs each alone."""

from contextlib import ExitStack
from dataclasses import replace
from unittest import mock

import torch
import torch.distributed as dist

from megatron_hdp.media import ItemCostModel
from megatron_hdp.megatron import parallel
from megatron_hdp.megatron.model.initialisation import global_parameters
from megatron_hdp.session import MediaItem
from tests.support import gradients
from tests.support.family_media import (
    GRIDS_OF,
    ITEMS_OF,
    PROJECTORS,
    Levels,
    family_encoder,
    turn,
)
from tests.support.gradients import largest_error, whole_gradients
from tests.support.own_loop import HIDDEN, batch_of, plan_of, session_of
from tests.support.vision_models import drawn_patches

CHANNELS, PER_ROW = 6, 4
ITEMS = ((2, 0, 3), (3, 10, 40), (3, 60, 1), (4, 63, 1), (5, 5, 25), (7, 1, 90), (7, 120, 80))
"""Sequence, first token, rows: at a sequence's begin and end, over several chunks of a ring."""


class Encoder(torch.nn.Module):
    """A layer of attention within each item, a norm, and four patches merged into a row."""

    cost = ItemCostModel(patch_s=1.0, patch2_s=0.01, pack_s=2.0)
    patches_per_row, patches_per_pack = PER_ROW, 400

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(5)

        def drawn(*shape):
            values = torch.randn(*shape, generator=generator, dtype=torch.float64)
            return torch.nn.Parameter(values / shape[-1] ** 0.5)

        self.enter, self.qkv = drawn(8, CHANNELS), drawn(24, 8)
        self.scale, self.merge = drawn(8, 1), drawn(HIDDEN, 8 * PER_ROW)
        self.calls = []

    def patches(self, item):
        """Of an array ``[patches, channels]``."""
        return len(item)

    def forward(self, items):
        """Rows of all items."""
        self.calls.append([len(one) for one in items])
        return torch.cat([self._rows(one) for one in items])

    def _rows(self, item):
        x = item @ self.enter.T
        q, k, v = (x @ self.qkv.T).chunk(3, dim=-1)
        x = x + (q @ k.T).softmax(-1) @ v
        x = torch.nn.functional.normalize(x) * self.scale[:, 0]
        return x.reshape(len(item) // PER_ROW, -1) @ self.merge.T


def batch_with_items(items=ITEMS):
    """Random tokens and items, of any lengths."""
    generator = torch.Generator().manual_seed(9)
    media = [
        MediaItem(
            sequence,
            start,
            torch.randn(PER_ROW * rows, CHANNELS, generator=generator, dtype=torch.float64),
        )
        for sequence, start, rows in items
    ]
    return replace(batch_of(), media=media)


def encoder_gradients(encoder):
    """By name, of what is trained."""
    weights = dict(encoder.named_parameters())
    return {f"encoder.{name}": one.grad for name, one in weights.items() if one.requires_grad}


@gradients.seldom_compiled
def errors_of(
    arguments,
    seeds=(None, 0),
    *faults,
    trained=("model", "encoder"),
    family=None,
    freezes=False,
    by_megatron=False,
    **how,
):
    """Body of a rank: the largest error of each plan, on the first rank; calls of the encoder.

    Args:
        arguments: of the run.
        seeds: of plans.
        faults: to plant.
        trained: a projector may be trained without its encoder, or the other way round.
        family: of a model of pictures and text, whose encoder and items are taken.
        by_megatron: whether Megatron alone has built the model.
        freezes: whether the whole language model learns nothing, once the session is made.
        how: items are encoded, as `HdpSession.attach_encoder` takes it.
    """
    parallel.initialise(arguments)
    encoder, batch = made(family)
    found, calls = {}, []
    encoder.register_forward_pre_hook(
        lambda module, given: calls.append([module.patches(one) for one in given[0]])
    )
    for name, weight in encoder.named_parameters():
        kind = "projector" if family and name.startswith(PROJECTORS) else "encoder"
        weight.requires_grad_(kind in trained)
    with ExitStack() as planted:
        for target, replacement in faults:
            planted.enter_context(mock.patch(target, replacement))
        session = session_of(arguments, by_megatron)
        for chunk in session.chunks if freezes else ():
            chunk.requires_grad_(False)
        session.attach_encoder(encoder, **how)
        for seed in seeds:
            calls.clear()
            report = session.step(batch, plan=plan_of(session, batch, seed))
            grads = whole_gradients(session.chunks, arguments)
            found[seed] = report.loss, grads | encoder_gradients(encoder)
    of_ranks = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, calls)
    parallel.finish()
    parallel.initialise(gradients.stock(arguments))
    if dist.get_rank():
        return None
    loss, expected = reference(arguments, batch, family)
    errors = {}
    for seed, (found_loss, grads) in found.items():
        of_trained = {name: expected[name] for name in grads}
        errors[seed] = largest_error((found_loss, grads), (loss, of_trained))
    return errors, of_ranks


def made(family):
    """An encoder, and a batch with items for it."""
    if family is None:
        return Encoder(), batch_with_items()
    encoder = family_encoder(family)
    items = zip(ITEMS_OF[family], drawn_patches(encoder, GRIDS_OF[family]), strict=True)
    media = [MediaItem(sequence, start, one) for (sequence, start), one in items]
    return encoder, replace(batch_of(), media=media)


def reference(arguments, batch, family=None):
    """Loss and gradients from this rank alone, one sequence after another."""
    gpt, encoder = gradients.stock_model(arguments), made(family)[0]
    levels = Levels(gpt, getattr(encoder, "levels", 1))
    routers = gradients._watch_routers(gpt)
    total, of_routers, num = torch.zeros(()).double(), torch.zeros(()).double(), 0
    depths = arguments.mtp_num_layers or 0
    behind, num_behind = torch.zeros(depths).double(), torch.zeros(depths)
    for i, tokens in enumerate(map(torch.as_tensor, batch.tokens)):
        length, mask = len(tokens), torch.as_tensor(batch.loss_mask[i]).clone()
        positions = torch.arange(length)[None]
        causal = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
        embedded = gpt.embedding(tokens[None], positions)
        levels.begin(length)
        is_item = torch.zeros(length, dtype=torch.bool)
        for one in batch.media:
            if one.sequence == i:
                rows = levels.of(encoder([one.data]), one.start)
                here = slice(one.start, one.start + len(rows))
                embedded = torch.cat([embedded[: here.start], rows[:, None], embedded[here.stop :]])
                mask[here], is_item[here] = False, True
        if getattr(encoder, "positions", None) is not None:
            turn(gpt, encoder, length, [one for one in batch.media if one.sequence == i])
        if depths:
            given = gpt, tokens, tokens[1:], mask[1:], causal, depths, is_item, embedded
            losses, counts = gradients._losses_behind(*given)
            behind, num_behind = behind + torch.stack(losses), num_behind + torch.tensor(counts)
            logits = gpt.seen[0][0]
        else:
            logits = gpt(tokens[None], positions, causal, decoder_input=embedded)[0]
        of_routers = of_routers + sum(gradients._router_loss(arguments, seen) for seen in routers)
        routers.clear()
        predicted = logits[:-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        weights = torch.as_tensor(batch.weights[i])
        total = total - (weights[1:] * predicted)[mask[1:]].sum()
        num += int(mask[1:].sum())
    names, parameters = zip(*global_parameters(gpt), strict=True)
    mine = dict(encoder.named_parameters())
    names = (*names, *(f"encoder.{name}" for name in mine))
    parameters = (*parameters, *mine.values())
    whole = (total + of_routers) / num
    if depths:
        whole = whole + arguments.mtp_loss_scaling_factor * (behind / num_behind).mean()
    grads = torch.autograd.grad(whole, parameters, allow_unused=True)
    grads = [
        torch.zeros_like(p) if g is None else g for g, p in zip(grads, parameters, strict=True)
    ]
    return (total / num).item(), dict(zip(names, grads, strict=True))
