"""Imports point down, between rooms and inside them, and no room or file outgrows a head."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Set
from functools import cache
from pathlib import Path

import pytest

from megatron_hdp.strategies import STRATEGIES

REPOSITORY = Path(__file__).parents[1]
PACKAGE = REPOSITORY / "megatron_hdp"
CSRC = REPOSITORY / "csrc"
PLANNER = CSRC / "planner"
MAX_LINES, MAX_FILES = 500, 20
MIN_LINES = 45

# What each room may import of the package besides itself, by folder. A room may import those that
# stand above it here; what a room with rooms in it holds by itself lies below these.
ROOMS: dict[str, set[str]] = {
    "options": set(),
    **dict.fromkeys(("exit_codes", "nearest", "strategies", "arrays", "files"), set()),
    **dict.fromkeys(("compiled", "overrides", "processes", "planner"), set()),
    "media": {"planner"},
    **dict.fromkeys(("planner/network", "planner/online", "planner/experts"), {"planner"}),
    "planner/shape": {"planner"},
    "planner/stages": {"planner/shape"},
    "planner/memory": {"planner/shape", "planner/stages"},
    "data": {"planner"},
    **dict.fromkeys(("data/tokenizers", "data/formats"), {"data"}),
    "data/media": {"data", "data/tokenizers", "data/formats", "media"},
    "data/chat": {"data", "data/tokenizers", "data/media", "media"},
    "data/tables": {"data"},
    "data/prepare": {"data", "data/tokenizers", "data/formats", "data/chat", "data/media"},
    "data/on_the_fly": {"data", "data/tokenizers", "data/formats", "data/chat", "data/prepare"},
    "data/mixture": {
        *{"planner", "media", "data", "data/tokenizers", "data/tables", "data/media"},
        *{"data/prepare", "data/on_the_fly", "data/formats", "data/chat"},
    },
    "data/steps": {"planner", "planner/experts", "media", "data", "data/media", "data/mixture"},
    "data_plane/wire": (steps := {"planner", "data", "data/mixture", "data/steps"}),
    "data_plane/roles": steps | {"data/media"},
    "data_plane/cluster": set(),
    "data_plane": {
        *{"planner", "data", "data_plane/wire", "data_plane/roles", "data_plane/cluster"},
    },
    "simulator": {"planner", "media"},
    "simulator/execution": {"planner"},
    "simulator/report": {"planner", "simulator", "simulator/execution"},
    "runtime": set(),
    "runtime/cuda": set(),
    "runtime/copies": set(),
    "runtime/health": {"runtime"},
    "runtime/epochs": set(),
    "runtime/kernels": {"runtime"},
    "runtime/offload": {"runtime"},
    "runtime/ring": {
        *{"planner", "planner/memory", "runtime", "runtime/kernels", "runtime/offload"},
    },
    "runtime/attention": {"runtime", "runtime/kernels", "runtime/ring"},
    "runtime/loss": {"runtime", "runtime/ring"},
    "megatron/options": {"planner"},
    "megatron/cpu": set(),
    "megatron": {"planner", "data", "runtime", "megatron/options", "megatron/cpu"},
    "megatron/model": {"megatron", "megatron/options", "media", "runtime"},
    "megatron/optimizer": {
        *{"megatron", "megatron/options", "megatron/model", "planner", "runtime"},
    },
    "megatron/checkpoint": {
        *{"megatron", "megatron/options", "megatron/optimizer"},
        *{"data", "runtime"},
    },
    "megatron/execution": {"megatron", "megatron/model", "data", "runtime"},
    "megatron/media": {
        *{"megatron", "megatron/options", "megatron/model", "planner", "media", "data", "runtime"},
    },
    "megatron/step": {
        *{"megatron", "megatron/options", "megatron/model", "megatron/execution"},
        *{"megatron/checkpoint", "megatron/media"},
        *{"planner", "media", "data", "data_plane", "simulator", "runtime"},
    },
    "megatron/world": {
        *{"megatron", "megatron/options", "megatron/optimizer", "megatron/execution"},
        *{"megatron/step", "runtime"},
    },
    "megatron/lm": {
        *{"megatron", "megatron/options", "megatron/cpu"},
        *{"megatron/model", "megatron/optimizer", "megatron/checkpoint"},
        *{"megatron/execution", "megatron/step", "megatron/world"},
        *{"planner", "data", "runtime", "encoders"},
    },
    "megatron/doctor": {
        *{"planner", "data_plane", "megatron", "megatron/cpu", "megatron/lm", "runtime"},
    },
    "launching": {"runtime", "runtime/epochs"},
    "encoders": {"media", "convert/files"},
    "session": {"planner", "media", "data", "runtime", "megatron"},
    "verl": {"bridge", "megatron", "session"},
    "bridge": {"session", "megatron", "megatron/cpu", "megatron/lm", "runtime"},
    "training": {"planner", "data", "simulator", "runtime", "megatron", "encoders"},
    "profile": {"planner", "media", "encoders", "data", "simulator", "runtime", "megatron"},
    "convert/families": {"megatron"},
    "convert/files": {"data"},
    "convert": {"convert/families", "convert/files", "data", "encoders", "megatron"},
    **dict.fromkeys(("pretrain_gpt", "plugin"), {"megatron", "runtime", "training"}),
    "__main__": {"plugin"},
    "cli/shared": {"planner", "media", "simulator", "megatron/options"},
    "cli/data_commands": {"cli/shared", "planner", "media", "data", "data_plane", "simulator"},
    "cli/checking": {"cli/shared", "planner", "media", "encoders", "data", "megatron", "simulator"},
    "cli": {
        *{"cli/shared", "cli/data_commands", "cli/checking", "media"},
        *{"planner", "data", "simulator", "runtime", "megatron", "training"},
        *{"profile", "convert", "launching"},
    },
}
BELOW_ALL = {
    *("nearest", "strategies", "options", "exit_codes", "arrays", "files", "compiled"),
    *("overrides", "processes", "__init__"),
}
TORCH_ROOMS = {
    "launching",
    "encoders",
    "runtime",
    "megatron",
    "session",
    "verl",
    "bridge",
    "training",
    "profile",
    "convert",
    "cli",
}
PLANNER_PACKAGES = {"numpy", "orjson"} | set(sys.stdlib_module_names)

# Rooms that others import by their face, the names in their ``__init__``. Those of megatron/lm,
# megatron/cpu and megatron/checkpoint are named one by one: importing all of them would import
# Megatron too early, or where it is not needed.
FACES = {
    *("planner/network", "planner/online", "planner/experts", "planner/shape", "planner/stages"),
    *("planner/memory", "runtime/cuda", "runtime/health", "runtime/kernels", "runtime/offload"),
    "runtime/ring",
    *("runtime/attention", "runtime/copies", "runtime/loss", "megatron/options", "megatron/model"),
    *("megatron/optimizer", "megatron/execution", "megatron/step", "megatron/doctor"),
    *("megatron/world", "runtime/epochs"),
    *("data/tokenizers", "data/formats", "data/chat", "data/media", "data/tables"),
    "data/prepare",
    *("data/on_the_fly", "data/mixture", "data/steps", "data_plane/wire"),
    *("simulator/execution", "simulator/report", "cli/checking"),
}

# The same for the C++ planner: each room may include those before it.
OF_STRATEGIES = [strategy.name.replace("-", "_") for strategy in STRATEGIES]
CPP_ROOMS = (
    *("base", "bounds", "schedule", "baselines", "rings"),
    *(name for name in OF_STRATEGIES if (PLANNER / name).is_dir()),
    "",
)


def _room(module: str) -> str:
    """Room of a module: ``megatron_hdp.megatron.execution.executor`` -> ``megatron/execution``."""
    parts = module.split(".")[1:]
    for known in ("/".join(parts[:2]), *parts[:1]):
        if known in ROOMS:
            return known
    return "__init__"


def _may_import(room: str, target: str) -> bool:
    """A room that is allowed by the name of its floor is allowed with all rooms in it."""
    floor = target.split("/")[0]
    allowed = ROOMS.get(room, set())
    same_floor = room.split("/")[0] == floor
    return (
        target in BELOW_ALL | {room} or target in allowed or (floor in allowed and not same_floor)
    )


def _each_import(tree: ast.AST, module: str) -> Iterator[tuple[int, str]]:
    """Yield line and full name of every import, inside functions and relative ones too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = module.split(".")[: -node.level] if node.level else []
            base = ".".join([*parents, node.module or ""]).rstrip(".")
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and _is_import_call(node) and node.args:
            name = node.args[0]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield node.lineno, name.value


