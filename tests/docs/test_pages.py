"""The pages say what is so: links lead somewhere, files that they name exist, CI makes the site."""

import re
import sys
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, ROOT

FILE = re.compile(r"`([\w.-]+(?:/[\w.-]+)*/[\w-]+\.(?:py|sh|hpp|cpp|yaml|sbatch|txt|patch))`")
MODULE = re.compile(r"`((?:planner|data|simulator|runtime|megatron|training|cli)(?:\.\w+)+)`")
FOLDERS = ("", "megatron_hdp", "csrc/planner", "tests")
LINK = re.compile(r"\]\(([^)\s]+)\)")
OTHERS = ("megatron.core", "megatron.training", "planner.cpp")  # Megatron's own, and a file


def headings(text):
    """What links may name behind ``#``, as GitHub makes it."""
    lines = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL).splitlines()
    names = [line.lstrip("#").strip().lower() for line in lines if line.startswith("#")]
    return {re.sub(r"[^\w\- ]", "", name).replace(" ", "-") for name in names}


def dead_links(path, text):
    """Links of a page that lead to no file, or to no heading of it; those to the web apart."""
    dead = []
    for target in LINK.findall(text):
        name, _, anchor = target.partition("#")
        if name.startswith("https://"):
            continue
        file = path.parent / name if name else path
        if not file.exists() or anchor and anchor not in headings(prepared(file.read_text())):
            dead.append(f"{path.name}: {target}")
    return dead


def prepared(text):
    """A page with the headings that its tables bring."""
    sys.path.insert(0, str(ROOT / "docs" / "_ext"))
    try:
        import declarations
    finally:
        sys.path.pop(0)
    return declarations.filled_in(text)


def missing_files(text):
    """Files and modules that a page names and that are not there."""
    files = [
        name
        for name in FILE.findall(text)
        if not any(ROOT.joinpath(folder, name).exists() for folder in FOLDERS)
    ]
    modules = [
        name for name in MODULE.findall(text) if not name.startswith(OTHERS) and not is_module(name)
    ]
    return files + modules


def is_module(name):
    """Whether it is a module of the package, or something in one."""
    path = ROOT / "megatron_hdp" / name.replace(".", "/")
    if path.is_dir() or path.with_suffix(".py").exists():
        return True
    inside, what = path.parent, path.name
    homes = [home for home in (inside.with_suffix(".py"), inside / "__init__.py") if home.exists()]
    return any(re.search(rf"\b{what}\b", home.read_text()) for home in homes)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_links_lead_somewhere(path):
    assert dead_links(path, path.read_text()) == []


def test_a_dead_link_is_found():
    path = ROOT / "docs" / "train.md"
    assert dead_links(path, "[a](gpu.md) [b](gone.md)") == ["train.md: gone.md"]
    assert dead_links(path, "[a](reference.md#model) [b](#gone)") == ["train.md: #gone"]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_files_that_are_named_exist(path):
    assert missing_files(path.read_text()) == []


def test_a_missing_file_is_found():
    text = "`scripts/test.sh` `scripts/gone.sh` `runtime/gone.py` `planner/types.py`"
    assert missing_files(text) == ["scripts/gone.sh", "runtime/gone.py"]
    text = "`planner.types` `planner.gone` `planner.types.Plan` `planner.types.Gone` `data` "
    text += "`megatron.core` `planner.cpp`"
    assert missing_files(text) == ["planner.gone", "planner.types.Gone"]


def test_the_readme_can_be_read():
    assert (ROOT / "README.md").read_text().count("\n") <= 200


def test_no_page_holds_both_sides_of_a_merge():
    lines = [(path.name, line) for path in PAGES for line in path.read_text().splitlines()]
    assert len(PAGES) > 12
    assert [one for one in lines if one[1].startswith(("<<<<<<< ", ">>>>>>> "))] == []


def test_ci_makes_the_site_and_runs_the_tests():
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    assert "./scripts/docs.sh" in lines
    assert "./scripts/test.sh" in lines[-1]  # so that CI's last line is pytest's
    assert Path(ROOT, "scripts/docs.sh").stat().st_mode & 0o100
