"""Sequences of a global batch as arrays, and what the caller knows of each of their tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import xxhash

from megatron_hdp.arrays import AnyArray, BoolArray, Int64Array
from megatron_hdp.data.media import decoded
from megatron_hdp.data.mixture import Position, Step
from megatron_hdp.data.steps import (
    PlanSettings,
    RankMicroBatch,
    RankShare,
    Reader,
    items_apart,
    plan_by,
    read_micro_batch,
)
from megatron_hdp.media import Patches, Sound
from megatron_hdp.megatron.media import BatchMedia, MediaItem, StepMedia
from megatron_hdp.planner import Plan

_KINDS = "biuf"  # numpy's letters of booleans, integers and floating-point numbers
_MOST_BYTES = 8


@dataclass(frozen=True)
class TokenBatch:
    """The sequences of one global batch; every rank of the job passes the same.

    Arrays are numpy's, torch's or lists, one for each sequence, with one entry for each of its
    tokens. Entry ``t`` is about token ``t`` itself: whether it is trained, what it weighs, what was
    known of it. It is predicted by the tokens before it, so nothing is asked of the first one of a
    sequence where a loss is about predictions.
    """

    tokens: Sequence[Any]
    """Token ids, ``[length]`` each, at least one."""
    loss_mask: Sequence[Any] | None = None
    """Bool or 0 and 1, ``[length]`` each: which tokens carry loss; all by default."""
    weights: Sequence[Any] | None = None
    """Floating-point, ``[length]`` each: what each token's loss is multiplied by; 1 by default."""
    arrays: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """By name, what a loss of the caller's own is to be given: ``[length, ...]`` each, numbers of
    at most 8 bytes."""
    media: Sequence[MediaItem] = ()
    """Items of the sequences, for the encoder of `HdpSession.attach_encoder`."""

    @classmethod
    def of(cls, batch: TokenBatch | Sequence[Any]) -> TokenBatch:
        """The batch itself, or one of plain sequences."""
        return batch if isinstance(batch, TokenBatch) else cls(batch)


def num_sequences(batch: TokenBatch | Sequence[Any]) -> int:
    """Those of a batch, or of a plain sequence of them."""
    return len(TokenBatch.of(batch).tokens)


