"""The sequence lengths of a global batch: from a text file, an ``.idx`` or one of the presets."""

import re
from dataclasses import dataclass

import numpy as np

from megatron_hdp.arrays import Int64Array
from megatron_hdp.cli.shared.numbers import lines_of, pieces, shown
from megatron_hdp.data import read_document_index
from megatron_hdp.data.presets import LONGEST, PRESETS, preset_lengths

PRESET = "preset:"
_PLAIN = re.compile(r"[0-9\n]*+")
_PRESET_CAPACITIES = 4  # a preset's global batch, in capacities of all ranks together


@dataclass(frozen=True)
class Batch:
    """The sequences to plan for, and what was done to get them."""

    lengths: Int64Array
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
    if (name := preset_of("--lengths", source)) is not None:
        room = ranks * tokens_per_rank
        num_tokens, seed = num_tokens or _PRESET_CAPACITIES * room, seed or 0
        max_length = max_length or min(LONGEST, room)
        lengths = preset_lengths(name, num_tokens=num_tokens, max_length=max_length, seed=seed)
        cut = f"cut to {max_length:,} a sequence"
        notes = [f"preset {name}, seed {seed}: {num_tokens:,} tokens, {cut}"]
    elif seed is not None:
        raise ValueError(f"--seed {seed} has no effect on {source}: it draws presets; leave it out")
    else:
        lengths, notes = read_lengths(source), []
        if max_length is not None and (num_longer := int((lengths > max_length).sum())):
            cut = f"cut to {max_length:,} tokens"
            notes.append(f"{num_longer:,} of {len(lengths):,} sequences {cut}")
            lengths = lengths.clip(max=max_length)
        if num_tokens is not None:
            lengths, note = _limited(lengths, num_tokens, source)
            notes.append(note)
    lengths.setflags(write=False)  # so that a plan of millions shares it
    return Batch(lengths, max_length, tuple(notes))


def preset_of(flag: str, source: str) -> str | None:
    """The preset that a flag names; None where it names a file.

    Raises:
        ValueError: there is no such preset.
    """
    if not source.startswith(PRESET):
        return None
    name = source.removeprefix(PRESET)
    if name not in PRESETS:
        expected = " or ".join(f"{PRESET}{known}" for known in PRESETS)
        raise ValueError(f"{flag} {source}: expected {expected}, or a file")
    return name


def read_lengths(path: str) -> Int64Array:
    """Return the lengths in a file: one integer a line, or the documents of an ``.idx``.

    Empty documents of an ``.idx`` are left out, as training leaves them out.

    Raises:
        ValueError: a line is no positive integer (named), or there is no length at all.
    """
    if path.endswith(".idx"):
        lengths = read_document_index(path).lengths
        lengths = lengths[lengths > 0]
    else:
        lengths = np.concatenate([_parsed(path, *piece) for piece in pieces(path)])
    if len(lengths) == 0:
        raise ValueError(f"{path} has no sequence length, expected one positive integer a line")
    return lengths


def _parsed(path: str, first: int, piece: str) -> Int64Array:
    """The lengths in a piece of the file that begins with line ``first``.

    Millions of plain lines are read at once. Any other line, and a number that has no place in 64
    bits, sends the piece line by line.
    """
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


def _limited(lengths: Int64Array, num_tokens: int, source: str) -> tuple[Int64Array, str]:
    """The first sequences of at most so many tokens, and what to say of it."""
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
    return lengths[:taken].copy(), note
