"""``megatron-hdp data`` on sources with pictures: counted by their sizes, none decoded."""

import json
from pathlib import Path

import numpy as np
import pytest

from megatron_hdp.cli.main import main
from megatron_hdp.data.media import pictures
from megatron_hdp.media import ENCODERS
from megatron_hdp.megatron.step import loading, open_split, split_specs
from tests.data.media import sources
from tests.data.media.sources import llava
from tests.support.own_loop import arguments_of

pytest.importorskip("jinja2", reason="pip install 'megatron-hdp[data]'")
pytest.importorskip("transformers", reason="pip install 'megatron-hdp[tokenizers]'")

ROWS = [llava("<image> what?", [i % 4], "it is " + "a" * i) for i in range(8)]
FILE = """
sources:
  pictures:
    path: x.jsonl
    format: chat
    template: chatml
    tokenizer: hf:hf
    media: {encoder: qwen3-vl, least-pixels: 1}
"""


@pytest.fixture
def mix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    def refuse(*_: object) -> None:
        raise AssertionError("a picture was decoded")

    monkeypatch.setattr(pictures, "cut", refuse)
    sources.write_pictures(tmp_path, 4)
    sources.write_lines(tmp_path / "x.jsonl", ROWS)
    sources.tokenizer(tmp_path)
    (tmp_path / "mix.yaml").write_text(FILE)
    return tmp_path / "mix.yaml"


def test_describe(mix: Path, capsys: pytest.CaptureFixture[str]) -> None:
    encoder = ENCODERS["qwen3-vl"]
    patches = [(round(h / 32) * 2) * (round(w / 32) * 2) for h, w in sources.SIDES] * 2
    assert main(["data", "describe", str(mix), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["sources"]["pictures"]
    one = found["media"]
    assert (one["items"], one["rows"]) == (8, sum(patches) // 4)
    assert one["pixels"] == {"10%": 6144, "50%": 8100, "90%": 24000, "100%": 24000}
    linear, quadratic = encoder.flop()
    flop = sum(linear * n + quadratic * n * n for n in patches)
    assert one["encoder_flop"] == pytest.approx(flop)
    assert one["encoder_share_8b"] == pytest.approx(flop / (flop + 16e9 * found["tokens"]))
    assert main(["data", "describe", str(mix), "--max-length", "20"]) == 0
    lines = capsys.readouterr().out.splitlines()
    at = next(i for i, line in enumerate(lines) if "items" in line)
    assert 0 < int(lines[at + 1].split()[1]) < 8


def test_plan_and_prepare(mix: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "prepare", str(mix)]) == 0
    steps = ["--steps", "4", "--global-batch-size", "6"]
    assert main(["data", "plan", str(mix), *steps]) != 0
    assert "has media" in capsys.readouterr().err
    assert main(["data", "plan", str(mix), *steps, "--seq-length", "4096"]) == 0
    assert "24 sequences" in capsys.readouterr().out
    (prefix,) = mix.parent.glob("hdp-cache/*.items")
    text = f"sources:\n  p: {{path: {prefix.with_suffix('')}, format: tokens}}\n"
    mix.write_text(text)
    assert main(["data", "prepare", str(mix)]) == 0
    raw = np.fromfile(prefix, np.uint8)
    raw[4100] ^= 1
    prefix.chmod(0o644)
    raw.tofile(prefix)
    assert main(["data", "prepare", str(mix)]) != 0
    assert ".items has other bytes" in capsys.readouterr().err


def test_commands_that_train_text_refuse_pictures(
    mix: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "say", print)
    arguments = arguments_of(hdp_data=mix, data_path=None)
    with pytest.raises(ValueError, match="a source with pictures and nothing to encode them"):
        open_split(arguments, split_specs(arguments)["train"])


def test_plan(mix: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A step has each row once; its sizes are what ``plan --items`` takes."""
    words = ("--steps", "2", "--global-batch-size", "8", "--seq-length", "400")
    output, sizes = tmp_path / "plan.json", tmp_path / "sizes.txt"
    flags = (*words, "--output", str(output), "--items", str(sizes))
    assert main(["data", "plan", str(mix), *flags]) == 0
    text = capsys.readouterr().out
    rows = sum(round(h / 32) * round(w / 32) for h, w in sources.SIDES) * 2
    (phase,) = json.loads(output.read_text())["phases"]
    assert (phase["items"], phase["rows"]) == (16, 2 * rows)
    assert f"; 8.0 pictures a step of {rows:,} rows, {rows / phase['tokens'] * 2:.1%} of" in text
    drawn = sorted(tuple(map(int, line.split())) for line in sizes.read_text().splitlines())
    assert drawn == sorted(sources.SIDES * 4)
    assert main(["plan", "--items", str(sizes), "--ranks", "2"]) == 0
    assert capsys.readouterr().out.startswith("16 images and 0 videos: ")


def test_plan_of_text_has_no_sizes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.txt").write_text("some text\n" * 5)
    (tmp_path / "text.yaml").write_text("sources:\n  text: {path: x.txt, tokenizer: byte}\n")
    words = ("--steps", "1", "--global-batch-size", "1", "--items", str(tmp_path / "sizes.txt"))
    assert main(["data", "plan", str(tmp_path / "text.yaml"), *words]) == 2
    assert "found no source with media" in capsys.readouterr().err
    assert not (tmp_path / "sizes.txt").exists()
