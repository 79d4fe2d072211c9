"""Several attention backends in one run: which one computes a layer of a micro-batch.

All members of a ring choose the same, as they see the same layout and run the same layer.
TransformerEngine's rings know neither windows nor sinks, and its attention gives no log-sum-exp to
add a sink to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

import torch

from megatron_hdp.runtime.attention.backend import AttentionBackend, RunShapes
from megatron_hdp.runtime.attention.selection import OUR_RING, Selection, select_attention
from megatron_hdp.runtime.attention.transformer_engine import TransformerEngineAttention
from megatron_hdp.runtime.ring import (
    EarlierKeys,
    LatentRing,
    PartLayout,
    RingAttention,
    RingComm,
    TokenLayout,
)

Decision: TypeAlias = Callable[[TokenLayout], bool]
"""Whether a micro-batch's ring passes the latent on: the same on all its members."""

MadeShare: TypeAlias = Callable[[TokenLayout], float]
"""The share of the heads whose keys and values then travel made: the same on all members."""


class OneOfTwo:
    """A backend that hands each call on to one of two.

    Args:
        others: for all that is not for `special`.
        special: for what `is_special` says.
        is_special: asked with the micro-batch's layout and whether the layer has a window or sink.
        what: is for `special`, in words.
    """

    def __init__(
        self,
        others: AttentionBackend,
        special: AttentionBackend,
        is_special: Callable[[TokenLayout, bool], bool],
        what: str,
    ) -> None:
        self._others, self._special, self._is_special = others, special, is_special
        self.name = f"{others.name}, {what} by {special.name}"

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layout: TokenLayout,
        comm: RingComm,
        scale: float,
        *,
        window: int | None = None,
        sink: torch.Tensor | None = None,
        earlier: EarlierKeys | None = None,
    ) -> torch.Tensor:
        """See `AttentionBackend`."""
        is_special = self._is_special(layout, window is not None or sink is not None)
        attend = self._special if is_special else self._others
        how = {} if earlier is None else {"earlier": earlier}
        return attend(q, k, v, layout, comm, scale, window=window, sink=sink, **how)


class AttentionByLatent(OneOfTwo):
    """The backend of keys and values, and beside it a ring in which their latent travels.

    Where it is called with keys and values, these travel.

    Args:
        others: where keys and values travel, or nothing does.
        latent_ring: where the latent does.
        choice: "latent", "kv", or "auto": as `decide_by` says, and until then "kv".
    """

    def __init__(self, others: AttentionBackend, latent_ring: LatentRing, choice: str) -> None:
        self.latent_ring, self._choice = latent_ring, choice
        self._decision: Decision = lambda _: choice == "latent"
        self._made_share: MadeShare = lambda _: 0.0
        rings = {"auto": "rings of either by their cost", "latent": "rings of latents"}[choice]
        super().__init__(others, others, lambda *_: False, rings)
        self.name = f"{others.name}, {rings} by {latent_ring.kernel.name}"

    def decide_by(self, decision: Decision, made_share: MadeShare) -> None:
        """Lets a cost model decide, where the choice is left to it."""
        if self._choice == "auto":
            self._decision, self._made_share = decision, made_share

    def made_heads(self, layout: TokenLayout, num_heads: int) -> int:
        """Heads of so many whose keys and values travel made; those of the last one never do.

        None of a stream, of which latents alone are kept.
        """
        if not layout.ring_slices or (isinstance(layout, PartLayout) and layout.is_stream):
            return 0
        return min(int(self._made_share(layout) * num_heads), num_heads - 1)

    def latent_travels(self, layout: TokenLayout) -> bool:
        """Whether this micro-batch is for `latent_ring`; without a ring nothing travels.

        Its parts are for the same one, which finds what it kept of earlier parts. A stream always
        is: it keeps latents, far fewer bytes than keys and values.
        """
        if isinstance(layout, PartLayout) and layout.is_stream:
            return True
        return layout.longest_in_ring > 0 and self._decision(layout)


def with_float32_rings(
    selection: Selection, least_degree: int | None, shapes: RunShapes
) -> Selection:
    """The selection, with long rings by our own ring, which adds up in float32.

    All of them, where TransformerEngine is too old for rings.

    Args:
        selection: for short rings and whole sequences; our own ring stays as it is.
        least_degree: of long rings, at least 2; without it the selection stays as it is.
        shapes: of the run.

    Raises:
        ValueError: there is no kernel for our ring; says why.
    """
    backend = selection.backend
    is_old = isinstance(backend, TransformerEngineAttention) and not backend.takes_rings
    if is_old and shapes.num_ranks > 1:
        least_degree = 2
    if least_degree is None:
        return selection
    return _partly_ours(
        selection,
        shapes,
        lambda layout, _: layout.degree >= least_degree,
        f"rings of {least_degree} ranks and more",
    )


def with_own_ring(selection: Selection, shapes: RunShapes) -> Selection:
    """The selection, with layers that have a window or a sink by our own ring.

    Raises:
        ValueError: there is no kernel for our ring; says why.
    """
    if isinstance(selection.backend, RingAttention) or not (shapes.windows or shapes.sink):
        return selection
    ours = select_attention(shapes, OUR_RING)
    if not shapes.plain_layers:
        why = "every layer has a window or a sink, and its rings know neither"
        refused = {selection.backend.name: why} | selection.refused | ours.refused
        return replace(ours, refused=refused)
    what = "layers with a window or a sink"
    return _with_ours(selection, ours, lambda _, has_either: has_either, what)


def with_parts(selection: Selection, shapes: RunShapes) -> Selection:
    """The selection, with micro-batches that run in parts by our own ring.

    Raises:
        ValueError: there is no kernel for our ring; says why.
    """
    return _partly_ours(
        selection,
        shapes,
        lambda layout, _: isinstance(layout, PartLayout),
        "parts of micro-batches",
    )


def with_double_rings(selection: Selection, comm: RingComm, shapes: RunShapes) -> Selection:
    """The selection, with double rings by our own ring.

    Raises:
        ValueError: there is no kernel for our ring; says why.
    """
    return _partly_ours(
        selection, shapes, lambda layout, _: comm.group_size(layout.ring) > 0, "double rings"
    )


def _partly_ours(
    selection: Selection,
    shapes: RunShapes,
    is_special: Callable[[TokenLayout, bool], bool],
    what: str,
) -> Selection:
    if isinstance(selection.backend, RingAttention):
        return selection
    return _with_ours(selection, select_attention(shapes, OUR_RING), is_special, what)


def _with_ours(
    selection: Selection,
    ours: Selection,
    is_special: Callable[[TokenLayout, bool], bool],
    what: str,
) -> Selection:
    backend = OneOfTwo(selection.backend, ours.backend, is_special, what)
    return replace(selection, backend=backend, refused=selection.refused | ours.refused)


def with_latent_ring(selection: Selection, choice: str, shapes: RunShapes) -> Selection:
    """The selection, with a ring for latents beside it.

    Args:
        selection: for keys and values.
        choice: as of `AttentionByLatent`; with "kv" the selection stays as it is.
        shapes: of the run.

    Raises:
        ValueError: there is no kernel for our ring; says why.
    """
    if choice == "kv":
        return selection
    ours = selection
    if not isinstance(selection.backend, RingAttention):
        ours = select_attention(shapes, OUR_RING)
    assert isinstance(ours.backend, RingAttention), "our own ring is made of a block kernel"
    return replace(
        selection,
        backend=AttentionByLatent(selection.backend, LatentRing(ours.backend.kernel), choice),
        refused=selection.refused | ours.refused,
    )
