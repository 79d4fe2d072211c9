"""``megatron-hdp data`` on sources with sounds: counted by their headers, none is heard."""

import json
from pathlib import Path

import pytest

from megatron_hdp.cli.main import main
from megatron_hdp.data.media import stored
from tests.data.media import sounds

pytest.importorskip("jinja2", reason="pip install 'megatron-hdp[data]'")
pytest.importorskip("transformers", reason="pip install 'megatron-hdp[tokenizers]'")


@pytest.mark.slow
def test_describe_and_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes are frames of 10 ms; what a plan writes is what ``plan --items`` reads."""
    mix = sounds.write_mixture(tmp_path, "some text\n")
    monkeypatch.delattr(stored, "samples_of")
    frames = sorted(-(-one // 160) for one in sounds.COUNTS)
    assert main(["data", "describe", str(mix), "--json"]) == 0
    one = json.loads(capsys.readouterr().out)["sources"]["sounds"]["media"]
    assert (one["items"], one["frames"]["100%"]) == (18, frames[-1])
    assert main(["data", "describe", str(mix)]) == 0
    assert "frames 90%" in capsys.readouterr().out
    sizes = tmp_path / "sizes.txt"
    words = ("--steps", "1", "--global-batch-size", "10", "--seq-length", "200")
    assert main(["data", "plan", str(mix), *words, "--items", str(sizes)]) == 0
    assert "sizes of" in capsys.readouterr().out
    lines = sizes.read_text().splitlines()
    assert {tuple(map(int, line.split())) for line in lines} <= {(1, one) for one in frames}
    flags = ["--items", str(sizes), "--ranks", "2", "--encoder", "qwen2-audio"]
    assert main(["plan", *flags]) == 0
    assert capsys.readouterr().out.startswith(f"{len(lines)} sounds: ")
