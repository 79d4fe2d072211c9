"""The Reference is written by the declarations, and one without its meaning is found."""

import argparse
import dataclasses
import subprocess
import sys
from dataclasses import dataclass, replace
from enum import IntEnum

import pytest

from megatron_hdp.cli.main import build_parser
from megatron_hdp.exit_codes import ExitCode
from megatron_hdp.megatron.lm.options import REFUSED
from megatron_hdp.megatron.options import parsing
from megatron_hdp.options import flag_of, option
from megatron_hdp.planner import CostModel, Plan, plan
from megatron_hdp.planner.serialisation import (
    LOCKSTEP_KEYS,
    MICRO_BATCH_KEYS,
    PLAN_KEYS,
    SUMMARY_KEYS,
)
from megatron_hdp.training.metrics import StepMetrics
from tests.docs.pages import ROOT

sys.path.insert(0, str(ROOT / "docs" / "_ext"))
import declarations  # noqa: E402

REFERENCE = (ROOT / "docs" / "reference.md").read_text()


@pytest.fixture(scope="module")
def page():
    """The Reference as the site shows it."""
    return declarations.filled_in(REFERENCE)


def rows(page, first_cell):
    return [line for line in page.splitlines() if line.startswith(f"| `{first_cell}")]


def undeclared_flags(page):
    """Flags of training that the page lacks."""
    actions = parsing.build_parser()._actions
    shown = [one.option_strings[0] for one in actions if one.help not in (None, "==SUPPRESS==")]
    return [flag for flag in shown if flag not in ("-h", "--config") and not rows(page, flag)]


def test_every_table_is_on_the_page(page):
    assert [
        name for name in declarations.TABLES if f"<!-- declared: {name} -->" not in REFERENCE
    ] == []
    assert "<!-- declared" not in page


def test_every_flag_has_its_row(page, monkeypatch):
    assert undeclared_flags(page) == []

    @dataclass(frozen=True, kw_only=True)
    class MoreOptions:
        """More."""

        one_more: int = option(1, help="One more.")

    monkeypatch.setattr(parsing, "GROUPS", (*parsing.GROUPS, MoreOptions))
    assert undeclared_flags(page) == ["--one-more"]
    assert undeclared_flags(declarations.filled_in(REFERENCE)) == []


def test_every_key_has_its_row(page):
    keys = {*PLAN_KEYS, *MICRO_BATCH_KEYS, *SUMMARY_KEYS, *LOCKSTEP_KEYS}
    keys |= {item.name for cls in (StepMetrics, CostModel) for item in dataclasses.fields(cls)}
    keys |= {str(code.value) for code in ExitCode}
    keys |= {flag_of(name) for name in REFUSED}
    assert [key for key in keys if not rows(page, f"{key}`")] == []


def test_the_keys_of_a_plan_are_those_that_it_has():
    made = plan([5, 3, 8], ranks=2, tokens_per_rank=8, slice_multiple=2)
    import orjson

    num = made.num_micro_batches
    written = orjson.loads(replace(made, num_parts=[2] * num, recomputed=[True] * num).to_json())
    assert list(written) == list(PLAN_KEYS)
    assert {key for one in written["micro_batches"] for key in one} <= set(MICRO_BATCH_KEYS)
    assert list(written["summary"]) == list(SUMMARY_KEYS)
    shared = plan([5, 3, 8], ranks=2, tokens_per_rank=8, expert_parallel_size=2)
    assert list(shared.summary) == [*SUMMARY_KEYS, *LOCKSTEP_KEYS]
    assert Plan.from_json(made.to_json()).fingerprint() == made.fingerprint()


def test_every_command_has_its_section(page):
    (subcommands,) = (
        one for one in build_parser()._actions if isinstance(one, argparse._SubParsersAction)
    )
    names = set(subcommands.choices) - {"data"} | {"data describe", "data plan", "data prepare"}
    assert [name for name in names if f"### megatron-hdp {name}\n" not in page] == []
    assert rows(page, "--gpus N`")


def test_a_field_without_its_meaning_is_found():
    @dataclass
    class Base:
        a: int
        """Meant."""
        b: int

    @dataclass
    class Told(Base):
        b: int
        """Meant as ``b``."""

    with pytest.raises(declarations.UndeclaredError, match=r"Base\.b has no docstring below it"):
        declarations.meanings(Base)
    assert declarations.meanings(Told) == {"a": "Meant.", "b": "Meant as `b`."}


def test_an_exit_code_without_its_meaning_is_found():
    class Code(IntEnum):
        GOOD = 0
        """Good."""
        BAD = 1

    with pytest.raises(declarations.UndeclaredError, match=r"Code\.BAD has no docstring"):
        declarations.meanings(Code)


def test_an_argument_without_help_is_found():
    parser = argparse.ArgumentParser(prog="tool")
    parser.add_argument("--size")
    with pytest.raises(declarations.UndeclaredError, match="tool: size has no help"):
        declarations._table_of_parser(parser)


def test_a_table_that_is_not_there_is_found():
    with pytest.raises(declarations.UndeclaredError, match="expected one of flags, "):
        declarations.filled_in("<!-- declared: flaggs -->")


def test_cells_stay_in_their_column():
    assert declarations.table(("a", "b"), [("x|y", "of\n  two lines")]).splitlines()[2] == (
        "| x\\|y | of two lines |"
    )


def test_it_prints_a_table():
    script = ROOT / "docs" / "_ext" / "declarations.py"
    done = [
        subprocess.run([sys.executable, script, name], capture_output=True, text=True, timeout=570)
        for name in ("exit-codes", "gone")
    ]
    assert done[0].stdout == declarations.TABLES["exit-codes"]()
    assert done[1].returncode == 1 and "usage: declarations.py flags|" in done[1].stderr
