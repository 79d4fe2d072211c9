"""Published models: their sizes are those published, and their layouts are sound on 80 GB."""

import math
import re
from dataclasses import dataclass

import pytest

from megatron_hdp.megatron.options import shape_in
from tests.cli.test_check import CONFIGS, cell_of, finding

PAGE = (CONFIGS.parent / "docs" / "models.md").read_text()
CONTEXTS = {"32k": 2**15, "128k": 2**17, "1m": 2**20}


@dataclass(frozen=True)
class Published:
    """What a model's card or report says of its size."""

    parameters: str
    active: float
    """In billions, for a token; cards differ in whether the embedding counts."""
    gpus: int


MODELS = {
    "llama-3.1-8b": Published("8.03B", 8.03, 64),
    "llama-3.1-70b": Published("70.6B", 70.6, 256),
    "qwen3-8b": Published("8.2B", 8.2, 64),
    "qwen3-32b": Published("32.8B", 32.8, 128),
    "qwen3-30b-a3b": Published("30.5B", 3.3, 64),
    "qwen3-235b-a22b": Published("235B", 22, 512),
    "mixtral-8x7b": Published("46.7B", 12.9, 128),
    "mixtral-8x22b": Published("141B", 39, 512),
    "glm-4.5-air": Published("106B", 12, 256),
    "gpt-oss-20b": Published("20.9B", 3.6, 64),
    "gpt-oss-120b": Published("116.8B", 5.1, 256),
    "deepseek-v3": Published("671B", 37, 2048),
    "kimi-k2": Published("1.03T", 32, 2048),
}


def test_each_has_its_files():
    found = {path.parent.name for path in CONFIGS.glob("*/*.yaml")} - {"bytescale", "models"}
    assert found == set(MODELS)
    for name in MODELS:
        assert {path.stem for path in (CONFIGS / name).iterdir()} == set(CONTEXTS)


@pytest.mark.parametrize("name", MODELS)
def test_it_has_as_many_parameters_as_published(name, tmp_path):
    path = tmp_path / "model.yaml"
    parts = [str(CONFIGS / "models" / f"{part}.yaml") for part in ("common", name)]
    path.write_text(f"config: {parts}\n")
    shape, published = shape_in(path), MODELS[name]
    number, unit = float(published.parameters[:-1]), {"B": 1e9, "T": 1e12}[published.parameters[-1]]
    digits = len(published.parameters.rpartition(".")[2]) - 1 if "." in published.parameters else 0
    found = shape.parameters / unit
    assert number in (round(found, digits), math.floor(found * 10**digits) / 10**digits)
    # cards differ in whether the embedding, which multiplies nothing, and the output layer count
    active = [shape.active_parameters + i * shape.embedding for i in (-1, 0, 1)]
    assert min(abs(one / 1e9 - published.active) for one in active) < 0.03 * published.active


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "context",
    [pytest.param(one, marks=() if one == "1m" else pytest.mark.slow) for one in CONTEXTS],
)
def test_its_layouts_are_sound(name, context):
    path, gpus = CONFIGS / name / f"{context}.yaml", MODELS[name].gpus
    found = finding(path, gpus)
    assert found.refusals == []
    assert found.context_tokens == CONTEXTS[context]
    text = path.read_text()
    if found.job.stages > 1 and "pipeline-model-parallel-layout" not in text:
        assert found.best_virtual_stages == found.job.model_chunks
    assert re.search(rf"^# .*, for {gpus:,} GPUs of 80 GB:$", text, re.MULTILINE)
    (row,) = (line for line in PAGE.splitlines() if line.startswith(f"| {name} | {gpus:,} |"))
    cells = [cell.strip() for cell in row.split("|")[1:-1]]
    assert cells[5 + list(CONTEXTS).index(context)] == cell_of(found)
