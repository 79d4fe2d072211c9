"""What rows on data share: sources with awkward rows, and the steps that a run draws of them."""

import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from megatron_hdp.data.mixture import BatchSize, Opening, Position, open_corpus, read_data_file

OPENING = Opening(
    max_length=256, long_sequence="truncate", tokenizer="byte", workers=0, say=lambda line: None
)
_BATCH = BatchSize(None, 2000)

Piece = tuple[str, list[int], list[bool]]
"""A source's name, tokens, and which of them are trained on."""


def drawn(path: Path, steps: int = 4, opening: Opening = OPENING) -> list[Piece]:
    """The first steps of a run on a data file, with every token and mask."""
    corpus = open_corpus(read_data_file(path).training, opening)
    mixture = corpus.mixture(corpus.orders(), _BATCH, 7)
    found, position = [], Position()
    for _ in range(steps):
        if mixture.is_over(position):
            break
        step = mixture.step(position)
        arrays = (step.sources, step.rows, step.starts, step.lengths)
        for source, place, start, length in zip(*(one.tolist() for one in arrays), strict=True):
            tokens = corpus.tokens(source, place, start, length).tolist()
            trained = corpus.is_trained(source, place, start, start + length - 1).tolist()
            found.append((corpus.names[source], tokens, trained))
        position = step.after
    return found


def write_lines(path: Path, records: Iterable[Any]) -> None:
    """A ``.jsonl``."""
    path.write_text("".join(json.dumps(one) + "\n" for one in records))


def texts(count: int) -> list[dict[str, str]]:
    """Records of texts of many lengths."""
    return [{"text": "ab" * (i % 37 + 1)} for i in range(count)]


def chats(count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Conversations with odd characters, special tokens in them, and weights of 0."""
    draw = random.Random(seed)

    def words() -> str:
        parts = draw.choices("abcé漢\U0001f600 \n", k=draw.randint(1, 60))
        return "".join(parts) + draw.choice(["", "<|im_end|>"])

    for _ in range(count):
        turns: list[dict[str, Any]] = []
        for _ in range(draw.randint(1, 4)):
            turns.append({"role": "user", "content": words() + "u"})
            weight = draw.choice([0, 1, 1])
            turns.append({"role": "assistant", "content": words() + "a", "weight": weight})
        yield {"messages": turns}
