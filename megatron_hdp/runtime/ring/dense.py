"""Attention to all keys before a query: a rank's own block, its ring's, those of earlier parts.

Keys and values travel around the ring while queries stay (head-tail slices give every member the
same causal area); those of earlier parts travel in the same message. Backward sends them around
once more, and their gradient follows one hop behind, so that it ends at its owner after ``D - 1``
hops: three times ``(D - 1) / D`` of their bytes in all (ByteScale, sections 5.1 and 7).

Of a part whose queries take fewer bytes, keys stay and queries travel: the output found for them
follows one hop behind, in backward their gradient. Keys and values that must be made of what stays
are made once for all queries that pass by.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from megatron_hdp.planner.parts import queries_travel
from megatron_hdp.planner.query_ratio import query_ratio_of
from megatron_hdp.runtime.kernels import AttentionKernel, Block, Forward
from megatron_hdp.runtime.ring.comm import RingComm
from megatron_hdp.runtime.ring.layout import Rows, TokenLayout
from megatron_hdp.runtime.ring.message import Adding, Finding, Found, Passing, Tensors
from megatron_hdp.runtime.ring.parts import LOCAL, RING, EarlierKeys, Group, PartLayout
from megatron_hdp.runtime.ring.source import Keys, Maker, PlainKeys, Source
from megatron_hdp.runtime.ring.travelling import (
    ALL,
    accumulator,
    add_at,
    block_at,
    found_by_others,
    gradients_of,
    merge,
    outputs_of,
    travelling,
    wide_type,
)


class _Met(NamedTuple):
    """Keys that all queries of a ring meet: of the part itself, or of earlier ones."""

    keys: Keys
    group: Group | None
    """None: of the part itself."""
    source: Maker
    """Of `keys`."""
    gradients: Keys | None = None
    """In backward, of keys that were made once: what all queries find for them is added up."""


class _Queries(NamedTuple):
    """Queries, and what backward needs beside."""

    q: torch.Tensor
    dout: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor

    def at(self, rows: Rows) -> _Queries:
        """Some of them."""
        return _Queries(*(one[rows] for one in self))


@dataclass(frozen=True)
class DenseAttention:
    """Attention of one call, forward or backward, together with the other members of its ring."""

    layout: TokenLayout
    comm: RingComm
    kernel: AttentionKernel
    scale: float
    source: Source
    window: int | None = None
    """Of the local sequences; it reaches over each of the ring's. None in a `PartLayout`."""
    earlier: EarlierKeys | None = None
    """Of a `PartLayout`."""

    def forward(self, q: torch.Tensor, keys: Keys) -> tuple[torch.Tensor, torch.Tensor]:
        """Output ``[t, heads, d]`` and log-sum-exp ``[t, heads]``."""
        if self.earlier is not None:
            self.earlier.keep(self._part, *keys)
        ring = slice(0, self.layout.ring_tokens)
        queries, they_travel = q[ring], self._queries_travel(q, keys)
        whole = self._whole(keys, they_travel)
        total: tuple[torch.Tensor, torch.Tensor] | None = None
        for mets in self._passes(keys):
            here = self._made_first(mets, whole)
            sent = mets if they_travel else self._as_sent(mets, here)
            blocks = self._sent([queries] if they_travel else _keys_of(sent))
            if total is None:
                out, lse = self._output(q, whole.keys, self._own, whole.source)
                total = accumulator(out[ring]), lse[ring].clone()
            if they_travel:
                here = [self._made(met) for met in mets]
            for met in here:
                if met.group is not None:
                    self._merge(total, queries, met, 0)
            if they_travel:
                merge(*total, ALL, *self._output_of_others(blocks, here, total))
                continue
            for step, tensors in blocks:
                for met in _with_keys(sent, tensors):
                    self._merge(total, queries, met, step)
        assert total is not None, "without a ring there is a pass, too"
        out[ring], lse[ring] = total
        for group in self._groups(LOCAL):
            rows, block = self._part.first_rows(LOCAL), self._part.block_of(group)
            total = accumulator(out[rows]), lse[rows].clone()
            merge(*total, ALL, *self._output(q[rows], group.keys, block, self.source))
            out[rows], lse[rows] = total
        return out, lse

    def backward(
        self, dout: torch.Tensor, q: torch.Tensor, keys: Keys, out: torch.Tensor, lse: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gradients of the queries and of `keys`.

        Args:
            dout: gradient of the output.
            q: as in `forward`, and so are `keys`.
            keys: likewise.
            out: the output, with the sink if there is one.
            lse: likewise.
        """
        ring = slice(0, self.layout.ring_tokens)
        all_queries, they_travel = _Queries(q, dout, out, lse), self._queries_travel(q, keys)
        queries, dq_ring = all_queries.at(ring), None
        whole = self._whole(keys, they_travel, learns=True)
        several = they_travel or whole.gradients is not None
        for mets in self._passes(keys):
            here = self._made_first(mets, whole)
            sent = mets if they_travel else self._as_sent(mets, here)
            blocks = self._sent(_for_backward(queries) if they_travel else _keys_of(sent))
            if dq_ring is None:
                dq, *dkeys = self._gradients(all_queries, whole.keys, self._own, whole.source)
                if whole.gradients is not None:
                    self._add([], whole, ALL, dkeys)
                    dkeys = [torch.zeros_like(one, dtype=wide_type(one)) for one in keys]
                if self.earlier is not None:
                    self.earlier.add_found(self._part, *dkeys)
                dq_ring = accumulator(dq[ring])
                # many additions want a wide sum, one does not
                own = [accumulator(one[ring]) if several else one[ring] for one in dkeys]
            if they_travel:
                here = [self._made(met, learns=True) for met in mets]
            for met in here:
                if met.group is not None:
                    rows, _, block = self._where(met, 0)
                    found = self._gradients(queries.at(rows), met.keys, block, met.source)
                    add_at(dq_ring, rows, found[0])
                    self._add(own, met, ALL, found[1:])
            if they_travel:
                dq_ring += self._gradient_by_others(blocks, here, own, dq_ring)
            elif mets:
                by_others = self._gradients_by_others(blocks, sent, queries, dq_ring)
                for met, made in zip(_with_keys(mets, by_others), here, strict=True):
                    of_keys, of_made = self.source.returned(met.keys)
                    self._add(own, met, ALL, of_keys)
                    for total, gradient in zip(made.gradients or (), of_made, strict=True):
                        total[:, : gradient.shape[1], : gradient.shape[2]] += gradient
            for met, made in zip(mets, here, strict=True):
                if made.gradients is not None and (they_travel or met.group is not None):
                    self._add(own, met, ALL, self._taken_back(made.gradients, met.keys[0], q))
        assert dq_ring is not None, "without a ring there is a pass, too"
        dq[ring] = dq_ring
        if several:
            for gradient, total in zip(dkeys, own, strict=True):
                gradient[ring] = total
        if whole.gradients is not None:
            taken_back = self._taken_back(whole.gradients, keys[0], q)
            for gradient, total in zip(dkeys, taken_back, strict=True):
                gradient += total
        for group in self._groups(LOCAL):
            rows, block = self._part.first_rows(LOCAL), self._part.block_of(group)
            found = self._gradients(all_queries.at(rows), group.keys, block, self.source)
            dq_local = accumulator(dq[rows])
            dq_local += found[0]
            dq[rows] = dq_local
            self._add([], _Met(group.keys, group, self.source), ALL, found[1:])
        return dq, dkeys[0], dkeys[1]

    @cached_property
    def _own(self) -> Block:
        segments = self.layout.causal_segments
        return Block(segments, segments, causal=True, window=self.window)

    @property
    def _part(self) -> PartLayout:
        assert isinstance(self.layout, PartLayout), "earlier keys are those of parts"
        return self.layout

    def _queries_travel(self, q: torch.Tensor, keys: Keys) -> bool:
        """Whether queries go around the ring; all its members agree."""
        layout = self.layout
        if not isinstance(layout, PartLayout) or not layout.ring_slices:
            return False
        if self.earlier is not None and self.earlier.in_groups:
            return False  # they would go around once for each group
        per_token = sum(one[0].numel() for one in keys)
        size, dim = q[0].numel(), self.source.value_dim(keys)
        ratio = query_ratio_of(per_token, size, q.shape[1] * dim, q.shape[1], q.element_size())
        earlier = layout.earlier.get(RING)
        return queries_travel(layout.ring_tokens, earlier.stop if earlier else 0, ratio)

    def _groups(self, kind: str) -> Iterator[Group]:
        return iter(()) if self.earlier is None else self.earlier.groups(self._part, kind)

    def _passes(self, keys: Keys) -> Iterator[list[_Met]]:
        """What queries meet in each pass around the ring; a single one without a ring."""
        if not self.layout.ring_slices:
            yield []
            return
        ring, groups = slice(0, self.layout.ring_tokens), self._groups(RING)
        own, first = _Met((keys[0][ring], keys[1][ring]), None, self.source), next(groups, None)
        yield [own] if first is None else [own, _Met(first.keys, first, self.source)]
        for group in groups:
            yield [_Met(group.keys, group, self.source)]

    def _whole(self, keys: Keys, they_travel: bool, learns: bool = False) -> _Met:
        """All keys of this rank, made where those of some heads travel so."""
        met = _Met(keys, None, self.source)
        if they_travel or not self.source.num_made or not self.layout.ring_slices:
            return met
        return self._made(met, learns)

    def _made_first(self, mets: list[_Met], whole: _Met) -> list[_Met]:
        """The same keys as `_whole` has its own."""
        if whole.source is self.source:
            return mets
        ring, found = slice(0, self.layout.ring_tokens), []
        for met in mets:
            if met.group is not None:
                found.append(self._made(met, learns=whole.gradients is not None))
                continue
            gradients = whole.gradients and _at(whole.gradients, ring)
            found.append(whole._replace(keys=_at(whole.keys, ring), gradients=gradients))
        return found

    def _as_sent(self, mets: list[_Met], made: list[_Met]) -> list[_Met]:
        """The same as they travel."""
        return [
            met._replace(keys=self.source.sent(met.keys, one.keys), source=self.source.passing)
            for met, one in zip(mets, made, strict=True)
        ]

    def _taken_back(self, gradients: Keys, first: torch.Tensor, q: torch.Tensor) -> Keys:
        """Gradients of keys that were made, as those of what they were made of."""
        dk, dv = (one.to(q.dtype) for one in gradients)
        return self.source.gradients(dk, dv, first)

    def _made(self, met: _Met, learns: bool = False) -> _Met:
        """The same keys, made for all queries that will meet them here.

        Args:
            met: keys of this rank.
            learns: whether their gradients are added up.
        """
        if self.source.is_plain:
            return met
        k, v = self.source.keys_and_values(*met.keys)
        made = met._replace(keys=(k, v), source=PlainKeys())
        if not learns:
            return made
        dk, dv = (torch.zeros_like(one, dtype=wide_type(one)) for one in (k, v))
        return made._replace(gradients=(dk, dv))

    def _sent(self, tensors: Tensors) -> Passing:
        """What comes from the others; our own leave meanwhile."""
        if not self.layout.ring_slices:
            return iter(())
        blocks = travelling(tensors, self.layout, self.comm)
        next(blocks)
        return blocks

    def _where(self, met: _Met, step: int, of_others: bool = False) -> tuple[Rows, Rows, Block]:
        """Rows of queries, rows of the keys that they see, and their block.

        Args:
            met: keys; those of earlier parts are seen by all queries of one sequence.
            step: whose keys are here: those of the ring member so many places before.
            of_others: those of that member are the queries instead.
        """
        if met.group is not None:
            return self._part.first_rows(RING), ALL, self._part.block_of(met.group)
        here = self.layout.index
        there = (here - step) % self.layout.degree
        return block_at(self.layout, *((there, here) if of_others else (here, there)))

    def _output(
        self, q: torch.Tensor, keys: Keys, block: Block, source: Maker
    ) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = source.keys_and_values(*keys)
        return self.kernel.forward(q, k, v, block, self.scale)

    def _merge(self, total: Tensors, q: torch.Tensor, met: _Met, step: int) -> None:
        rows, kv_rows, block = self._where(met, step)
        out, lse = total
        keys = _at(met.keys, kv_rows)
        merge(out, lse, rows, *self._output(q[rows], keys, block, met.source))

    def _output_of_others(self, blocks: Passing, mets: list[_Met], like: Tensors) -> Tensors:
        """What our queries find at all others, as output and log-sum-exp."""

        def find(step: int, tensors: list[torch.Tensor]) -> Adding:
            found = []
            for met in mets:
                rows, kv_rows, block = self._where(met, step, of_others=True)
                keys = _at(met.keys, kv_rows)
                found.append((rows, *self._output(tensors[0][rows], keys, block, met.source)))

            def add(totals: list[torch.Tensor]) -> None:
                for rows, out, lse in found:
                    merge(totals[0], totals[1], rows, out, lse)

            return add

        return self._by_others(blocks, outputs_of(like), find, like)

    def _gradients(
        self, of: _Queries, keys: Keys, block: Block, source: Maker
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        k, v = source.keys_and_values(*keys)
        whole = Forward(of.q, k, v, of.out, of.lse)
        dq, dk, dv = self.kernel.backward(of.dout, whole, block, self.scale)
        return dq, *source.gradients(dk, dv, keys[0])

    def _add(self, own: list[torch.Tensor], met: _Met, rows: Rows, found: Tensors) -> None:
        """Adds gradients of keys that are here."""
        if met.gradients is not None:
            for total, gradient in zip(met.gradients, found, strict=True):
                add_at(total, rows, gradient)
            return
        if met.group is not None:
            assert self.earlier is not None, "they are of earlier parts"
            self.earlier.add(met.group.stretch, *found)
            return
        for total, gradient in zip(own, found, strict=True):
            add_at(total, rows, gradient)

    def _gradients_by_others(
        self, blocks: Passing, mets: list[_Met], queries: _Queries, dq: torch.Tensor
    ) -> Tensors:
        """What all others find for our keys; what ours find at theirs is added to `dq`."""

        def find(step: int, tensors: list[torch.Tensor]) -> Adding:
            found = []
            for met in _with_keys(mets, tensors):
                rows, kv_rows, block = self._where(met, step)
                there = _at(met.keys, kv_rows)
                dq_block, *dkeys = self._gradients(queries.at(rows), there, block, met.source)
                add_at(dq, rows, dq_block)
                found += [(kv_rows, one) for one in dkeys]

            def add(totals: list[torch.Tensor]) -> None:
                for total, (rows, gradient) in zip(totals, found, strict=True):
                    add_at(total, rows, gradient)

            return add

        return self._by_others(blocks, gradients_of(like := _keys_of(mets)), find, like)

    def _gradient_by_others(
        self, blocks: Passing, mets: list[_Met], own: list[torch.Tensor], dq: torch.Tensor
    ) -> torch.Tensor:
        """What our queries find at all others; what theirs find for our keys is added to those."""

        def find(step: int, tensors: list[torch.Tensor]) -> Adding:
            there, found = _from_backward(tensors), []
            for met in mets:
                rows, kv_rows, block = self._where(met, step, of_others=True)
                here = _at(met.keys, kv_rows)
                dq_block, *dkeys = self._gradients(there.at(rows), here, block, met.source)
                self._add(own, met, kv_rows, dkeys)
                found.append((rows, dq_block))

            def add(totals: list[torch.Tensor]) -> None:
                for rows, gradient in found:
                    add_at(totals[0], rows, gradient)

            return add

        return self._by_others(blocks, gradients_of([dq]), find, [dq])[0]

    def _by_others(
        self, blocks: Passing, what: Found, find: Finding, like: Tensors
    ) -> list[torch.Tensor]:
        return found_by_others(blocks, what, self.layout, self.comm, find, like[0])


def _for_backward(queries: _Queries) -> Tensors:
    """What goes around in backward: log-sum-exp, row sums, queries, gradient of the output.

    Backward of a block reads of the output only its products with its gradient, row by row. The
    share of the output that lies along its gradient has the same ones: a number a head.
    """
    dout = accumulator(queries.dout)
    most = dout.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(dout.dtype).tiny)
    dout /= most  # its squares are neither too small nor too large
    along = (dout * queries.out).sum(-1) / dout.square().sum(-1).clamp(min=1)
    return [queries.lse, along / most[..., 0], queries.q, queries.dout]


def _from_backward(tensors: Tensors) -> _Queries:
    """The same, with an output that has these row sums."""
    lse, along, q, dout = tensors
    return _Queries(q, dout, (dout * along[..., None]).to(dout.dtype), lse)


def _keys_of(mets: list[_Met]) -> list[torch.Tensor]:
    return [one for met in mets for one in met.keys]


def _with_keys(mets: list[_Met], tensors: Tensors) -> Iterator[_Met]:
    """The same with other keys: a member's that pass by, or their gradients."""
    for met, first, second in zip(mets, tensors[::2], tensors[1::2], strict=True):
        yield met._replace(keys=(first, second))


def _at(keys: Keys, rows: Rows) -> Keys:
    return keys[0][rows], keys[1][rows]
