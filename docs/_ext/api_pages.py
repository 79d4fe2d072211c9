"""API pages, one for each package: its modules one after the other, from their docstrings."""

import importlib
import pkgutil
import re
from pathlib import Path
from types import ModuleType

EXTRAS = ("ray", "tensordict", "triton", "verl")  # a module may import them, not all are installed


def write_pages(package: str, folder: Path) -> list[Path]:
    """Write the pages of a package and of those below it, and remove others.

    What is up to date is not written again, so that Sphinx does not read it again.

    Args:
        package: its name.
        folder: where pages go, for Sphinx's eyes only.
    """
    root = importlib.import_module(package)
    below = pkgutil.walk_packages(root.__path__, prefix=f"{package}.")
    names = [package, *(one.name for one in below if one.ispkg)]
    pages = {folder / f"{name}.rst": page(name) for name in names}
    folder.mkdir(exist_ok=True)
    for stale in set(folder.iterdir()) - set(pages):
        stale.unlink()
    for path, text in pages.items():
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
    return sorted(pages)


def page(package: str) -> str:
    """The page of one package: what it is, what it offers, its modules."""
    found = importlib.import_module(package)
    parts = [_heading(package, "="), _automodule(package)]
    if offered := _offered(found):
        parts.append(f"It offers {', '.join(offered)}.")
    for one in pkgutil.iter_modules(found.__path__):
        if not one.ispkg and not re.match("_[^_]", one.name):
            parts += [_heading(one.name, "-"), _module(f"{package}.{one.name}")]
    return "\n\n".join(parts) + "\n"


def _heading(text: str, line: str) -> str:
    return f"{text}\n{line * len(text)}"


def _automodule(name: str) -> str:
    return f".. automodule:: {name}\n   :ignore-module-all:"


def _module(name: str) -> str:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:
            raise
        return f"Left out: the site was made without the package {error.name}."
    return _automodule(name)


def _offered(package: ModuleType) -> list[str]:
    """Links to what a package names in ``__all__``, constants without."""
    links = []
    for name in getattr(package, "__all__", ()):
        one = getattr(package, name)
        module = getattr(one, "__module__", None)
        is_linked = module is not None and hasattr(importlib.import_module(module), name)
        links.append(f":py:obj:`{name} <{module}.{name}>`" if is_linked else f"``{name}``")
    return links
