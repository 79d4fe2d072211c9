"""What was decided by reading the libraries, and only a GPU can settle: one question each."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass

TOPICS: tuple[str, ...] = (
    "transformer_engine",
    "attention",
    "communication",
    "memory",
    "compilation",
)


@dataclass(frozen=True)
class Answer:
    """What a GPU said."""

    found: str
    is_expected: bool


@dataclass(frozen=True)
class Question:
    """One thing that was decided by reading.

    Attributes:
        text: what is asked, in a few words.
        expected: what follows from reading, in a few words.
        ask: asks the GPU of this process; it may raise, which is an answer too.
    """

    text: str
    expected: str
    ask: Callable[[], Answer]


def questions_of(topic: str) -> tuple[Question, ...]:
    """The questions of one of `TOPICS`, which is a module here."""
    return importlib.import_module(f"questions.{topic}").QUESTIONS
