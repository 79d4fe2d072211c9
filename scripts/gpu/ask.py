"""Asks a GPU what was decided by reading the libraries; prints a Markdown table.

    python scripts/gpu/ask.py TOPIC [--device cpu|cuda]

Exit code 1: an answer is not the expected one. On a CPU the questions are only listed.
"""

import argparse
import sys
import time
from collections.abc import Sequence

from questions import TOPICS, Question, questions_of


def ask(question: Question) -> tuple[str, bool]:
    """What was found, in one line, and whether that was expected."""
    try:
        answer = question.ask()
    except Exception as error:  # whatever it was, the other questions are asked
        line = " ".join(str(error).split())[:160]
        return f"{type(error).__name__}: {line}", False
    return answer.found, answer.is_expected


def main(argv: Sequence[str] | None = None) -> int:
    """Ask and print; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("topic", choices=TOPICS)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    options = parser.parse_args(argv)
    print("| question | found | expected | as expected | s |\n|---|---|---|---|---|", flush=True)
    asked = unexpected = 0
    questions = questions_of(options.topic)
    for question in questions:
        if options.device == "cpu":
            print(f"| {question.text} | needs a GPU | {question.expected} | | |")
            continue
        started = time.monotonic()
        found, is_expected = ask(question)
        asked, unexpected = asked + 1, unexpected + (not is_expected)
        verdict = "yes" if is_expected else "NO"
        seconds = time.monotonic() - started
        cells = (question.text, found.replace("|", "/"), question.expected, verdict)
        print(f"| {' | '.join(cells)} | {seconds:.1f} |", flush=True)
    left = f", {len(questions) - asked} need a GPU" if asked < len(questions) else ""
    print(f"\nfigures: {asked - unexpected} of {asked} as expected{left}")
    return 1 if unexpected else 0


if __name__ == "__main__":
    sys.exit(main())
