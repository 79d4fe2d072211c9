"""``megatron-hdp simulate`` of a mixture with pictures: who encodes them, and how long."""

import json

import pytest

from megatron_hdp.cli.main import main
from megatron_hdp.encoders import described_encoder
from tests.cli.test_check_encoder import VISION
from tests.cli.test_simulate import CONFIG
from tests.data.media import sources

pytest.importorskip("jinja2", reason="pip install 'megatron-hdp[data]'")
pytest.importorskip("transformers", reason="pip install 'megatron-hdp[tokenizers]'")


def test_pictures_of_a_mixture(tmp_path, capsys):
    """Of the same steps as a run draws, in four ways; beside two stages in their gaps."""
    settings = CONFIG.replace("hdp-global-batch-tokens: 262144", "global-batch-size: 6")
    settings = settings.replace("length: 65536", "length: 200").replace("rank: 8192", "rank: 400")
    (tmp_path / "run.yaml").write_text(settings)
    data = sources.write_mixture(tmp_path, "some text without pictures\n" * 3)
    config = {"model_type": "qwen3_vl", "vision_config": VISION}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    command = [
        *("simulate", "--config", str(tmp_path / "run.yaml"), "--gpus", "2", "--steps", "2"),
        *("--strategies", "static", "--hdp-data", str(data), "--output", str(tmp_path / "s.json")),
    ]
    assert main(command) == 0
    assert "has pictures, and no --hdp-encoder says what they take" in capsys.readouterr().out
    (tmp_path / "run.yaml").write_text(f"{settings}hdp-encoder: {tmp_path / 'model'}")
    assert main(command) == 0
    told = capsys.readouterr().out
    assert "pictures a step of" in told and "micro-batch" in told
    found = json.loads((tmp_path / "s.json").read_text())["media"]
    assert list(found) == ["home", "replica", "micro-batch", "step"]
    assert found["step"]["efficiency"] >= max(one["efficiency"] for one in found.values())
    linear, quadratic = described_encoder(tmp_path / "model").shape.flop()
    least = 4 * 4 * found["step"]["num_rows"] * linear / 400e12 / 2  # encoded on two ranks
    for one in found.values():
        assert least < one["step_s"] * one["efficiency"] < 2 * least
        assert one["step_s"] == one["outside_s"]
    assert main([*command, "--", "--pipeline-model-parallel-size", "2"]) == 0
    assert "encoded in gaps of its pipelines:" in capsys.readouterr().out
    beside = json.loads((tmp_path / "s.json").read_text())["media"]
    assert 0 < beside["step"]["step_s"] < 0.9 * beside["step"]["outside_s"]
    assert list(beside) == list(found)
