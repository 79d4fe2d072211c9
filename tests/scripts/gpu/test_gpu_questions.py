"""What only a GPU can settle: each question has its line, and no answer is lost."""

import importlib
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[3] / "scripts" / "gpu"))
ask, questions = map(importlib.import_module, ("ask", "questions"))


@pytest.mark.parametrize("topic", questions.TOPICS)
def test_questions_can_be_listed_without_a_gpu(topic, capsys):
    assert ask.main([topic, "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    asked = questions.questions_of(topic)
    assert len(asked) and len({one.text for one in asked}) == len(asked)
    assert len(lines) == 2 + len(asked) + 2 and "of 0 as expected" in lines[-1]
    for line, one in zip(lines[2:], asked, strict=False):
        assert line == f"| {one.text} | needs a GPU | {one.expected} | | |"
        assert line.count("|") == 6, "a cell must not hold a column's mark"


def test_every_answer_has_its_line_and_its_verdict(monkeypatch, capsys):
    """Planted: one that raises and one that is not as expected."""

    def raising():
        raise RuntimeError("no kernel\nfor this | GPU")

    asked = (
        questions.Question("one", "1", lambda: questions.Answer("1", True)),
        questions.Question("two", "2", raising),
        questions.Question("three", "3", lambda: questions.Answer("4", False)),
    )
    monkeypatch.setattr(ask, "TOPICS", ("numbers",))
    monkeypatch.setattr(ask, "questions_of", lambda topic: asked)
    assert ask.main(["numbers"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].startswith("| one | 1 | 1 | yes |")
    assert lines[3].startswith("| two | RuntimeError: no kernel for this / GPU | 2 | NO |")
    assert lines[4].startswith("| three | 4 | 3 | NO |")
    assert lines[-1] == "figures: 1 of 3 as expected"
