"""What fits of a Megatron to come is read in its source, and faults planted there are seen."""

import zipfile
from pathlib import Path

import megatron.core
import pytest

from scripts.dev import next_megatron
from scripts.dev.megatron_source import Missing, Source

CORE = "megatron/core"
FILES = {
    f"{CORE}/__init__.py": "from megatron.core.moved import Moved",
    f"{CORE}/package_info.py": 'MAJOR = 0\nMINOR = 21\nPATCH = 3\nPRE_RELEASE = "rc1"',
    f"{CORE}/moved.py": "from .base.one import Base as Moved, first\nimport torch",
    f"{CORE}/base/__init__.py": "",
    f"{CORE}/base/one.py": """
import torch
from torch.nn import Module
try:
    from apex import fused
except ImportError:
    fused = None
if fused:
    LIMIT = 3
else:
    def first(a, /, b, *rest, c=1, **more): pass
class Root(Module):
    def forward(self, x): pass
class Base(Root):
    size: int = 3
    def __init__(self, config): pass
class Own:
    pass
class Function(torch.autograd.Function):
    pass
""",
}


@pytest.fixture
def tree(tmp_path):
    for name, text in FILES.items():
        file = tmp_path / "tree" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path / "tree"


@pytest.fixture(params=["folder", "wheel"])
def source(request, tree):
    if request.param == "folder":
        return Source(tree)
    wheel = tree.parent / "megatron_core-0.21.3-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in FILES:
            archive.write(tree / name, name)
    return Source(wheel)


def test_names_are_found_through_imports_conditions_and_bases(source):
    assert source.version == "0.21.3rc1"
    first = source.find("megatron.core.moved", "first")
    assert first.module == "megatron.core.base.one"
    assert first.parameters == ("a", "b", "rest", "c", "more")
    assert source.find("megatron.core", "Moved.forward").parameters == ("self", "x")
    assert source.find("megatron.core", "Moved").parameters == ("self", "config")
    one = "megatron.core.base.one"
    for name in ("LIMIT", "fused", "Base.size", "Base.to", "Function.apply"):  # nothing is said
        assert source.find(one, name).parameters is None
    assert source.find("megatron.core.base", "one").node is None  # a module


@pytest.mark.parametrize(
    ("module", "path", "words"),
    [
        ("megatron.core.gone", "f", "found no module megatron.core.gone"),
        ("megatron.core.base.one", "gone", "one has no gone"),
        ("megatron.core.base.one", "Own.forward", "Own has no forward"),
        ("megatron.core", "Moved.backward", "Base has no backward"),
    ],
)
def test_what_is_missing_is_named(source, module, path, words):
    with pytest.raises(Missing, match=words):
        source.find(module, path)


@pytest.fixture(scope="module")
def installed():
    """The folder of the installed megatron-core, which has no training loop before 0.17."""
    return Path(megatron.core.__file__).parents[2]


def misfits(path):
    rows = next_megatron.rows_of(path)
    assert len(rows) > 200
    return {
        (row.kind, row.what): row.problem
        for row in rows
        if row.problem and row.is_needed and "megatron.training" not in row.what
    }


@pytest.mark.slow
def test_the_installed_megatron_core_fits(installed):
    assert not misfits(installed)


@pytest.mark.slow  # a misfit of each kind in the small tree is seen above and below
def test_planted_faults_are_seen(installed, monkeypatch):
    faults = {
        f"{CORE}/transformer/moe/router.py": (b"def routing(", b"def routing_moved("),
        f"{CORE}/transformer/torch_norm.py": (b"config: TransformerConfig,", b"what,"),
        f"{CORE}/fusions/fused_bias_geglu.py": (b"def quick_gelu(", b"def quicker_gelu("),
    }
    text_of = Source._text

    def planted(self, name):
        text = text_of(self, name)
        if name in faults and text is not None:
            assert faults[name][0] in text
            return text.replace(*faults[name])
        return text

    monkeypatch.setattr(Source, "_text", planted)
    found = misfits(installed)
    assert set(found) == {
        ("seam", "megatron.core.transformer.moe.router:TopKRouter.routing"),
        ("patch", "megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__"),
        ("import", "megatron.core.fusions.fused_bias_geglu:quick_gelu"),
    }
    assert "found besides what; expected besides config" in found["patch", NORM]


NORM = "megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__"


def test_a_script_patch_fits_where_the_main_block_begins(tree):
    (tree / "pretrain_gpt.py").write_text("\n" * 494 + 'if __name__ == "__main__":\n')
    rows = {row.what: row.problem for row in next_megatron._rows_of_patch_files(tree)}
    assert rows.pop("core_v0.19.0.patch") is None
    assert len(rows) == 3 and all("at line 495, expected " in one for one in rows.values())


def test_exit_codes_and_the_table(tree, tmp_path, capsys):
    assert next_megatron.main([str(tree)]) == 1
    text = capsys.readouterr().out
    assert "megatron-core 0.21.3rc1" in text and "compared with what HDP expects of 0.19" in text
    assert "MISFIT  seam        megatron.core.transformer.moe" in text
    assert next_megatron.main([str(tmp_path)]) == 2
    assert "expected the folder of a Megatron-LM checkout or a wheel" in capsys.readouterr().err
