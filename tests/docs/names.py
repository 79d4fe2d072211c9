"""What a name in backticks may be: a file, a module and what is in it, a flag, a key."""

import argparse
import ast
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from megatron_hdp.megatron.lm.options import REFUSED, add_flags
from megatron_hdp.options import flag_of
from tests.docs.pages import ROOT

# What belongs to others (Megatron-LM, torch, torchrun, Slurm ...), and files that runs make.
_SECTIONS = re.findall(
    r"\[(\w+)\]\n([^[]*)", (ROOT / "tests" / "docs" / "foreign_names.txt").read_text()
)
FOREIGN = {kind: set(text.split()) for kind, text in _SECTIONS}

_SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_FLAG = re.compile(r"(?<![\w-])--[a-zA-Z][\w-]*")
_FILE = re.compile(
    r"[\w./-]*\w\.(?:py|sh|hpp|cpp|yaml|sbatch|txt|patch|md|json|jsonl|html|png|css|js|toml)"
)
_DOTTED = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+")
_KEY = re.compile(r"[a-z][a-z0-9]*(?:[_-][a-z0-9]+)+|[A-Z][a-z0-9]+(?:[A-Z][a-z0-9]*)+")


def unknown_names(text: str) -> list[str]:
    """Names in the backticks of a page that nothing declares."""
    return [
        name
        for span in _SPAN.findall(_FENCE.sub("", text))
        for name, known in _names(span)
        if not known
    ]


def _names(span: str) -> Iterator[tuple[str, bool]]:
    for flag in _FLAG.findall(span):
        yield flag, flag in flags()
    name = span.removesuffix("()")
    if _FILE.fullmatch(name):
        yield name, is_file(name)
    elif _DOTTED.fullmatch(name):
        yield name, is_path(name)
    elif _KEY.fullmatch(name):
        yield name, name in words() or name in FOREIGN["names"]


@cache
def tracked() -> list[str]:
    """The repository's files."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    return [path for path in listed.stdout.splitlines() if (ROOT / path).exists()]


def is_file(name: str) -> bool:
    """Whether a file is tracked under this name, or under a folder's and this name."""
    name = name.removeprefix("./")
    return name in FOREIGN["files"] or any(f"/{path}".endswith(f"/{name}") for path in tracked())


@cache
def flags() -> set[str]:
    """Every flag of every parser of ours, of scripts, and those of others."""
    found = {flag for parser in parsers() for one in parser._actions for flag in one.option_strings}
    scripts = "".join((ROOT / path).read_text() for path in tracked() if path.startswith("scripts"))
    refused = {flag_of(name) for name in REFUSED}
    return found | refused | set(_FLAG.findall(scripts)) | FOREIGN["flags"]


@cache
def parsers() -> tuple[argparse.ArgumentParser, ...]:
    """All parsers: of training, of the plugin and of every subcommand."""
    from megatron_hdp.cli.main import build_parser as of_cli
    from megatron_hdp.megatron.options import build_parser as of_training

    plugin = argparse.ArgumentParser(prog="megatron_hdp run")
    add_flags(plugin)
    return (*below(of_cli()), of_training(), plugin)


def below(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """A parser and all of its subcommands'."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for one in action.choices.values():
                yield from below(one)


def is_path(name: str) -> bool:
    """Whether a dotted name leads to a module, to something in one, or to a class's attribute."""
    parts = name.split(".")
    if parts[0] in FOREIGN["prefixes"] or name in FOREIGN["names"]:
        return True
    if parts[0] == "megatron_hdp":
        parts = parts[1:]
    folder = ROOT / "megatron_hdp"
    while parts and (folder / parts[0]).is_dir():
        folder /= parts.pop(0)
    if not parts:
        return True
    if (folder / f"{parts[0]}.py").exists():
        return not parts[1:] or _has(_members(str(folder / f"{parts[0]}.py")), parts[1:])
    if folder != ROOT / "megatron_hdp":
        return _has(_members(str(folder / "__init__.py")), parts)
    return len(parts) == 2 and parts[1] in _attributes().get(parts[0], ())


def _has(names: set[str], parts: list[str]) -> bool:
    rest = parts[1:]
    return parts[0] in names and (not rest or rest[0] in _attributes().get(parts[0], ()))


@cache
def _members(path: str) -> set[str]:
    """What a module binds."""
    found = set()
    for node in ast.parse(Path(path).read_text()).body:
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                found |= {one.asname or one.name for one in names}
            case ast.Assign(targets=targets):
                found |= {one.id for one in targets if isinstance(one, ast.Name)}
            case ast.AnnAssign(target=ast.Name(id=name)):
                found.add(name)
    return found


@cache
def _trees() -> list[ast.Module]:
    kinds = ("megatron_hdp/", "scripts/", "tests/support/", "docs/_ext/")
    paths = [path for path in tracked() if path.endswith(".py") and path.startswith(kinds)]
    return [ast.parse((ROOT / path).read_text()) for path in paths]


@cache
def _attributes() -> dict[str, set[str]]:
    """What each class has: its methods and fields, those of its bases too."""
    own, bases = defaultdict(set), defaultdict(set)
    for node in (node for tree in _trees() for node in ast.walk(tree)):
        if isinstance(node, ast.ClassDef):
            bases[node.name] |= {one.id for one in node.bases if isinstance(one, ast.Name)}
            for one in ast.walk(node):
                match one:
                    case ast.FunctionDef(name=name) | ast.AnnAssign(target=ast.Name(id=name)):
                        own[node.name].add(name)
                    case ast.Attribute(value=ast.Name(id="self"), attr=name):
                        own[node.name].add(name)
                    case ast.Assign(targets=[ast.Name(id=name)]):
                        own[node.name].add(name)
    for name, above in bases.items():
        for base in above:
            own[name] |= own.get(base, set())
    return own


@cache
def words() -> set[str]:
    """Names that the code binds or spells out: identifiers, keys, values of YAML and C++."""
    found = set()
    for node in (node for tree in _trees() for node in ast.walk(tree)):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.arg(arg=name):
                found.add(name)
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.keyword(arg=str(name)):
                found.add(name)
            case ast.Constant(value=str(text)) if len(text) < 60:
                found |= {text, text.replace("_", "-"), text.lstrip("-")}
    found |= {name.replace("_", "-") for name in found}
    found |= {path.split("/")[-1].split(".")[0] for path in tracked()}
    others = [path for path in tracked() if path.endswith((".hpp", ".cpp", ".yaml", ".toml"))]
    return found.union(*(re.findall(r"[\w-]+", (ROOT / path).read_text()) for path in others))


def missing_rooms(listing: str) -> list[str]:
    """Folders of code that a listing of rooms leaves out."""
    kinds = (".py", ".cpp")
    paths = [
        path.split("/")[1:-1]
        for path in tracked()
        if path.endswith(kinds)
        and path.startswith(("megatron_hdp/", "csrc/"))
        and "/tests/" not in path
    ]
    rooms = {folder for path in paths for folder in path}
    return sorted(room for room in rooms if not re.search(rf"(?<![\w]){room}/", listing))
