"""The command itself: help is light, exit codes are kept, every subcommand is there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_hdp import __version__
from megatron_hdp.cli.main import main
from megatron_hdp.exit_codes import ExitCode
from tests.megatron.checkpoint.small import save_small
from tests.support.sources import data_file, write_sources

CONFIGS = Path(__file__).parents[2] / "configs"
HEAVY = ("torch", "megatron", "numpy", "matplotlib", "transformers")


@pytest.mark.parametrize(
    "command", ["plan", "simulate", "check", "preprocess", "profile", "data plan", ""]
)
def test_help_loads_nothing_heavy(command):
    arguments = [*command.split(), "--help"] if command else ["--version"]
    script = f"""
import sys
from megatron_hdp.cli.main import main
try:
    main({arguments!r})
except SystemExit as leaving:
    assert leaving.code == 0
loaded = [name for name in {HEAVY!r} if name in sys.modules]
assert not loaded, loaded
"""
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)


def test_commands_never_load_torch(tmp_path):
    (tmp_path / "lengths").write_text("10\n20\n")
    save_small(tmp_path / "saved", 4)
    data, config = data_file(write_sources(tmp_path)), CONFIGS / "tiny-cpu.yaml"
    commands = [
        ["plan", "--lengths", tmp_path / "lengths", "--ranks", 2, "--tokens-per-rank", 16],
        ["simulate", "--config", config, "--gpus", 4, "--steps", 1],
        ["check", config, "--gpus", 4],
        ["verify", tmp_path / "saved"],
        ["data", "describe", data],
        ["data", "prepare", data],
        ["data", "plan", data, "--steps", 3, "--global-batch-size", 4],
    ]
    script = f"""
import sys
from megatron_hdp.cli.main import main
for command in {[list(map(str, one)) for one in commands]!r}:
    assert main(command) == 0
    assert not {{"torch", "megatron"}} & set(sys.modules), command
"""
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)


def test_version(capsys):
    with pytest.raises(SystemExit) as leaving:
        main(["--version"])
    assert leaving.value.code == 0
    assert __version__ in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments", [[], ["simulat"], ["plan"], ["data"], ["plan", "--lengths", "x", "--ranks", "two"]]
)
def test_wrong_flags_exit_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as leaving:
        main(arguments)
    assert leaving.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_doctor_hands_over_its_exit_code(monkeypatch):
    def run_doctor(as_json, clean_up):
        return 7 if as_json else 3

    monkeypatch.setattr("megatron_hdp.megatron.doctor.run_doctor", run_doctor)
    assert main(["doctor"]) == 3
    assert main(["doctor", "--json"]) == 7


@pytest.mark.parametrize(
    ("error", "code"), [(ValueError("a\n  b"), 2), (OSError("gone"), 2), (KeyboardInterrupt(), 130)]
)
def test_a_mistake_is_one_line(monkeypatch, capsys, error, code):
    def fail(arguments):
        raise error

    monkeypatch.setattr("megatron_hdp.cli.plan._run", fail)
    assert main(["plan", "--lengths", "x", "--ranks", "1", "--tokens-per-rank", "1"]) == code
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_reader_who_has_enough_ends_it_quietly(tmp_path):
    """Both where the parser prints and where the command does."""
    (tmp_path / "lengths").write_text("10\n20\n")
    plan = f"plan --lengths {tmp_path}/lengths --ranks 2 --tokens-per-rank 16"
    for command in ("--help", plan):
        reader, writer = os.pipe()
        os.close(reader)
        argv = [sys.executable, "-m", "megatron_hdp.cli.main", *command.split()]
        with os.fdopen(writer) as closed:
            done = subprocess.run(argv, stdout=closed, stderr=subprocess.PIPE, check=False)
        assert done.stderr == b""
    assert done.returncode == ExitCode.UNREAD


def test_a_defect_keeps_its_traceback(monkeypatch):
    def fail(arguments):
        raise KeyError("ours")

    monkeypatch.setattr("megatron_hdp.cli.plan._run", fail)
    with pytest.raises(KeyError):
        main(["plan", "--lengths", "x", "--ranks", "1", "--tokens-per-rank", "1"])
