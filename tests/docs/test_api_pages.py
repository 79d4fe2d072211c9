"""A page for each package, its modules in order; what was moved leaves no page behind."""

import sys

import pytest

from tests.docs.pages import ROOT

sys.path.insert(0, str(ROOT / "docs" / "_ext"))
import api_pages  # noqa: E402


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package with one below it."""
    folder = tmp_path / "house"
    (folder / "room").mkdir(parents=True)
    (folder / "__init__.py").write_text('"""A house."""\n')
    (folder / "_hidden.py").write_text("import nothing_of_the_kind\n")
    (folder / "lonely.py").write_text("import ray_of_nobody\n")
    (folder / "room" / "__init__.py").write_text(
        'from house.room.chair import Chair\n__all__ = ["Chair", "COUNT"]\nCOUNT = 1\n'
    )
    (folder / "room" / "chair.py").write_text("class Chair:\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(api_pages, "EXTRAS", ("ray_of_nobody",))
    yield folder
    for name in [name for name in sys.modules if name.split(".")[0] == "house"]:
        del sys.modules[name]


def test_pages(package, tmp_path):
    out = tmp_path / "api"
    out.mkdir()
    (out / "house.cellar.rst").write_text("moved")
    written = api_pages.write_pages("house", out)
    assert sorted(out.iterdir()) == written == [out / "house.room.rst", out / "house.rst"]
    house, room = (out / "house.rst").read_text(), (out / "house.room.rst").read_text()
    assert "Left out: the site was made without the package ray_of_nobody." in house
    assert room.index("automodule:: house.room\n") < room.index("automodule:: house.room.chair\n")
    assert "It offers :py:obj:`Chair <house.room.chair.Chair>`, ``COUNT``." in room


def test_an_unchanged_page_is_not_written_again(package, tmp_path):
    out = tmp_path / "api"
    first = [path.stat().st_mtime_ns for path in api_pages.write_pages("house", out)]
    assert [path.stat().st_mtime_ns for path in api_pages.write_pages("house", out)] == first


def test_a_module_that_does_not_import_is_an_error(package, tmp_path):
    (package / "room" / "table.py").write_text("import no_such_package\n")
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        api_pages.write_pages("house", tmp_path / "api")
