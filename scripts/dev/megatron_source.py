"""Reads a Megatron's source without importing it: which names it has, and what functions take.

So a checkout, or the wheel of a release, is read whatever Python and packages it wants.
"""

import ast
import importlib
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef
_MOST_STEPS = 20


class Missing(LookupError):
    """A module or a name that is not there."""


@dataclass(frozen=True)
class Found:
    """A name, where it is defined."""

    module: str
    node: ast.AST | None
    """Of a function or a class; None of a module, of a value, or of what is another package's."""

    @property
    def parameters(self) -> tuple[str, ...] | None:
        """What it takes, in order; of a class its constructor's; None where that is not said."""
        node = self.node
        if isinstance(node, ast.ClassDef):
            node = next((one for one in node.body if _defines(one, "__init__")), None)
        if not isinstance(node, Function):
            return None
        given = node.args
        found = [one.arg for one in (*given.posonlyargs, *given.args)]
        found += [given.vararg.arg] if given.vararg else []
        found += [one.arg for one in given.kwonlyargs]
        return tuple(found + ([given.kwarg.arg] if given.kwarg else []))


class Source:
    """The packages in a folder, or in a wheel."""

    def __init__(self, path: Path) -> None:
        self._archive = None if path.is_dir() else zipfile.ZipFile(path)
        self._folder = path
        self._trees: dict[str, tuple[ast.Module, bool] | None] = {}

    @property
    def version(self) -> str:
        """That of megatron-core, as its file says.

        Raises:
            Missing: there is no such file, or no number in it.
        """
        tree = self.tree("megatron.core.package_info")[0]
        found = {
            one.targets[0].id: one.value.value
            for one in tree.body
            if isinstance(one, ast.Assign)
            and isinstance(one.targets[0], ast.Name)
            and isinstance(one.value, ast.Constant)
        }
        try:
            numbers = ".".join(str(found[name]) for name in ("MAJOR", "MINOR", "PATCH"))
        except KeyError as error:
            raise Missing(f"megatron.core.package_info: found no {error}") from None
        return numbers + str(found.get("PRE_RELEASE", ""))

    def tree(self, module: str) -> tuple[ast.Module, bool]:
        """A module's syntax, and whether it is a package.

        Raises:
            Missing: there is no such module.
        """
        if module not in self._trees:
            self._trees[module] = self._parsed(module.replace(".", "/"))
        found = self._trees[module]
        if found is None:
            raise Missing(f"found no module {module}")
        return found

    def find(self, module: str, path: str) -> Found:
        """A name in a module, or of a class in it: ``Class.method``; imports are followed.

        Raises:
            Missing: it is not there.
        """
        name, *inside = path.split(".")
        found = self._name(module, name, _MOST_STEPS)
        for name in inside:
            found = self._attribute(found, name, _MOST_STEPS)
        return found

    def _parsed(self, path: str) -> tuple[ast.Module, bool] | None:
        for name, is_package in ((f"{path}/__init__.py", True), (f"{path}.py", False)):
            text = self._text(name)
            if text is not None:
                return ast.parse(text), is_package
        return None

    def _text(self, name: str) -> bytes | None:
        if self._archive is None:
            file = self._folder / name
            return file.read_bytes() if file.is_file() else None
        return self._archive.read(name) if name in self._archive.namelist() else None

    def _is_module(self, module: str) -> bool:
        try:
            self.tree(module)
        except Missing:
            return False
        return True

    def _name(self, module: str, name: str, steps: int) -> Found:
        if not module.startswith("megatron"):
            return Found(module, None)  # of another package
        tree, is_package = self.tree(module)
        for statement in _statements(tree.body):
            if _defines(statement, name):
                return Found(module, statement if _is_definition(statement) else None)
            if isinstance(statement, ast.ImportFrom) and steps:
                for alias in statement.names:
                    if name in (alias.asname or alias.name, "*" * (alias.name == "*")):
                        return self._name(
                            _absolute(statement, module, is_package), alias.name, steps - 1
                        )
        if self._is_module(f"{module}.{name}"):
            return Found(f"{module}.{name}", None)
        raise Missing(f"{module} has no {name}")

    def _attribute(self, owner: Found, name: str, steps: int) -> Found:
        if not isinstance(owner.node, ast.ClassDef):
            return Found(owner.module, None)  # nothing is said about it
        for statement in _statements(owner.node.body):
            if _defines(statement, name):
                return Found(owner.module, statement if _is_definition(statement) else None)
        for expression in owner.node.bases:
            base = ast.unparse(expression.value if _is_special(expression) else expression)
            try:
                found = self._name(owner.module, base.split(".")[-1], steps - 1)
                if found.node is not None and steps:
                    return self._attribute(found, name, steps - 1)
            except Missing:
                pass
            if hasattr(self._of_another_package(owner.module, base), name):
                return Found(owner.module, None)
        raise Missing(f"{owner.module}.{owner.node.name} has no {name}")

    def _of_another_package(self, module: str, base: str) -> object:
        """A base class as torch's, which is installed; None of Megatron's."""
        name, *inside = base.split(".")
        for statement in _statements(self.tree(module)[0].body):
            for alias in getattr(statement, "names", ()):
                if (alias.asname or alias.name) != name:
                    continue
                where = getattr(statement, "module", None)
                if (where or alias.name).startswith("megatron") or getattr(statement, "level", 0):
                    return None
                try:
                    found = importlib.import_module(where or alias.name)
                    for part in ([alias.name] if where else []) + inside:
                        found = getattr(found, part)
                except (ImportError, AttributeError):
                    return None
                return found
        return None


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Of a module or class, those inside of conditions too."""
    for one in body:
        yield one
        for part in ("body", "orelse", "finalbody"):
            if isinstance(one, ast.If | ast.Try | ast.With):
                yield from _statements(getattr(one, part, []))
        for handler in getattr(one, "handlers", []):
            yield from _statements(handler.body)


def _defines(statement: ast.AST, name: str) -> bool:
    if _is_definition(statement):
        return bool(statement.name == name)  # type: ignore[attr-defined]
    targets: list[ast.expr] = getattr(statement, "targets", [])
    targets = [statement.target] if isinstance(statement, ast.AnnAssign) else targets
    return any(isinstance(one, ast.Name) and one.id == name for one in targets)


def _is_definition(statement: ast.AST) -> bool:
    return isinstance(statement, Function | ast.ClassDef)


def _absolute(statement: ast.ImportFrom, module: str, is_package: bool) -> str:
    """The module that names are imported from."""
    if not statement.level:
        return str(statement.module)
    parts = module.split(".")
    parts = parts[: len(parts) - statement.level + is_package]
    return ".".join([*parts, *([statement.module] if statement.module else [])])


def _is_special(base: ast.expr) -> bool:
    """Whether a base class is specialised: ``Base[int]``."""
    return isinstance(base, ast.Subscript)
