"""The sequence lengths of a global batch: from a text file, an ``.idx`` or one of the presets."""

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_hdp.arrays import Int64Array
from megatron_hdp.cli.shared.numbers import lines_of, pieces, shown

if TYPE_CHECKING:
    Int64Array = Int64Array

PRESET = "preset:"
_PLAIN = re.compile(r"[0-9\n]*+")
_PRESET_CAPACITIES = 4  # a preset's global batch, in capacities of all ranks together


@dataclass(frozen=True)
class Batch:
    """The sequences to plan for, and what was done to get them."""

    lengths: "Int64Array"
    max_length: int | None
    """The context length; None if nothing says it."""
    notes: tuple[str, ...] = ()


def batch_of(
    source: str,
    *,
    ranks: int,
    tokens_per_rank: int,
    num_tokens: int | None = None,
    max_length: int | None = None,
    seed: int | None = None,
) -> Batch:
    """Return the global batch that ``--lengths`` and its companions describe.

    Args:
        source: a file, or ``preset:`` and a name.
        ranks: HDP ranks.
        tokens_per_rank: capacity; with ``ranks`` it gives the defaults of a preset.
        num_tokens: tokens of the batch. A preset draws so many; of a file, whole sequences are
            taken in order while they fit, as a training step takes them.
        max_length: the context length; longer sequences are cut to it.
        seed: of a preset's draw.

    Raises:
        ValueError: a length, name or number that cannot be used.
    """
    if source.startswith(PRESET):
        from megatron_hdp.data.presets import LONGEST

        room = ranks * tokens_per_rank
        batch = _draw(
            source.removeprefix(PRESET),
            num_tokens or _PRESET_CAPACITIES * room,
            max_length or min(LONGEST, room),
            seed or 0,
        )
    elif seed is not None:
        raise ValueError(f"--seed {seed} has no effect on {source}: it draws presets; leave it out")
    else:
        batch = _limited(_cut(Batch(read_lengths(source), max_length)), num_tokens, source)
    batch.lengths.setflags(write=False)  # so that a plan of millions shares it
    return batch


def read_lengths(path: str) -> "Int64Array":
    """Return the lengths in a file: one integer a line, or the documents of an ``.idx``.

    Empty documents of an ``.idx`` are left out, as training leaves them out.

    Raises:
        ValueError: a line is no positive integer (named), or there is no length at all.
    """
    import numpy as np

    from megatron_hdp.data import read_document_index

    if path.endswith(".idx"):
        lengths = read_document_index(path).lengths
        lengths = lengths[lengths > 0]
    else:
        lengths = np.concatenate([_parsed(path, *piece) for piece in pieces(path)])
    if len(lengths) == 0:
        raise ValueError(f"{path} has no sequence length, expected one positive integer a line")
    return lengths


def _parsed(path: str, first: int, piece: str) -> "Int64Array":
    """The lengths in a piece of the file that begins with line ``first``.

    Millions of plain lines are read at once. Any other line, and a number that has no place in 64
    bits, sends the piece line by line.
    """
    import numpy as np

    if _PLAIN.fullmatch(piece) and not piece.isspace():
        lengths = np.fromstring(piece, dtype=np.int64, sep="\n")  # too large a number saturates
        if len(lengths) and 0 < lengths.min() <= lengths.max() < 2**63 - 1:
            return lengths
    return np.array([_length(path, *line) for line in lines_of(first, piece)], dtype=np.int64)


def _length(path: str, number: int, text: str) -> int:
    is_number = text.isascii() and text.isdigit() and len(text) < 1000
    if not is_number or not 0 < int(text) < 2**63:
        raise ValueError(
            f"{path}, line {number}: found {shown(text)}, expected the length of one sequence, an "
            "integer of at least 1"
        )
    return int(text)


def _draw(name: str, num_tokens: int, max_length: int, seed: int) -> Batch:
    from megatron_hdp.data.presets import PRESETS, preset_lengths

    if name not in PRESETS:
        expected = " or ".join(f"{PRESET}{known}" for known in PRESETS)
        raise ValueError(f"--lengths {PRESET}{name}: expected {expected}, or a file")
    lengths = preset_lengths(name, num_tokens=num_tokens, max_length=max_length, seed=seed)
    note = f"preset {name}, seed {seed}: {num_tokens:,} tokens, cut to {max_length:,} a sequence"
    return Batch(lengths, max_length, (note,))


def _cut(batch: Batch) -> Batch:
    lengths, max_length = batch.lengths, batch.max_length
    if max_length is None:
        return batch
    num_longer = int((lengths > max_length).sum())
    if not num_longer:
        return batch
    note = f"{num_longer:,} of {len(lengths):,} sequences cut to {max_length:,} tokens"
    return Batch(lengths.clip(max=max_length), max_length, (*batch.notes, note))


def _limited(batch: Batch, num_tokens: int | None, source: str) -> Batch:
    if num_tokens is None:
        return batch
    import numpy as np

    lengths = batch.lengths
    if lengths[0] > num_tokens:
        raise ValueError(
            f"--global-batch-tokens {num_tokens:,}: the first sequence of {source} has "
            f"{lengths[0]:,} tokens; raise the one or cut the other with --max-length"
        )
    ends = np.cumsum(lengths)
    taken = int(np.searchsorted(ends, num_tokens, side="right"))
    if taken == len(lengths):
        note = f"all {taken:,} sequences taken: they have {ends[-1]:,} of {num_tokens:,} tokens"
    else:
        note = (
            f"the first {taken:,} of {len(lengths):,} sequences taken: the next one would exceed "
            f"{num_tokens:,} tokens"
        )
    return Batch(lengths[:taken].copy(), batch.max_length, (*batch.notes, note))