_imports = cache(lambda source, module: [*_each_import(ast.parse(source), module)])


def _is_import_call(node: ast.Call) -> bool:
    name = getattr(node.func, "attr", getattr(node.func, "id", ""))
    return name in {"import_module", "__import__", "find_spec"}


def violations(source: str, module: str) -> list[str]:
    """Return what is wrong with the imports of a module's source."""
    room = _room(module)
    floor = room.split("/")[0]
    found = []
    for line, name in _imports(source, module):
        top = name.split(".")[0]
        where = f"{module}:{line} imports {name}"
        if top == "megatron_hdp":
            if not _may_import(room, _room(name)):
                allowed = sorted(ROOMS.get(room, set()) | BELOW_ALL)
                found.append(f"{where}: {room} may import {allowed} of the package")
            elif _room(name) in FACES - {room} and name.count(".") > 3:
                found.append(f"{where}: name what the room's __init__ offers")
        elif top == "megatron" and floor != "megatron":
            found.append(f"{where}: only megatron_hdp/megatron may name a Megatron module")
        elif top == "torch" and floor not in TORCH_ROOMS:
            found.append(f"{where}: {room} works without torch")
        elif floor == "planner" and top not in PLANNER_PACKAGES:
            found.append(f"{where}: the planner needs numpy and orjson only")
    return found


