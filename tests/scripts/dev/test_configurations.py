"""The page of configurations and their virtual stages come from one script."""

import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.support.scripts import script_module

ROOT = Path(__file__).parents[3]
FLAG = "num-virtual-stages-per-pipeline-rank"


@pytest.fixture(scope="module")
def script():
    with script_module("dev/configurations.py") as module:
        yield module


@pytest.mark.slow
def test_it_sets_what_is_proposed_and_writes_the_page(script, tmp_path, monkeypatch, capsys):
    configs = tmp_path / "configs"
    for models in ("models", "bytescale/models"):
        shutil.copytree(ROOT / "configs" / models, configs / models)
    name = "bytescale/llama-70b-256k.yaml"
    shipped = (ROOT / "configs" / name).read_text()
    assert f"{FLAG}: " in shipped
    (configs / name).write_text(re.sub(rf"{FLAG}: \d+", f"{FLAG}: 2", shipped))
    page = tmp_path / "docs" / "configurations.md"
    page.parent.mkdir()
    marks = "<!-- {0} -->\nold\n<!-- end of {0} -->\n"
    blocks = marks.format("stages") + marks.format("choices")
    page.write_text(f"| llama-7b | kept |\n| llama-70b | old |\n\n{blocks}after\n")
    published = configs / "mixtral-8x22b"
    shutil.copytree(ROOT / "configs" / published.name, published)
    models = page.with_name("models.md")
    models.write_text(f"| {published.name} | old |\n")
    monkeypatch.setattr(script, "CONTEXTS", ("256k",))
    monkeypatch.setattr(script, "MODELS_CONTEXTS", ("32k",))
    monkeypatch.setattr(sys, "argv", ["configurations", "--root", str(tmp_path)])
    script.main()
    assert (configs / name).read_text() == shipped
    written = page.read_text()
    row, other = capsys.readouterr().out.splitlines()
    assert models.read_text() == f"{other}\n"
    assert re.fullmatch(r"\| mixtral-8x22b \| 512 \| .* \| 0\.\d{3}, \d+\.\d s, V \d+ \|", other)
    assert re.fullmatch(r"\| llama-70b \| 8,192 \| .* \| 0\.\d{3}, \d\.\d s, V \d+ \|", row)
    assert written.startswith(f"| llama-7b | kept |\n{row}\n\n<!-- stages -->\n```text\n  stage ")
    assert "old" not in written and written.endswith("after\n")
    assert re.search(
        rf"```text\n  virtual stages .*\n  best: --{FLAG} \d+, as it is\n```", written, re.S
    )


def test_virtual_stages_of_a_text(script):
    plain = "seq-length: 8\npipeline-model-parallel-size: 2\nexperts: 1\n"
    four = script.with_virtual_stages(plain, 4)
    assert four == plain.replace("size: 2\n", f"size: 2\n{FLAG}: 4\n")
    assert script.with_virtual_stages(four, 2) == four.replace(f"{FLAG}: 4", f"{FLAG}: 2")
    assert script.with_virtual_stages(four, 1) == plain


def test_a_page_without_place_is_refused(script):
    with pytest.raises(ValueError, match=r"found 0 rows that begin with '\| llama \|'"):
        script.with_rows("| llama-7b | x |\n", ["| llama | y |"])
    with pytest.raises(ValueError, match="found no marks of 'stages'"):
        script.with_blocks("<!-- stages -->\n", {"stages": []})
