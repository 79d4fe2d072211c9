"""verl's entry point loads nothing unless it is asked for, and says what fails."""

import importlib
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def loaded():
    """The module that the entry point names, loaded anew."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    name = project["entry-points"]["verl.plugins"]["hdp"]
    sys.modules.pop(name, None)
    return importlib.import_module(name)


def test_nothing_is_loaded_for_others(monkeypatch):
    monkeypatch.setenv("VERL_ENGINE_VENDOR", "nvidia")
    before = set(sys.modules)
    loaded()
    assert {one for one in set(sys.modules) - before if not one.startswith("megatron_hdp")} == set()


def test_an_engine_that_does_not_load_is_said(monkeypatch, capsys):
    """verl itself would take its own and say nothing."""
    monkeypatch.setenv("VERL_ENGINE_VENDOR", "hdp")
    monkeypatch.setitem(sys.modules, "verl", None)
    monkeypatch.delitem(sys.modules, "megatron_hdp.verl.engine", raising=False)
    with pytest.raises(ImportError):
        loaded()
    told = capsys.readouterr().err
    assert "VERL_ENGINE_VENDOR=hdp, but its engine does not load (above), and verl would" in told
