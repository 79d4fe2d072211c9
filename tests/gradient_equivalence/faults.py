"""Planted faults of gradient equivalence: with each of them gradients must differ."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
import torch

from megatron_hdp.data.mixture import TableSource
from megatron_hdp.data.steps import read_micro_batch
from megatron_hdp.megatron.execution.executor import HdpExecutor
from megatron_hdp.megatron.model import HdpMlaSelfAttention, last_stage
from megatron_hdp.megatron.model.router import HdpRouter
from megatron_hdp.megatron.options import expert_layers_of_chunk
from megatron_hdp.runtime.kernels import Block
from megatron_hdp.runtime.pipeline_comm import InterleavedComm
from megatron_hdp.runtime.ring.dense import DenseAttention
from megatron_hdp.runtime.ring.halo import Halo
from megatron_hdp.runtime.ring.latent import _Projection
from tests.gradient_equivalence.case import ACROSS, PP2, TP2_SP, Case, mixed, never_had_chat
from tests.gradient_equivalence.cases import (
    CASES,
    FUSED,
    FUSED_LENGTHS,
    PADDED_TP2,
    PADDED_TP2_SP,
    UNEVEN,
    YARN,
)
from tests.gradient_equivalence.grouped_experts import GroupedLinear, grouped_experts
from tests.gradient_equivalence.parted import QUERIES
from tests.gradient_equivalence.settings import (
    ALONE,
    EXPERT_MODELS,
    MTP,
    SHORT,
    TIED,
    layers,
    virtual,
)
from tests.gradient_equivalence.taken_over import taken_over
from tests.support.fake_deep_ep import Buffer
from tests.support.gradients import EXPERTS
from tests.support.mla import MLA


@dataclass(frozen=True)
class Fault:
    """What is replaced by what in a case's steps."""

    case: Case
    planted: tuple[tuple[str, Any], ...] = ()
    least: float = 1e-6
    """How far gradients must be off."""


def read_without_a_slice(*args, **kwargs):
    """Reads a micro-batch whose first ring slice carries no loss."""
    micro_batch = read_micro_batch(*args, **kwargs)
    micro_batch.loss_mask[: sum(micro_batch.ring_slices[:1])] = False
    return micro_batch


