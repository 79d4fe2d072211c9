"""Every exit code of the package is a declared one."""

import ast
from pathlib import Path

from megatron_hdp.exit_codes import ExitCode

PACKAGE = Path(__file__).parents[1] / "megatron_hdp"
ENTRIES = {"main", "_run", "run_doctor", "exit_code"}  # functions whose result is an exit code
ENDINGS = {"exit", "_exit", "_leave"}
UNREAD = {"children.py"}  # processes whose starter is gone: nobody reads it


def literals(source: str) -> list[int]:
    """Lines on which a number is an exit code."""
    found = []
    is_about_them = any(word in source for word in ENDINGS | ENTRIES)
    for node in ast.walk(ast.parse(source if is_about_them else "")):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            codes = node.args[:1] if name in ENDINGS else []
        elif isinstance(node, ast.FunctionDef) and node.name in ENTRIES:
            returns = [one for one in ast.walk(node) if isinstance(one, ast.Return)]
            codes = [one.value for one in returns if one.value is not None]
        else:
            continue
        parts = [part for code in codes for part in _results(code)]
        found += [part.lineno for part in parts if isinstance(part, ast.Constant)]
    return [line for line in found if line]


def _results(value: ast.expr) -> list[ast.expr]:
    return [value.body, value.orelse] if isinstance(value, ast.IfExp) else [value]


def test_no_number_is_an_exit_code() -> None:
    sources = [path for path in PACKAGE.rglob("*.py") if path.name not in UNREAD]
    found = [f"{path.name}:{line}" for path in sources for line in literals(path.read_text())]
    assert found == []


def test_a_planted_number_is_found() -> None:
    assert literals("import sys\nsys.exit(4)") == [2]
    assert literals("import os\nos._exit(1)") == [2]
    assert literals("def main():\n    return 0 if done else ExitCode.FAILED") == [2]
    assert literals("def other():\n    return 1\ndef main():\n    return ExitCode.DONE") == []


def test_those_that_nobody_reads_are_there() -> None:
    assert {path.name for path in PACKAGE.rglob("*.py")} >= UNREAD


def test_scripts_know_the_same_codes() -> None:
    """The job script, which cannot import them, ends with 2 after a mistake."""
    script = (PACKAGE.parent / "scripts" / "slurm" / "pretrain.sbatch").read_text()
    assert f"exit {ExitCode.MISTAKE:d}\n" in script