def circles(graph: Mapping[str, Set[str]]) -> list[str]:
    """Return a circle of the graph, node by node, or nothing if it has none."""
    done: set[str] = set()

    def follow(node: str, way: tuple[str, ...]) -> list[str]:
        if node in way:
            return [*way[way.index(node) :], node]
        if node in done:
            return []
        for other in sorted(graph.get(node, ())):
            if circle := follow(other, (*way, node)):
                return circle
        done.add(node)
        return []

    return next(filter(None, (follow(node, ()) for node in sorted(graph))), [])


def _sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def _module(path: Path) -> str:
    return ".".join(path.relative_to(REPOSITORY).with_suffix("").parts)


def _module_graph() -> dict[str, set[str]]:
    """What each module imports of the package; a package stands for its ``__init__``."""
    sources = [*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.pyi")]
    modules = {_module(path).removesuffix(".__init__"): path for path in sources}
    graph = {}
    for module, path in modules.items():
        named = (name for _, name in _imports(path.read_text(), _module(path)))
        found = {name if name in modules else name.rpartition(".")[0] for name in named}
        graph[module] = (found & set(modules)) - {module}
    return graph


def _includes(text: str) -> list[str]:
    return re.findall(r'^#include "planner/([\w/]+)\.hpp"', text, re.MULTILINE)


def _cpp_graph() -> dict[str, set[str]]:
    """What each pair of a header and its source includes, as ``room/name``."""
    graph: dict[str, set[str]] = {}
    for path in sorted(PLANNER.rglob("*.?pp")):
        part = str(path.relative_to(PLANNER).with_suffix(""))
        graph.setdefault(part, set()).update(set(_includes(path.read_text())) - {part})
    return graph


def cpp_violations(graph: Mapping[str, Set[str]]) -> list[str]:
    """Return the includes that point from a room to a later one."""
    floor = {room: number for number, room in enumerate(CPP_ROOMS)}
    return [
        f"{part} includes {other}"
        for part, others in graph.items()
        for other in others
        if floor[other.rpartition("/")[0]] > floor[part.rpartition("/")[0]]
    ]


def strangers(room: str, text: str) -> list[str]:
    """Return what a source of C++ includes of another room than its own, or of Python."""
    named = re.findall(r'^#include ["<]([\w/.]+)[">]', text, re.MULTILINE)
    return [one for one in named if "/" in one and not one.startswith(f"{room}/")]


def test_the_rooms_of_cpp_know_neither_each_other_nor_python() -> None:
    for room in ("planner", "data"):
        sources = list((CSRC / room).rglob("*.?pp"))
        assert sources and not [
            one for path in sources for one in strangers(room, path.read_text())
        ]
    planted = '#include "data/order.hpp"\n#include <vector>\n#include <pybind11/numpy.h>\n'
    assert strangers("planner", planted) == ["data/order.hpp", "pybind11/numpy.h"]
    assert strangers("data", planted) == ["pybind11/numpy.h"]


def test_every_folder_is_a_known_room() -> None:
    folders = {
        str(path.parent.relative_to(PACKAGE)) for path in _sources() if path.parent != PACKAGE
    }
    modules = {path.stem for path in PACKAGE.glob("*.py")}
    assert (folders | modules) - {"__init__"} <= set(ROOMS)


def test_imports_point_down() -> None:
    found = [text for path in _sources() for text in violations(path.read_text(), _module(path))]
    assert not found, "\n".join(found)


def test_a_room_stands_below_those_that_import_it() -> None:
    graph = {room: {other for other in ROOMS if _may_import(room, other)} for room in ROOMS}
    assert circles({room: others - {room} - BELOW_ALL for room, others in graph.items()}) == []


def test_no_modules_import_each_other() -> None:
    assert circles(_module_graph()) == []
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == ["a", "b", "c", "a"]


def test_includes_of_the_planner_point_down() -> None:
    graph = _cpp_graph()
    assert cpp_violations(graph) == []
    assert circles(graph) == []
    assert len([part for part in graph if graph[part]]) > 20  # they were found
    upward = {"base/types": {"rings/rings"}, "planner": {"pp_balance/draft"}}
    assert cpp_violations(upward) == ["base/types includes rings/rings"]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("megatron_hdp.planner.types", "import torch"),
        ("megatron_hdp.planner.types", "import pandas"),
        ("megatron_hdp.planner.types", "from megatron_hdp.data import TokenFile"),
        ("megatron_hdp.planner.types", "from ..data import TokenFile"),
        ("megatron_hdp.planner.types", "def f():\n    from torch import nn"),
        ("megatron_hdp.planner.types", "import importlib\nimportlib.import_module('torch')"),
        ("megatron_hdp.planner.memory.job", "import torch"),
        ("megatron_hdp.data.sampler", "from megatron_hdp import runtime"),
        ("megatron_hdp.data.sampler", "import torch.distributed"),
        ("megatron_hdp.simulator.plot", "import megatron_hdp.data"),
        ("megatron_hdp.simulator.execution.step", "from megatron_hdp.simulator import plot"),
        ("megatron_hdp.simulator.execution.step", "import torch"),
        ("megatron_hdp.runtime.loss.token_sum", "from megatron.core import parallel_state"),
        ("megatron_hdp.runtime.loss.token_sum", "from megatron_hdp.megatron import parallel"),
        ("megatron_hdp.runtime.timeline", "from megatron_hdp.runtime.ring.comm import RingComm"),
        ("megatron_hdp.runtime.ring.comm", "from megatron_hdp.runtime.attention import selection"),
        ("megatron_hdp.runtime.loss.x", "from megatron_hdp.runtime.ring.comm import RingComm"),
        ("megatron_hdp.megatron.parallel", "from megatron_hdp.megatron.step import executor"),
        ("megatron_hdp.megatron.model.moe", "from megatron_hdp.megatron.step import executor"),
        ("megatron_hdp.megatron.step.setup", "import megatron_hdp.megatron.lm.run"),
        ("megatron_hdp.megatron.model.moe", "from megatron_hdp.training.loop import pretrain"),
        ("megatron_hdp.training.loop", "import megatron.core"),
        ("megatron_hdp.training.loop", "from megatron_hdp.cli import main"),
        ("megatron_hdp.options.hdp", "from megatron_hdp.planner import plan"),
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
        ("megatron_hdp.planner.plan", "from . import _core\nimport megatron_hdp.planner.types"),
        ("megatron_hdp.runtime.ring.comm", "import torch\nimport numpy"),
        ("megatron_hdp.runtime.ring.comm", "from megatron_hdp.runtime.timeline import Timeline"),
        ("megatron_hdp.megatron.model.moe", "from megatron.core import parallel_state"),
        ("megatron_hdp.megatron.model.moe", "from megatron_hdp.runtime.ring import RingComm"),
        ("megatron_hdp.cli.main", "from megatron_hdp import __version__"),
        ("megatron_hdp.simulator.plot", "import matplotlib"),
    ],
)
def test_downward_imports_are_allowed(module: str, source: str) -> None:
    assert violations(source, module) == []


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("megatron_hdp", {"torch", "megatron", "numpy"}),
        ("megatron_hdp.planner", {"torch", "megatron"}),
        ("megatron_hdp.profile.fitting", {"torch"}),
        ("megatron_hdp.megatron.options.arguments", {"torch"}),
        ("megatron_hdp.data_plane.wire", {"torch", "megatron", "ray"}),
        ("megatron_hdp.cli.data_commands.top", {"torch", "megatron", "ray"}),
        ("megatron_hdp.cli.simulated_run", {"torch", "megatron", "ray"}),
        ("megatron_hdp.processes.launcher", {"torch", "numpy"}),
    ],
)
def test_importing_it_does_not_load(module: str, unwanted: set[str]) -> None:
    code = f"import sys, {module}; print(*{{name.split('.')[0] for name in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=REPOSITORY
    )
    loaded = set(done.stdout.split())
    assert "sys" in loaded
    assert not loaded & unwanted


