"""Rows with pictures in all forms become the same documents, or are refused in a sentence."""

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_hdp.data import TokenFile
from megatron_hdp.data.chat import BadConversationError, MediaConversations
from megatron_hdp.data.media import (
    INLINE_SUFFIX,
    Items,
    ItemSize,
    MediaFiles,
    PictureSettings,
    StoredPicture,
)
from megatron_hdp.data.spans import Spans
from megatron_hdp.data.spec import MediaSpec
from megatron_hdp.data.tokenizers import build_tokenizer
from tests.data.chat import tiny_tokenizer
from tests.data.media import sources
from tests.data.media.sources import llava, name, parts, picture
from tests.data.prepare.corpora import run

pytest.importorskip("jinja2", reason="pip install 'megatron-hdp[data]'")
pytest.importorskip("transformers", reason="pip install 'megatron-hdp[tokenizers]'")

QWEN = MediaSpec(encoder="qwen3-vl", least_pixels=1, most_pixels=40_000)
LLAVA = MediaSpec(encoder="clip-l-336")
START, END = "<|im_start|>", "<|im_end|>\n"
SEEN = "<|vision_start|><|image_pad|><|vision_end|>"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    sources.write_pictures(tmp_path, 4)
    return tmp_path


def conversations(folder: Path, media: MediaSpec = QWEN) -> MediaConversations:
    return MediaConversations(
        build_tokenizer(sources.tokenizer(folder)), media, str(folder), "chatml"
    )


def written(folder: Path, row: Any, media: MediaSpec = QWEN) -> str:
    made = conversations(folder, media)
    (found,) = made.render(row, str(folder / "x.jsonl"), 0)
    assert len(found.items) == len(found.item_tokens)
    trained = np.zeros(len(found.ids), dtype=bool)
    for start, stop in found.spans:
        trained[start:stop] = True
    assert not trained[list(found.item_tokens)].any() and trained.any()
    return tiny_tokenizer.text_of(made._tokenizer, found.ids)


def asked(question: str) -> str:
    return f"{START}user\n{question}{END}{START}assistant\na chart{END}"


@pytest.mark.parametrize(
    "row",
    [
        llava("<image>\nwhat?<image>", [0, 1]),
        {**llava("<image>\nwhat?<image>", []), "images": [name(0), {"path": name(1)}]},
        parts(0, "\nwhat?", 1),
        {"messages": json.dumps(parts(0, "\nwhat?", 1)["messages"])},
        {**parts("<image>\nwhat?", 1), "images": [name(0)]},
    ],
)
def test_pictures_are_written_where_a_row_has_them(folder: Path, row: dict[str, Any]) -> None:
    assert written(folder, row) == asked(f"{SEEN}\nwhat?{SEEN}")


def test_parts_of_openai_and_parts_without_a_name(folder: Path) -> None:
    row = parts("what?", 0)
    row["messages"][0]["content"][1] = {"type": "image_url", "image_url": {"url": name(0)}}
    assert written(folder, row) == asked(f"what?{SEEN}")
    row["messages"][0]["content"][1] = {"type": "image"}
    assert written(folder, row | {"images": [name(3)]}) == asked(f"what?{SEEN}")


def test_llava_writes_its_own_mark(folder: Path) -> None:
    assert written(folder, llava("<image>\nwhat?", [0]), LLAVA) == asked("<image>\nwhat?")
    assert written(folder, parts(0, "what?"), LLAVA) == asked("<image>\nwhat?")


def test_interleaved_documents_are_trained_but_for_their_pictures(folder: Path) -> None:
    obelics = {"texts": ["one ", None, " two"], "images": [None, name(0), None]}
    assert written(folder, obelics) == f"one {SEEN} two</s>"
    mmc4 = {
        "text_list": ["one", "two"],
        "image_info": [{"image_name": name(1), "matched_text_index": 1}],
    }
    assert written(folder, mmc4) == f"one {SEEN} two</s>"