class CheckedBatch:
    """A batch that can be run: arrays of all sequences one behind another, ``[tokens, ...]``.

    It is a `data.steps.TokenSource` of one source whose rows are the sequences.
    """

    def __init__(self, batch: TokenBatch, *, vocab_size: int, max_length: int) -> None:
        """Converts and checks.

        Raises:
            ValueError: lengths that differ, tokens outside the vocabulary, NaN, nothing to run.
        """
        tokens = [_of_token(one, "tokens", i) for i, one in enumerate(batch.tokens)]
        if not tokens:
            raise ValueError("found a batch of no sequences, expected at least one")
        self.lengths: Int64Array = np.array([len(one) for one in tokens], dtype=np.int64)
        _require_lengths(self.lengths, max_length)
        _require_tokens(tokens, vocab_size)
        self.offsets: Int64Array = np.cumsum(self.lengths) - self.lengths
        self.token_ids: Int64Array = np.concatenate(tokens).astype(np.int64)
        mask = self._flat("loss_mask", batch.loss_mask)
        if mask is not None and not ((mask == 0) | (mask == 1)).all():
            raise ValueError("found a loss_mask that is neither 0 nor 1: pass weights instead")
        everything = np.ones(len(self.token_ids), dtype=np.bool_)
        self.loss_mask = everything if mask is None else mask.astype(np.bool_)
        self.weights = self._flat("weights", batch.weights)
        self.media = list(batch.media)
        self.items: BatchMedia | None = None  # what is known of them, and what a rank does
        self.step_media: StepMedia | None = None
        self.arrays = {name: self._flat_array(name, one) for name, one in batch.arrays.items()}
        self._held = {} if self.weights is None else {"weights": self.weights}
        self._held |= {f"arrays[{name!r}]": one for name, one in self.arrays.items()}

    def decode_media(self, most_damaged: int) -> None:
        """Reads what this rank encodes, where that is not read yet; every rank must call this.

        Raises:
            EveryRankError: more sequences in a row are damaged than that.
        """
        if self.step_media is not None:
            self.step_media.decode(lambda items: decoded([self.media[i].data for i in items]))
            self.step_media.agree_on_damages(most_damaged)

    def planned(self, settings: PlanSettings) -> Plan:
        """The plan of its sequences.

        Raises:
            ValueError: a sequence fits on no number of ranks.
        """
        made = plan_by(settings, self.lengths)
        if self.items is None:
            return made
        largest = np.zeros(len(self.lengths), dtype=np.int64)
        np.maximum.at(largest, [one.sequence for one in self.media], self.items.counts)
        return items_apart(settings, made, largest)

    def micro_batches(self, share: RankShare, reader: Reader) -> tuple[RankMicroBatch, ...]:
        """Those of a rank, slot by slot."""
        found = (read_micro_batch(share, slot, reader, self) for slot in range(share.num_slots))
        if (items := self.items) is None:
            return tuple(found)
        return tuple(items.with_text_behind(self, one) for one in found)

    def num_loss_tokens(self, shift: int) -> Int64Array:
        """Those of each sequence, ``[n]``, but the first `shift` tokens of it."""
        counted = self.loss_mask.astype(np.int64)
        counted[self.offsets] *= shift == 0
        return np.add.reduceat(counted, self.offsets)

    def step(self) -> Step:
        """The sequences as a step that was drawn."""
        num = len(self.lengths)
        return Step(
            sources=np.zeros(num, dtype=np.int64),
            rows=np.arange(num),
            starts=np.zeros(num, dtype=np.int64),
            lengths=self.lengths,
            num_labels=self.lengths - 1,
            num_loss_tokens=self.num_loss_tokens(1),
            before=Position(),
            after=Position(),
            max_length=int(self.lengths.max()),
            weights=(1.0,),
        )

    def tokens(self, source: int, row: int, start: int, count: int) -> Int64Array:
        """Tokens of a sequence."""
        begin = int(self.offsets[row]) + start
        return self.token_ids[begin : begin + count]

    def is_trained(self, source: int, row: int, start: int, stop: int) -> BoolArray:
        """Whether the tokens behind ``[start, stop)`` of a sequence carry loss."""
        begin = int(self.offsets[row])
        return self.loss_mask[begin + start + 1 : begin + stop + 1]

    def names(self) -> tuple[str, ...]:
        """What it holds beside tokens and mask, with types and shapes of a token's entry."""
        return tuple(f"{name} {one.dtype} {one.shape[1:]}" for name, one in self._held.items())

    def fingerprints(self) -> dict[str, int]:
        """64 bits of each part, for ranks to compare."""
        parts = {
            "lengths of the sequences": self.lengths,
            "tokens": self.token_ids,
            "loss_mask": self.loss_mask,
            **self._held,
        }
        found = {name: xxhash.xxh3_64(one.tobytes()).intdigest() for name, one in parts.items()}
        return found | ({"media": _digest(self.media)} if self.media else {})

    def per_sequence(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Values of all tokens, ``[..., tokens]``, sequence by sequence."""
        return list(values.split(self.lengths.tolist(), dim=-1))

    def _flat(self, name: str, given: Sequence[Any] | None) -> AnyArray | None:
        """Arrays ``[length]`` of finite numbers, one behind another."""
        if given is None:
            return None
        flat = self._flat_array(name, given, of_any_types=True)
        if flat.ndim > 1:
            raise ValueError(f"found {name} of shape [length, ...], expected one number a token")
        if flat.dtype.kind == "f" and not np.isfinite(flat).all():
            where = int(np.flatnonzero(~np.isfinite(flat))[0])
            i = int(np.searchsorted(self.offsets, where, side="right")) - 1
            raise ValueError(
                f"found {name} {flat[where]} at token {where - int(self.offsets[i])} of sequence "
                f"{i}, expected finite numbers: take such tokens out with loss_mask, and give them "
                "0 here"
            )
        return flat

    def _flat_array(
        self, name: str, given: Sequence[Any], *, of_any_types: bool = False
    ) -> AnyArray:
        arrays = [_of_token(one, name, i) for i, one in enumerate(given)]
        if len(arrays) != len(self.lengths):
            raise ValueError(
                f"found {len(arrays):,} arrays in {name}, expected one for each of the "
                f"{len(self.lengths):,} sequences"
            )
        for i, (array, length) in enumerate(zip(arrays, self.lengths.tolist(), strict=True)):
            if len(array) != length:
                raise ValueError(
                    f"found {len(array):,} entries in {name} of sequence {i}, expected "
                    f"{length:,}: one for each of its tokens, the first one's included"
                )
        kinds = {(array.dtype.str, array.shape[1:]) for array in arrays}
        if len({shape if of_any_types else (kind, shape) for kind, shape in kinds}) > 1:
            raise ValueError(
                f"found {name} of {', '.join(f'{kind} {shape}' for kind, shape in sorted(kinds))}, "
                "expected one type and shape of an entry in all sequences"
            )
        return np.concatenate(arrays)


def _digest(media: Sequence[MediaItem]) -> int:
    found = xxhash.xxh3_64()
    for one in media:
        data = one.data
        if isinstance(data, Patches | Sound):
            found.update(repr({**vars(data), "values": None}).encode())
            data = data.values
        if torch.is_tensor(data):  # of any type: numpy lacks some
            data = data.detach().cpu().reshape(-1).view(torch.uint8).numpy()
        found.update(f"{one.sequence} {one.start}".encode())
        found.update(data.tobytes() if isinstance(data, np.ndarray) else repr(data).encode())
    return found.intdigest()


def _of_token(given: Any, name: str, i: int) -> AnyArray:
    """An array of numbers with an entry for each token."""
    if isinstance(given, torch.Tensor):
        given = given.detach().cpu()
        given = (given.float() if given.dtype == torch.bfloat16 else given).numpy()
    try:
        array = np.asarray(given)
    except ValueError as error:  # of unequal rows
        raise ValueError(f"{name} of sequence {i} is no array: {error}") from error
    if array.ndim == 0 or (array.size and array.dtype.kind not in _KINDS):
        raise ValueError(
            f"found {name} of sequence {i} of shape {array.shape} and type {array.dtype}, expected "
            "an array of numbers with one entry a token"
        )
    if array.dtype.itemsize > _MOST_BYTES:
        raise ValueError(f"found {name} of type {array.dtype}, expected at most 8 bytes a number")
    return array


def _require_lengths(lengths: Int64Array, max_length: int) -> None:
    if not lengths.all():
        i = int(np.flatnonzero(lengths == 0)[0])
        raise ValueError(f"sequence {i} is empty, expected at least one token: leave it out")
    longest = int(lengths.argmax())
    if lengths[longest] > max_length:
        raise ValueError(
            f"sequence {longest} has {int(lengths[longest]):,} tokens, expected at most "
            f"--seq-length {max_length:,}: cut it, or raise --seq-length"
        )


def _require_tokens(tokens: Sequence[AnyArray], vocab_size: int) -> None:
    for i, one in enumerate(tokens):
        if one.dtype.kind not in "iu" or one.ndim > 1:
            raise ValueError(
                f"found tokens of sequence {i} of type {one.dtype} and shape {one.shape}, expected "
                "integers, one a token"
            )
        least, most = int(one.min()), int(one.max())
        if least < 0 or most >= vocab_size:
            raise ValueError(
                f"found token {least if least < 0 else most} in sequence {i}, expected ids from 0 "
                f"to {vocab_size - 1}: take the tokenizer of the model's vocabulary"
            )
