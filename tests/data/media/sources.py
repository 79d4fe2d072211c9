"""Sources with drawn pictures, in all forms of rows."""

import io
import json
import tarfile
from pathlib import Path
from typing import Any

from tests.data.chat import tiny_tokenizer
from tests.data.media.drawn import drawn, saved

TOKENS = ("<image>", "<|image_pad|>", "<|vision_start|>", "<|vision_end|>")
OF_SOUNDS = ("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>")
SIDES = [(64, 96), (200, 120), (90, 90), (300, 56)]
"""Height and width of picture 0, 1, ..."""
KINDS = ("jpeg", "png", "webp", "progressive")


def picture(number: int) -> bytes:
    height, width = SIDES[number % len(SIDES)]
    return saved(drawn(height, width, number), KINDS[number % len(KINDS)])


def name(number: int) -> str:
    return f"pictures/{number}.jpg"


def tokenizer(folder: Path, tokens: tuple[str, ...] = TOKENS) -> str:
    return tiny_tokenizer.write(folder / "hf", special=(*tiny_tokenizer.SPECIAL, *tokens))


def write_pictures(folder: Path, count: int) -> None:
    (folder / "pictures").mkdir()
    for number in range(count):
        (folder / name(number)).write_bytes(picture(number))


def write_lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def llava(question: str, numbers: list[int], answer: str = "a chart") -> dict[str, Any]:
    """``image``, one or several, and ``<image>`` in texts."""
    names = [name(one) for one in numbers]
    turns = [("human", question), ("gpt", answer)]
    found: dict[str, Any] = {"conversations": [{"from": a, "value": b} for a, b in turns]}
    return found | ({"image": names[0] if len(names) == 1 else names} if names else {})


def parts(*content: str | int, answer: str = "a chart") -> dict[str, Any]:
    """Contents in parts, whose numbers are pictures."""
    found = [
        {"type": "text", "text": one}
        if isinstance(one, str)
        else {"type": "image", "image": name(one)}
        for one in content
    ]
    return {
        "messages": [
            {"role": "user", "content": found},
            {"role": "assistant", "content": answer},
        ]
    }


def write_table(path: Path, rows: list[tuple[str, list[int], str]]) -> Path:
    """Questions, pictures and answers, the pictures' bytes in the table; two rows a part."""
    import pyarrow
    import pyarrow.parquet

    table = [
        {
            "messages": [
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer},
            ],
            "images": [{"bytes": picture(one), "path": None} for one in numbers],
        }
        for question, numbers, answer in rows
    ]
    found = pyarrow.Table.from_pylist(table)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(found, path, row_group_size=2)
    else:
        with pyarrow.ipc.new_stream(path, found.schema) as stream:
            stream.write_table(found, max_chunksize=2)
    return path


def write_tar(path: Path, rows: list[tuple[list[int], Any]]) -> Path:
    """Pictures and a caption, or the object of a json."""
    with tarfile.open(path, "w") as tar:
        for row, (numbers, about) in enumerate(rows):
            members = [(f"{row:04d}.{i}.jpg", picture(one)) for i, one in enumerate(numbers)]
            is_text = isinstance(about, str)
            text = about if is_text else json.dumps(about)
            members.append((f"{row:04d}.{'txt' if is_text else 'json'}", text.encode()))
            for member, raw in members:
                info = tarfile.TarInfo(member)
                info.size = len(raw)
                tar.addfile(info, io.BytesIO(raw))
    return path


MIXTURE = """
sources:
  pictures:
    path: x.jsonl
    format: chat
    template: chatml
    tokenizer: hf:hf
    media: {encoder: qwen3-vl, least-pixels: 1, most-pixels: 9000}
  text: {path: x.txt, tokenizer: hf:hf}
"""
ROWS = [llava("<image> what?<image>", [i % 4, (i + 1) % 4], "it is " + "a" * i) for i in range(9)]


def write_mixture(folder: Path, text: str) -> Path:
    """Conversations with pictures and a text, as a file of --hdp-data."""
    write_pictures(folder, 4)
    write_lines(folder / "x.jsonl", ROWS)
    tokenizer(folder)
    (folder / "x.txt").write_text(text)
    (folder / "mix.yaml").write_text(MIXTURE)
    return folder / "mix.yaml"