def test_an_answer_may_hold_a_picture_that_is_not_predicted(folder: Path) -> None:
    row = llava("draw", [0], answer="here <image> it is")
    assert SEEN in written(folder, row)


def part_of(raw: bytes) -> dict[str, Any]:
    url = f"data:image/png;base64,{base64.b64encode(raw).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def with_part(part: dict[str, Any]) -> dict[str, Any]:
    row = parts("what?")
    row["messages"][0]["content"].append(part)
    return row


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (llava("<image> what?", []), "1 <image> in its texts and 0 pictures"),
        (llava("what?", [0]), "0 <image> in its texts and 1 pictures"),
        (llava("<image>", [9]), "no picture .*9.jpg, expected it there"),
        (parts("<|image_pad|>", 0), r"2 <\|image_pad\|> among its tokens and 1 pictures"),
        ({"texts": ["a"], "images": []}, "1 `texts` and 0 `images`"),
        (llava("<image>", [0]) | {"audio": "a.wav"}, "`audio`"),
        (
            with_part({"type": "video", "video": ["a.png"]}),
            "a part `video`, expected text or a picture: .*media: kind",
        ),
        (llava("<image>", []) | {"image": "https://x/y.jpg"}, "begins with https:"),
        (llava("<image>", []) | {"image": "x.jsonl"}, "no picture with a whole header"),
        (llava("<image>", []) | {"image": 3}, "found 3 as a picture"),
        (llava("<image>", []) | {"image": "data:,x"}, "found 'data:,x' .* its bytes in base64"),
        (llava("<image>", []) | {"image": {"data": "*"}}, "found .* as a picture, .* in base64"),
        (with_part(part_of(b"none")), "its picture: found no picture"),
    ],
)
def test_what_does_not_agree_is_refused(folder: Path, row: dict[str, Any], words: str) -> None:
    (folder / "x.jsonl").write_text("{}\n")
    with pytest.raises(BadConversationError, match=words):
        conversations(folder).render(row, str(folder / "x.jsonl"), 0)


def test_a_placeholder_must_be_one_token(folder: Path) -> None:
    media = MediaSpec(encoder="qwen3-vl", placeholder="<picture>")
    with pytest.raises(ValueError, match=r"<picture> becomes \d tokens, expected one"):
        conversations(folder, media)


FORMS = ("lines", "inline", "parquet", "arrow", "tar")
ROWS = [
    ("<image>\nwhat?", [0], "a chart"),
    ("no picture", [], "none"),
    ("<image><image> which?", [1, 2], "both"),
    ("<image>", [3], "a line"),
    ("and <image>?", [0], "the first"),
]


def write(folder: Path, form: str) -> Path:
    if form in ("parquet", "arrow"):
        return sources.write_table(folder / f"x.{form}", ROWS)
    rows = [llava(*row) for row in ROWS]
    if form == "inline":  # the last row names a file
        rows = [*(with_inline_pictures(*row) for row in ROWS[:-1]), rows[-1]]
    if form == "tar":
        kept = [(numbers, row) for (_, numbers, _), row in zip(ROWS, rows, strict=True)]
        return sources.write_tar(folder / "x.tar", kept)
    return sources.write_lines(folder / "x.jsonl", rows)


def with_inline_pictures(question: str, numbers: list[int], answer: str) -> dict[str, Any]:
    """As OpenAI has them: pictures as ``data:`` URLs."""
    row, shown = parts(question, answer=answer), iter(numbers)
    content: list[dict[str, Any]] = []
    first, *others = question.split("<image>")
    for text in (first, *others):
        if content:
            content.append(part_of(picture(next(shown))))
        content.append({"type": "text", "text": text})
    row["messages"][0]["content"] = content
    return row