def _overgrown(files: dict[str, str]) -> list[str]:
    return [name for name, text in files.items() if text.count("\n") > MAX_LINES]


def test_no_file_outgrows_a_head() -> None:
    patterns = ("megatron_hdp/**/*.py", "csrc/**/*.?pp", "tests/**/*.py", "scripts/**/*")
    paths = {path for pattern in patterns for path in REPOSITORY.glob(pattern) if path.is_file()}
    texts = {str(path.relative_to(REPOSITORY)): path for path in paths}
    sources = {name: path.read_text(errors="replace") for name, path in texts.items()}
    assert _overgrown(sources) == []
    assert _overgrown({"long.py": "x\n" * (MAX_LINES + 1)}) == ["long.py"]


def test_every_room_says_its_idea_and_is_no_crowd() -> None:
    for path in PACKAGE.rglob("__init__.py"):
        idea = ast.get_docstring(ast.parse(path.read_text())) or ""
        assert idea.split("\n")[0].endswith("."), f"{path.parent}: no sentence in its __init__"
    rooms = {path.parent for path in [*PACKAGE.rglob("*.py"), *CSRC.rglob("*.?pp")]}
    crowded = [
        str(room) for room in rooms if len([*room.glob("*.py"), *room.glob("*.?pp")]) > MAX_FILES
    ]
    assert crowded == []


