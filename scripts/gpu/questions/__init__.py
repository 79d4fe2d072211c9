"""What was decided by reading the libraries, and only a GPU can settle: one question each."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass

TOPICS = {
    "transformer_engine": 110.0,  # it builds 40 graphs, some of them deterministic
    "attention": 80.0,
    "communication": 70.0,
    "memory": 140.0,
    "compilation": 50.0,
}
"""Topics and the seconds that each may take."""


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


_QUESTIONS: dict[str, list[Question]] = {}


def question(text: str, expected: str) -> Callable[[Callable[[], Answer]], Callable[[], Answer]]:
    """Makes a function one of the questions of its module; see `Question`."""

    def add(ask: Callable[[], Answer]) -> Callable[[], Answer]:
        _QUESTIONS.setdefault(ask.__module__, []).append(Question(text, expected, ask))
        return ask

    return add


def questions_of(topic: str) -> tuple[Question, ...]:
    """The questions of one of `TOPICS`, which is a module here."""
    return tuple(_QUESTIONS[importlib.import_module(f"questions.{topic}").__name__])