@pytest.mark.parametrize("form", FORMS)
def test_prepared_pictures_are_found_again(folder: Path, form: str) -> None:
    options = {
        "tokenizer": sources.tokenizer(folder),
        "format": "chat",
        "template": "chatml",
        "media": QWEN,
        "shard_bytes": 300,
    }
    found = run(write(folder, form), folder / "cache", **options)
    items, settings = Items.beside(found.prefix), PictureSettings.of(QWEN)
    assert items is not None and len(items) == found.documents == len(ROWS)
    assert len(Spans(f"{found.prefix}.spans")) == len(ROWS)
    tokens = TokenFile(found.prefix)
    inline = found.prefix + INLINE_SUFFIX
    assert Path(inline).exists() == (form == "inline")
    files = MediaFiles(str(folder), settings, inline)
    for document, (_, numbers, _) in enumerate(ROWS):
        of_document = items.of(document)
        assert len(of_document) == len(numbers)
        for item, number in zip(of_document, numbers, strict=True):
            place = (items.name(int(item["file"])), int(item["offset"]), int(item["size"]))
            assert files.raw(*place) == picture(number)
            sides = int(item["height"]), int(item["width"])
            assert sides == sources.SIDES[number]
            stored = StoredPicture(files, place, ItemSize(*sides))
            assert stored.values.shape == np.asarray(stored.values).shape
            at = int(item["token"])
            (token,) = tokens.read(document, at, at + 1)
            assert tiny_tokenizer.text_of(build_tokenizer(options["tokenizer"]), [token]) == (
                settings.placeholder
            )


def test_captions_of_a_tar(folder: Path) -> None:
    path = sources.write_tar(folder / "x.tar", [([0], "a chart"), ([1, 2], "two")])
    options = {"tokenizer": sources.tokenizer(folder), "format": "chat", "template": "chatml"}
    found = run(path, folder / "cache", media=QWEN, **options)
    items = Items.beside(found.prefix)
    assert items is not None and np.diff(items.first).tolist() == [1, 2]


def test_workers_and_shards_make_the_same(folder: Path) -> None:
    rows = [llava("<image>\nwhat?", [i % 4], f"chart {i}") for i in range(40)]
    path = sources.write_lines(folder / "x.jsonl", rows)
    options = {"tokenizer": sources.tokenizer(folder), "format": "chat", "template": "chatml"}
    options |= {"media": QWEN}
    made = [run(path, folder / f"cache{n}", shard_bytes=n, **options).prefix for n in (1500, 10**9)]
    few, one = (Items.beside(prefix) for prefix in made)
    assert few is not None and one is not None
    assert few.first.tolist() == one.first.tolist()
    for a, b in zip(few.records, one.records, strict=True):
        assert few.name(a["file"]) == one.name(b["file"])
        assert a[["offset", "size", "token"]] == b[["offset", "size", "token"]]


def test_missing_pictures_are_bad_rows_and_are_looked_for_again(folder: Path) -> None:
    path = sources.write_lines(folder / "x.jsonl", [llava("<image>", [i]) for i in (0, 1, 7)])
    options = {"tokenizer": sources.tokenizer(folder), "format": "chat", "template": "chatml"}
    options |= {"media": QWEN, "bad_limit": 0.1}
    with pytest.raises(ValueError, match=r"1 of 3 documents are bad .*line 3: no picture"):
        run(path, folder / "cache", **options)
    (folder / name(7)).write_bytes(picture(7))
    assert run(path, folder / "cache", **options).documents == 3


def test_damaged_items_are_refused(folder: Path) -> None:
    path = sources.write_lines(folder / "x.jsonl", [llava("<image>", [0])])
    options = {"tokenizer": sources.tokenizer(folder), "format": "chat", "template": "chatml"}
    found = run(path, folder / "cache", media=QWEN, **options)
    items = Path(found.prefix + ".items")
    raw = bytearray(items.read_bytes())
    raw[4096 + 20] ^= 1
    items.chmod(0o644)
    items.write_bytes(raw)
    with pytest.raises(ValueError, match="other bytes than were written"):
        Items.beside(found.prefix)
    assert json.loads(Path(found.manifest).read_text())["format"] == "chat"