def read_at_wrong_positions(*args, **kwargs):
    """Reads a micro-batch whose first tail chunk is one position further than it is."""
    micro_batch = read_micro_batch(*args, **kwargs)
    for tokens in micro_batch.ring_slices[:1]:
        micro_batch.positions[tokens // 2 : tokens] += 1
    return micro_batch


def block_without_heads(layout, queries, keys):
    """A ring in which no head chunk is seen as a whole."""
    segments = layout.half_segments
    return layout.tails, layout.tails, Block(segments, segments, causal=False)


def with_no_weight(self, blocks, mets, like):
    """What a part's queries find at others, as if its weights summed to one."""
    out, lse = OF_OTHERS(self, blocks, mets, like)
    return out, torch.zeros_like(lse)


def kept_one_token_too_early(layout, window):
    """A halo that keeps for the next part the tokens before those that it sees."""
    made = HALO(layout, window)
    off = [(stretch, min(1, rows.start), rows) for stretch, rows in made.kept]
    kept = [(one, slice(rows.start - by, rows.stop - by)) for one, by, rows in off]
    return replace(made, kept=tuple(kept))


def back_from_one_rank(self, x, in_rank, received):
    """What becomes of a token that no expert of the group's first rank was for is lost."""
    return BACK(self, x, in_rank, received) * in_rank[:, :1]


def finalize_with_one_token_too_many(self, step, num_loss_tokens, *args, **kwargs):
    return FINALIZE(self, step, num_loss_tokens + 1, *args, **kwargs)


def finalize_with_doubled_experts(self, step, divisor, before_sync, model, *args, **kwargs):
    FINALIZE(self, step, divisor, before_sync, model, *args, **kwargs)
    for chunk in model:
        for buffer in chunk.expert_parallel_buffers:
            buffer.scale_gradients(2.0)


def rows_in_order(embedding, context, transformer, hidden, config, params, **_):
    """Takes a token's place in the micro-batch for its position."""
    return torch.arange(len(params.positions))


def first_of_each_chunk_again(values, here, first, others):
    """What stands behind a chunk is taken from its own beginning."""
    for depth, array in enumerate((first, *others)):
        room = array[here]
        of_depth = np.roll(values[: len(room)], -depth)[: len(values[depth:])]
        yield room[: len(of_depth)], of_depth


def by_place_in_the_pack(self, params, dtype):
    """The rotation of tokens whose positions count through the pack."""
    counted = replace(params, positions=torch.arange(len(params.positions)))
    return ROTATION(self, counted, dtype)


def to_the_latent_alone(self, dk, dv, latent):
    """Gradients of latents without that of the part of the keys beside them."""
    found, rotated = GRADIENTS(self, dk, dv, latent)
    return found, torch.zeros_like(rotated)


def seen_with_padding(self, params):
    tokens = SEEN_HERE(self, params)
    return replace(tokens, sequence_index=tokens.sequence_index.clamp(min=0))


def unchanged(x, group=None):
    """Leaves undone what it should do to its argument."""
    return x


def nothing(*args):
    """Leaves undone what it should do."""


def float32(self):
    """Really float32, where the tests' float64 stands for it."""
    return torch._C.TensorBase.float(self)


class ForgetfulLinear(GroupedLinear):
    """The last expert's weight gets no gradient."""

    def weights(self):
        """All weights, the last one detached."""
        *weights, last = self.parameters()
        return [*weights, last.detach() + 0 * last]


def not_scattered(hidden, group):
    """Hands each rank its run of its own part only."""
    return GATHER(hidden, tensor_parallel_output_grad=False, group=group)


def shapes_of_plain_1f1b(self, shapes, table):
    """Takes every micro-batch through one chunk before the next."""
    BEGIN(self, shapes, sorted(table, key=lambda entry: entry[1]))


def layers_of_the_other_stage(arguments, stage, chunk):
    """The first stage builds what belongs on the last one, and the other way round."""
    stages = arguments.pipeline_model_parallel_size
    return expert_layers_of_chunk(arguments, stages - 1 - stage, chunk)


@contextmanager
def layers_elsewhere() -> Iterator[None]:
    """Models whose stages have exchanged their layers."""
    target = "megatron_hdp.megatron.model.building.expert_layers_of_chunk"
    with mock.patch(target, layers_of_the_other_stage):
        yield


@contextmanager
def scale_of_the_channels() -> Iterator[None]:
    """Models taken over with a scale of their own, which is forgotten."""
    forgotten = mock.patch("megatron_hdp.megatron.lm.model._softmax_scale", nothing)
    with taken_over(softmax_scale=0.9), forgotten:
        yield


FINALIZE, SEEN_HERE, HALO = HdpExecutor._finalize, HdpRouter._seen_here, Halo.of
OF_OTHERS = DenseAttention._output_of_others
ROTATION, GRADIENTS = HdpMlaSelfAttention._rotation, _Projection.gradients
GATHER, BEGIN = last_stage.gather_from_sequence_parallel_region, InterleavedComm.begin
BACK = Buffer._back
IS_TRAINED = TableSource.is_trained
EXECUTOR, MODEL = "megatron_hdp.megatron.execution.executor", "megatron_hdp.megatron.model"
RING, READ = "megatron_hdp.runtime.ring", "megatron_hdp.data.steps.loaders.read_micro_batch"

_PARTS = Case(2, PP2 | ALONE | {"hdp_sequence_parts": 4}, (), 1)
_STREAMS = Case(2, {"hdp_tokens_per_rank": 32}, (), 1, streams=16)
_PARTS_IN_RINGS = Case(4, PP2 | {"hdp_sequence_parts": 4}, (), 1)
_RINGS = Case(4, {}, ("naive",), 0)
_MIXTURE = Case(2, {}, plans=0, arguments_of=mixed)
_POSITIONS = Case(2, YARN, plans=0)
_WINDOWS = Case(4, SHORT, ("naive",), 0)
_MTP = Case(2, MTP, plans=0)
_LATENT = Case(2, MLA, ())
_EXPERTS = Case(2, EXPERTS | ACROSS, ())
_BIASED = Case(2, EXPERTS | EXPERT_MODELS["deepseek"] | ACROSS, ())
_FUSED = Case(2, FUSED | PADDED_TP2, plans=0, lengths=FUSED_LENGTHS)
_FUSED_ALONE = replace(_FUSED, ranks=1)


def _planted(case: Case, target: str, replacement: Any, least: float = 1e-6) -> Fault:
    return Fault(case, ((target, replacement),), least)


FAULTS: dict[str, Fault] = {
    "lost-source-trained": Fault(replace(_MIXTURE, around=never_had_chat)),
    "slice-dropped": _planted(_RINGS, READ, read_without_a_slice),
    "wrong-position": _planted(_RINGS, READ, read_at_wrong_positions),
    "wrong-block": _planted(_RINGS, f"{RING}.dense.block_at", block_without_heads),
    "wrong-scale": _planted(
        _RINGS, f"{EXECUTOR}.HdpExecutor._finalize", finalize_with_one_token_too_many
    ),
    "parts-without-later-queries": _planted(_PARTS, f"{RING}.parts.EarlierKeys.add_found", nothing),
    "parts-see-themselves-alone": Fault(
        _PARTS,
        (
            (f"{RING}.parts.EarlierKeys.groups", lambda *_: iter(())),
            (f"{RING}.parts.EarlierKeys.add_found", nothing),
        ),
    ),
    "parts-queries-log-sum-exp": Fault(
        _PARTS_IN_RINGS,
        (*QUERIES, (f"{RING}.dense.DenseAttention._output_of_others", with_no_weight)),
    ),
    "parts-halo-too-early": _planted(
        replace(_PARTS_IN_RINGS, settings=_PARTS_IN_RINGS.settings | SHORT),
        f"{RING}.windowed.Halo.of",
        kept_one_token_too_early,
    ),
    "parts-balance-experts-alone": _planted(  # each by its own counts, not the micro-batch's
        replace(_PARTS, settings=_PARTS.settings | EXPERTS),
        "megatron_hdp.megatron.execution.parts.routed_of",
        lambda micro_batch: None,
    ),
    "streams-count-twice": _planted(
        _STREAMS,
        "megatron_hdp.megatron.execution.model_pass.StepInProgress.computed_again",
        lambda self: self,
    ),
    "mask-not-heeded": _planted(
        _MIXTURE,
        "megatron_hdp.data.mixture.table_source.TableSource.is_trained",
        lambda self, row, start, stop: IS_TRAINED(self, row, start, stop) | True,
    ),
    "positions-of-the-micro-batch": _planted(
        _POSITIONS,
        f"{MODEL}.rotary.OwnPositionRotaryEmbedding.get_rotary_seq_len",
        rows_in_order,
        1e-3,
    ),
    "halo-forgotten": _planted(
        _WINDOWS,
        f"{RING}.halo.Halo.home",
        lambda self, dk, dv, comm, earlier: (dk[self.own], dv[self.own]),
    ),
    "halo-too-short": _planted(
        _WINDOWS, f"{RING}.windowed.Halo.of", lambda layout, window: HALO(layout, window - 1)
    ),
    "scale-of-the-channels": Fault(
        Case(2, {"hdp_fused_loss": False}, (), around=scale_of_the_channels)
    ),
    "mtp-wrong-token": _planted(
        _MTP, "megatron_hdp.data.steps.micro_batch._by_depth", first_of_each_chunk_again, 1e-4
    ),
    "mtp-one-divisor": _planted(
        _MTP,
        "megatron_hdp.megatron.step.figures.FurtherLosses.weights",
        lambda losses, step, loss_tokens: (0.35,) * losses.depths,
        1e-4,
    ),
    "mla-own-heads": _planted(
        Case(4, MLA | TP2_SP, ()),
        f"{MODEL}.mla.copy_to_tensor_model_parallel_region",
        unchanged,
    ),
    "mla-positions": _planted(
        _LATENT, f"{MODEL}.mla.HdpMlaSelfAttention._rotation", by_place_in_the_pack
    ),
    "mla-rotated-part": _planted(
        Case(2, MLA | {"hdp_mla_ring": "latent"}, ()),
        f"{RING}.latent._Projection.gradients",
        to_the_latent_alone,
    ),
    "padding-counted": _planted(
        _EXPERTS, f"{MODEL}.router.HdpRouter._seen_here", seen_with_padding
    ),
    "ring-not-summed": _planted(
        _EXPERTS, "megatron_hdp.runtime.loss.balance._sum_over_ring", nothing
    ),
    "no-router-loss": _planted(_EXPERTS, f"{MODEL}.router.HdpRouter._is_learning", nothing),
    "experts-doubled": _planted(
        _EXPERTS, f"{EXECUTOR}.HdpExecutor._finalize", finalize_with_doubled_experts
    ),
    "balanced-by-the-biased-choice": _planted(
        _BIASED,
        f"{MODEL}.router.HdpRouter._preferred",
        lambda self, logits, routing_map: routing_map,
        1e-9,
    ),
    "deepep-loses-tokens": _planted(
        CASES["flex-recompute"], "tests.support.fake_deep_ep.Buffer._back", back_from_one_rank
    ),
    "weights-not-accumulated": _planted(
        CASES["accumulated-experts"],
        "tests.support.fused_wgrad.wgrad_gemm_accum_fp32",
        nothing,
        1e-2,
    ),
    "sigmoid-in-float32": _planted(_BIASED, "torch.Tensor.float", float32, 1e-9),
    "grouped-expert-forgotten": Fault(
        Case(
            *(1, EXPERTS, ("auto",), 0),
            lengths=(5, 30),
            around=grouped_experts(ForgetfulLinear),
        )
    ),
    "hidden-gradients-not-summed": _planted(
        _FUSED, f"{MODEL}.last_stage.copy_to_tensor_model_parallel_region", unchanged
    ),
    "hidden-gradients-not-scattered": _planted(
        replace(_FUSED, settings=FUSED | PADDED_TP2_SP),
        f"{MODEL}.last_stage.gather_from_sequence_parallel_region",
        not_scattered,
    ),
    "added-twice": _planted(
        replace(_FUSED_ALONE, settings=FUSED | {"overlap_grad_reduce": True}),
        f"{MODEL}.fused_loss._added_to_main_grad",
        unchanged,
    ),
    "added-twice-tied": _planted(
        replace(_FUSED_ALONE, settings=FUSED | TIED),
        f"{MODEL}.fused_loss._added_to_main_grad",
        unchanged,
    ),
    "added-twice-tensor-parallel": _planted(
        replace(_FUSED, settings=FUSED | PADDED_TP2 | TIED),
        f"{MODEL}.fused_loss._added_to_main_grad",
        unchanged,
    ),
}
QUICK_FAULTS = {  # one of each part of a step; the others are slow
    *("slice-dropped", "wrong-position", "wrong-block", "wrong-scale", "halo-too-short"),
    *("parts-without-later-queries", "mask-not-heeded"),
    *("mtp-one-divisor", "mla-positions", "no-router-loss", "experts-doubled"),
    *("grouped-expert-forgotten", "hidden-gradients-not-summed", "added-twice"),
}
FAILING: dict[str, Fault] = {  # a step that must end with an error
    "shapes-in-another-order": _planted(
        Case(2, virtual(2) | ALONE, plans=0),
        "megatron_hdp.runtime.pipeline_comm.InterleavedComm.begin",
        shapes_of_plain_1f1b,
    ),
    "layers-on-the-wrong-stage": Fault(
        Case(2, layers(3) | UNEVEN | ALONE, plans=0, around=layers_elsewhere)
    ),
}
