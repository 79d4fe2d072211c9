"""``megatron-hdp data`` and ``plan`` on sources with videos: counted by headers, none decoded."""

import json
from pathlib import Path

import pytest

from megatron_hdp.cli.main import main
from megatron_hdp.data.media import stored
from tests.data.media import videos

pytest.importorskip("jinja2", reason="pip install 'megatron-hdp[data]'")
pytest.importorskip("transformers", reason="pip install 'megatron-hdp[tokenizers]'")


@pytest.mark.slow
def test_describe_and_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An item is two frames; what a plan writes of whole videos is what ``plan --items`` reads."""
    mix = videos.write_mixture(tmp_path, "qwen3-vl", 25_165_824, "some text\n")
    mix.write_text(mix.read_text().replace("least-pixels: 1", "least-pixels: 4096"))
    monkeypatch.delattr(stored, "patches_of_frames")
    assert main(["data", "describe", str(mix), "--json"]) == 0
    one = json.loads(capsys.readouterr().out)["sources"]["videos"]["media"]
    assert one["kind"] == "pairs of frames" and one["pixels"]["100%"] == 6000
    assert main(["data", "describe", str(mix)]) == 0
    assert "pairs of frames" in capsys.readouterr().out
    sizes, made = tmp_path / "sizes.txt", tmp_path / "plan.json"
    words = ("--steps", "2", "--global-batch-size", "6", "--seq-length", "400")
    flags = (*words, "--items", str(sizes), "--output", str(made))
    assert main(["data", "plan", str(mix), *flags]) == 0
    told = capsys.readouterr().out
    assert "pairs of frames a step of" in told and "sizes of pairs of frames written" in told
    drawn = [tuple(map(int, line.split())) for line in sizes.read_text().splitlines()]
    assert {one[:2] for one in drawn} == set(videos.SIDES)
    (phase,) = json.loads(made.read_text())["phases"]
    assert phase["items"] == sum(-(-frames // 2) for *_, frames in drawn)
    flags = ("--items", str(sizes), "--ranks", "2", "--encoder", "qwen3-vl")
    assert main(["plan", *flags]) == 0
    begin = f"0 images and {len(drawn)} videos: {phase['items']} items, "
    assert capsys.readouterr().out.startswith(begin)
