"""Imports point down, only one room names Megatron, and no file outgrows a head."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
PACKAGE = REPOSITORY / "megatron_hdp"
MAX_LINES = 500

# What each room may import of the package besides itself; options, exit_codes and the package's own
# __init__ lie below every room.
ROOMS = {
    "options": set(),
    "exit_codes": set(),
    "planner": set(),
    "data": {"planner"},
    "simulator": {"planner"},
    "runtime": {"planner", "data"},
    "megatron": {"planner", "data", "simulator", "runtime"},
    "training": {"planner", "data", "simulator", "runtime", "megatron"},
    "pretrain_gpt": {"planner", "data", "simulator", "runtime", "megatron", "training"},
    "plugin": {"megatron", "training"},
    "ray_launch": set(),
    "__main__": {"plugin"},
    "cli": {"planner", "data", "simulator", "runtime", "megatron", "training"},
}
BELOW_ALL = {"options", "exit_codes", "__init__"}
TORCH_ROOMS = {"runtime", "megatron", "training", "cli"}
PLANNER_PACKAGES = {"numpy", "orjson"} | set(sys.stdlib_module_names)


def _room(module: str) -> str:
    """Room of a module of the package: ``megatron_hdp.data.sampler`` -> ``data``."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in ROOMS else "__init__"


def _imports(tree: ast.AST, module: str) -> Iterator[tuple[int, str]]:
    """Yield line and full name of every import, inside functions and relative ones too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")[: -node.level]
                base = ".".join([*parents, base]).rstrip(".")
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and _is_import_call(node) and node.args:
            name = node.args[0]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield node.lineno, name.value


def _is_import_call(node: ast.Call) -> bool:
    function = node.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in {"import_module", "__import__", "find_spec"}


def violations(source: str, module: str) -> list[str]:
    """Return what is wrong with the imports of a module's source."""
    room = _room(module)
    found = []
    for line, name in _imports(ast.parse(source), module):
        top = name.split(".")[0]
        where = f"{module}:{line} imports {name}"
        if top == "megatron_hdp":
            target = _room(name)
            allowed = ROOMS.get(room, set()) | BELOW_ALL | {room}
            if target not in allowed:
                found.append(f"{where}: {room} may import {sorted(allowed)} of the package")
        elif top == "megatron" and room != "megatron":
            found.append(f"{where}: only megatron_hdp/megatron may name a Megatron module")
        elif top == "torch" and room not in TORCH_ROOMS:
            found.append(f"{where}: {room} works without torch")
        elif room == "planner" and top not in PLANNER_PACKAGES:
            found.append(f"{where}: the planner needs numpy and orjson only")
    return found


def _sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def _module(path: Path) -> str:
    return ".".join(path.relative_to(REPOSITORY).with_suffix("").parts)


def test_every_folder_is_a_known_room() -> None:
    rooms = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert rooms - {"__init__", "__pycache__"} <= set(ROOMS)


def test_imports_point_down() -> None:
    found = [text for path in _sources() for text in violations(path.read_text(), _module(path))]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("megatron_hdp.planner.types", "import torch"),
        ("megatron_hdp.planner.types", "import pandas"),
        ("megatron_hdp.planner.types", "from megatron_hdp.data import TokenFile"),
        ("megatron_hdp.planner.types", "from ..data import TokenFile"),
        ("megatron_hdp.planner.types", "def f():\n    from torch import nn"),
        ("megatron_hdp.planner.types", "import importlib\nimportlib.import_module('torch')"),
        ("megatron_hdp.data.sampler", "from megatron_hdp import runtime"),
        ("megatron_hdp.data.sampler", "import torch.distributed"),
        ("megatron_hdp.simulator.plot", "import megatron_hdp.data"),
        ("megatron_hdp.runtime.loss", "from megatron.core import parallel_state"),
        ("megatron_hdp.runtime.loss", "from megatron_hdp.megatron import model"),
        ("megatron_hdp.megatron.model", "from megatron_hdp.training.loop import pretrain"),
        ("megatron_hdp.training.loop", "import megatron.core"),
        ("megatron_hdp.training.loop", "from megatron_hdp.cli import main"),
        ("megatron_hdp.options", "from megatron_hdp.planner import plan"),
        ("megatron_hdp.__init__", "from megatron_hdp.planner import plan"),
        ("megatron_hdp.__init__", "import torch"),
    ],
)
def test_a_planted_upward_import_is_found(module: str, source: str) -> None:
    assert len(violations(source, module)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("megatron_hdp.planner.types", "import numpy as np, orjson, json"),
        (
            "megatron_hdp.planner.plan",
            "from . import _core\nfrom megatron_hdp.planner import types",
        ),
        ("megatron_hdp.runtime.loss", "import torch\nfrom megatron_hdp.data import RankMicroBatch"),
        ("megatron_hdp.megatron.model", "from megatron.core import parallel_state"),
        ("megatron_hdp.cli.main", "from megatron_hdp import __version__"),
        ("megatron_hdp.simulator.plot", "import matplotlib"),
    ],
)
def test_downward_imports_are_allowed(module: str, source: str) -> None:
    assert violations(source, module) == []


def test_importing_the_package_loads_neither_torch_nor_megatron() -> None:
    code = (
        "import sys, megatron_hdp; "
        "print({name.split('.')[0] for name in sys.modules} & {'torch', 'megatron', 'numpy'})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=REPOSITORY
    )
    assert done.stdout.strip() == "set()"


def test_planning_loads_no_torch() -> None:
    code = "import sys, megatron_hdp.planner; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=REPOSITORY
    )
    assert done.stdout.strip() == "False"


def _overgrown(files: dict[str, str]) -> list[str]:
    return [name for name, text in files.items() if text.count("\n") > MAX_LINES]


def test_no_file_outgrows_a_head() -> None:
    patterns = ("megatron_hdp/**/*.py", "csrc/**/*.?pp", "tests/**/*.py", "scripts/**/*")
    paths = {path for pattern in patterns for path in REPOSITORY.glob(pattern) if path.is_file()}
    texts = {str(path.relative_to(REPOSITORY)): path for path in paths}
    sources = {name: path.read_text(errors="replace") for name, path in texts.items()}
    assert _overgrown(sources) == []
    assert _overgrown({"long.py": "x\n" * (MAX_LINES + 1)}) == ["long.py"]
