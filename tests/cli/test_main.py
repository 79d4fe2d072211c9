"""The command itself: help is light, exit codes are kept, every subcommand is there."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_hdp import __version__
from megatron_hdp.cli.main import main

HEAVY = ("torch", "megatron", "numpy", "matplotlib", "transformers")


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", "--help"],
        ["simulate", "--help"],
        ["check", "--help"],
        ["preprocess", "--help"],
        ["profile", "--help"],
        ["data", "plan", "--help"],
        ["--version"],
    ],
)
def test_help_loads_nothing_heavy(arguments):
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
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)
    assert time.perf_counter() - began < 20.0  # 0.1 s on a free core


def test_planning_never_loads_torch(tmp_path):
    (tmp_path / "lengths").write_text("10\n20\n")
    script = f"""
import sys
from megatron_hdp.cli.main import main
code = main(["plan", "--lengths", {str(tmp_path / "lengths")!r}, "--ranks", "2",
             "--tokens-per-rank", "16"])
assert code == 0 and "torch" not in sys.modules and "megatron" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)


def test_simulating_never_loads_torch():
    config = Path(__file__).parents[2] / "configs" / "tiny-cpu.yaml"
    script = f"""
import sys
from megatron_hdp.cli.main import main
code = main(["simulate", "--config", {str(config)!r}, "--gpus", "4", "--steps", "1"])
assert code == 0 and "torch" not in sys.modules and "megatron" not in sys.modules
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
    def run_doctor(as_json):
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


def test_a_defect_keeps_its_traceback(monkeypatch):
    def fail(arguments):
        raise KeyError("ours")

    monkeypatch.setattr("megatron_hdp.cli.plan._run", fail)
    with pytest.raises(KeyError):
        main(["plan", "--lengths", "x", "--ranks", "1", "--tokens-per-rank", "1"])
