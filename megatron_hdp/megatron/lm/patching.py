"""Declared replacements of Megatron's functions: checked together, applied together, taken back.

A patch names its target, why it is needed, and the parameters that the target has in each release
it was written for. Nothing is replaced unless every patch of the release fits.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_hdp.megatron.lm.releases import release_of, releases_of, untested
from megatron_hdp.overrides import Overrides

Function = Callable[..., Any]


class PatchError(RuntimeError):
    """A patch does not fit, or cannot be taken back."""


@dataclass(frozen=True)
class Patch:
    """One function to replace."""

    target: str
    """``module:function`` or ``module:Class.method``."""
    why: str
    parameters: Mapping[str, tuple[str, ...] | None]
    """For each release of megatron-core that needs the patch the names of the target's parameters,
    in order, as they were seen there; None: the replacement hands all on as they are."""
    replacement: Function
    """Called with the original, then with what the target's caller gives."""
    owner_only: bool = False
    """True: other modules that hold the same function keep it."""

    @property
    def module(self) -> str:
        """Where the target is."""
        return self.target.split(":")[0]

    @property
    def name(self) -> str:
        """What its owner calls it."""
        return self.target.split(":")[1].split(".")[-1]

    def missing_package(self) -> str | None:
        """A package that the target's module imports and that is not installed; None if none."""
        try:
            importlib.import_module(self.module)
        except ModuleNotFoundError as error:
            package = str(error.name).split(".")[0]
            return None if package == self.module.split(".")[0] else package
        except ImportError:
            pass  # `problem` reports it
        return None

    def owner(self) -> Any:
        """The module or class that has the target, once its module was imported.

        Raises:
            PatchError: there is none.
        """
        try:
            owner: Any = importlib.import_module(self.module)
            for part in self.target.split(":")[1].split(".")[:-1]:
                owner = getattr(owner, part)
        except (ImportError, AttributeError) as error:
            raise PatchError(f"{self.target}: expected it to exist, found {error}") from error
        return owner

    def problem(self, version: str) -> str | None:
        """What keeps this patch from being applied to a version that needs it; None if nothing."""
        try:
            owner = self.owner()
        except PatchError as error:
            return str(error)
        found = inspect.getattr_static(owner, self.name, None)
        if found is None:
            return f"{self.target}: expected it to exist, found no {self.name}"
        function = _function_of(found)
        if not callable(function):
            return f"{self.target}: expected a function, found {found!r}"
        expected = self.parameters[release_of(version)]
        parameters = tuple(inspect.signature(function).parameters)
        if expected is not None and parameters != expected:
            return (
                f"{self.target}: expected the parameters ({', '.join(expected)}), found "
                f"({', '.join(parameters)})"
            )
        return None


class PatchSet:
    """Patches that go in and out together."""

    def __init__(
        self, patches: Sequence[Patch], tested: Sequence[str], package: str = "megatron-core"
    ) -> None:
        self.patches = tuple(patches)  # of all releases
        self.tested = tuple(tested)  # versions of the package with which they were run
        self.package = package
        self._overrides = Overrides()

    @property
    def is_applied(self) -> bool:
        """True between `apply` and `revert`."""
        return bool(self._overrides)

    def of(self, version: str) -> list[Patch]:
        """The patches that a version needs."""
        return [patch for patch in self.patches if release_of(version) in patch.parameters]

    def problem_of_all(self, version: str) -> str | None:
        """What keeps every patch from being applied to a version; None if nothing does."""
        releases = releases_of(self.tested)
        if release_of(version) not in releases:
            return (
                f"found {self.package} {version}, expected a version of {', '.join(releases)}: "
                f"pip install '{self.package}~={self.tested[-1]}', or git checkout a tag of theirs"
            )
        if missing := sorted({p for patch in self.of(version) if (p := patch.missing_package())}):
            names = " ".join(missing)
            return f"found no package {names}, which Megatron imports: pip install {names}"
        return None

    def problems(self, version: str) -> list[str]:
        """What keeps the patches from being applied to a version; empty if nothing does."""
        if whole := self.problem_of_all(version):
            return [whole]
        return [text for patch in self.of(version) if (text := patch.problem(version)) is not None]

    def apply(self, version: str) -> str | None:
        """Replaces every target, and the copies that modules have imported by value.

        A second call does nothing. Returns a note if the version of megatron-core was not tested.

        Raises:
            PatchError: some patch does not fit, or a copy was missed; nothing is replaced then.
        """
        if self.is_applied:
            return None
        problems = self.problems(version)
        if problems:
            listed = "\n  ".join(problems)
            raise PatchError(
                f"nothing was patched, because this Megatron does not fit:\n  "
                f"{listed}\nInstall what is missing, or a release that the README's table of "
                "supported versions lists"
            )
        try:
            self._replace(self.of(version))
        except BaseException:
            self._overrides.undo()
            raise
        return untested(version, self.tested, self.package)

    def revert(self) -> None:
        """Puts every original back; does nothing when nothing is applied.

        Raises:
            PatchError: somebody replaced after us what was replaced here; all stays as it is.
        """
        if foreign := self._overrides.foreign():
            raise PatchError(
                f"{', '.join(foreign)} changed after the plugin was activated: undo that first"
            )
        self._overrides.undo()

    def _replace(self, patches: Sequence[Patch]) -> None:
        owners = [patch.owner() for patch in patches]
        originals = [
            inspect.getattr_static(owner, patch.name)
            for owner, patch in zip(owners, patches, strict=True)
        ]
        copied = {  # by identity: what modules may hold by value
            id(original): patch.target
            for owner, patch, original in zip(owners, patches, originals, strict=True)
            if not patch.owner_only and not inspect.isclass(owner)
        }
        copies = list(_copies(copied))
        for owner, patch, original in zip(owners, patches, originals, strict=True):
            made = _calling(patch.replacement, _function_of(original))
            # a method stays what it was: class methods and static methods are descriptors
            is_descriptor = isinstance(original, staticmethod | classmethod)
            value = type(original)(made) if is_descriptor else made
            self._overrides.set(owner, patch.name, value)
            if copied.get(id(original)) == patch.target:
                for module, name, held in copies:
                    if held is original and (module, name) != (owner, patch.name):
                        self._overrides.set(module, name, value)
        if left := next(_copies(copied), None):
            module, name, held = left
            raise PatchError(f"{copied[id(held)]}: {module.__name__}.{name} kept the original")


def _calling(replacement: Function, original: Function) -> Function:
    @functools.wraps(original)
    def replaced(*positional: Any, **named: Any) -> Any:
        return replacement(original, *positional, **named)

    return replaced


def _function_of(found: Any) -> Any:
    return found.__func__ if isinstance(found, staticmethod | classmethod) else found


def _copies(functions: Collection[int]) -> Iterator[tuple[Any, str, Any]]:
    """Modules, other than this package's, that hold one of the functions, given by identity.

    Yields module, name and function. There are thousands of modules: one look serves all patches.
    """
    for module_name, module in list(sys.modules.items()):
        if module is None or module_name.split(".")[0] == "megatron_hdp":
            continue
        names = getattr(module, "__dict__", None)
        if not isinstance(names, dict):
            continue
        for name, value in list(names.items()):
            if id(value) in functions:
                yield module, name, value