def _importers(texts: Mapping[str, str]) -> dict[str, set[str]]:
    """Who imports each module, rooms' faces aside: a name of a face leads to who defines it."""
    named = {module: {name for _, name in _imports(text, module)} for module, text in texts.items()}
    faces = {module for module in texts if module.endswith(".__init__")}
    offered = {
        f"{face.removesuffix('.__init__')}.{name.rpartition('.')[2]}": name
        for face in faces
        for name in named[face]
    }

    def defining(name: str) -> str:
        while name not in texts and name in offered and offered[name] != name:
            name = offered[name]
        return name if name in texts else name.rpartition(".")[0]

    importers: dict[str, set[str]] = {module: set() for module in set(texts) - faces}
    for module in importers:
        for target in {defining(name) for name in named[module]} & set(importers) - {module}:
            importers[target].add(module)
    return importers


# The users of subcommands and of families of models, which have a file each, however short.
_WITH_A_FILE_EACH = ({"megatron_hdp.cli.main"}, {"megatron_hdp.convert.families.registry"})


def crumbs(texts: Mapping[str, str]) -> list[str]:
    """Return the short modules that one other module uses: they belong into it."""
    return sorted(
        f"{module} ({texts[module].count(chr(10))} lines) belongs into {min(users)}"
        for module, users in _importers(texts).items()
        if len(users) == 1 and texts[module].count("\n") < MIN_LINES
        if users not in _WITH_A_FILE_EACH
    )


_SHORT = {  # each is of a subject, or of a process, of its own
    "megatron_hdp.data.tokenizers.byte_tokenizer",
    "megatron_hdp.data_plane.hooks",
    "megatron_hdp.media.extension",
}


@pytest.mark.slow
def test_no_module_is_a_crumb() -> None:
    found = crumbs({_module(path): path.read_text() for path in _sources()})
    assert {one.split()[0] for one in found} == _SHORT, found


def test_a_planted_crumb_is_found() -> None:
    long = "\n" * MIN_LINES
    texts = {
        "m.room.__init__": "from m.room.short import thing\nfrom m.room.shared import other",
        "m.room.short": "thing = 1\n",
        "m.room.shared": "other = 2\n",
        "m.room.user": f"from m.room import other{long}",
        "m.user": f"from m.room import thing, other{long}",
    }
    assert crumbs(texts) == ["m.room.short (1 lines) belongs into m.user"]
