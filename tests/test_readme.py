"""What the README says and the program does are the same."""

from dataclasses import fields
from pathlib import Path

from megatron_hdp.cli.main import main
from megatron_hdp.megatron.options import markdown_tables
from megatron_hdp.training.metrics import StepMetrics

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_table_of_flags_is_the_declarations():
    assert markdown_tables() in README, (
        "README.md: replace the tables under 'Flags' by what "
        "`python -m megatron_hdp.megatron.options.arguments` prints"
    )


def test_the_files_it_names_exist():
    named = [line.split("`")[1] for line in README.splitlines() if line.startswith("| `")]
    files = [name for name in named if "/" in name and not name.startswith("--")]
    assert len(files) > 10
    assert [name for name in files if not (ROOT / name).exists()] == []


def test_no_document_holds_both_sides_of_a_merge():
    documents = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    lines = [(one.name, line) for one in documents for line in one.read_text().splitlines()]
    assert len(documents) >= 4
    assert [one for one in lines if one[1].startswith(("<<<<<<< ", ">>>>>>> "))] == []


def test_the_table_of_metrics_has_every_key():
    section = README.split("## What a step reports")[1].split("## ")[0]
    keys = [line.split("`")[1] for line in section.splitlines() if line.startswith("| `")]
    assert sorted(keys) == sorted(item.name for item in fields(StepMetrics))


def test_check_prints_what_it_says(monkeypatch, capsys):
    command, printed = README.split("$ megatron-hdp check ")[1].split("```")[0].split("\n", 1)
    monkeypatch.chdir(ROOT)
    assert main(["check", *command.split()]) == 0
    assert capsys.readouterr().out == printed


def test_the_two_commands_are_what_ci_runs():
    assert "./scripts/quickstart.sh" in README and "./scripts/test.sh" in README
    assert "./scripts/test.sh" in (ROOT / ".ci/run").read_text()
