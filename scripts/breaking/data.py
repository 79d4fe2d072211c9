"""Data: a line of 100 MB, frames of zstd, masks, and caches damaged a byte at a time."""

import gzip
import json
import os
import random
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from breaking.rows import Try, command, refused, row
from breaking.sources import OPENING, Piece, chats, drawn, texts, write_lines
from megatron_hdp.data.mixture import Opening

_TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content|trim }}"
    "{% if m.role == 'assistant' %}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
_PLACES = 40  # damaged in a file of a cache


@row("data", 600)
def lines_of_100_mb(folder: Path) -> Iterator[Try]:
    """Plain, compressed, drawn on the fly, and cut."""
    import pyarrow

    text = "wörd " * (100 * 2**20 // 6)
    line = json.dumps({"text": text}, ensure_ascii=False).encode()
    raw = b'{"text": "before"}\n' + line + b'\n{"text": "after"}\n'
    packed = {
        "x.jsonl": raw,
        "x.jsonl.gz": gzip.compress(raw, 1),
        "x.jsonl.zst": pyarrow.compress(raw, "zstd", asbytes=True),
    }
    num_tokens = len(text.encode()) + len("beforeafter") + 3
    data = folder / "d.yaml"
    for name, content in packed.items():
        (folder / name).write_bytes(content)
        data.write_text(f"sources: {{a: {{path: {name}}}}}")
        code, said = command("data", "prepare", data, "--workers", 2)
        yield f"prepare {name}", code == 0 and f"{num_tokens:,}" in said, said[-200:]
    data.write_text("sources: {a: {path: x.jsonl, tokenise: on-the-fly}}")
    longest = max(len(tokens) for _, tokens, _ in drawn(data, 1))
    yield "on the fly", longest == 256, f"{longest} tokens"
    (folder / "x.jsonl").write_bytes(line[:-2])
    data.write_text("sources: {a: {path: x.jsonl}}")
    code, said = command("data", "prepare", data)
    yield (
        "a long line that is cut",
        code == 2 and "line 1" in said and len(said) < 2000,
        said[-150:],
    )


@row("data")
def arrays_of_records(folder: Path) -> Iterator[Try]:
    """A `.json` that is one array is refused, however it is asked for, as no lines of it."""
    data, array = folder / "d.yaml", folder / "x.json"
    contents = {"in a line": json.dumps(texts(9)), "indented": json.dumps(texts(9), indent=1)}
    ways = ("", ", key: text", ", tokenise: on-the-fly", ", format: text")
    for name, content in contents.items():
        array.write_text(content)
        for keys in ways:
            data.write_text(f"sources: {{a: {{path: {array.name}{keys}}}}}")
            told = [array.name, "array", "jsonl"]
            yield from refused(f"{name}{keys}, describe", "data", "describe", data, told=told)
            if "fly" not in keys:
                yield from refused(f"{name}{keys}, prepare", "data", "prepare", data, told=told)
        source = ("--input", array, "--output-prefix", folder / "pair")
        words = ("preprocess", "--tokenizer", "byte", *source)
        yield from refused(f"{name}, preprocess", *words, told=told)


@row("data", 300)
def frames_of_zstd(folder: Path) -> Iterator[Try]:
    """Several in a file, with skippable ones between, and cut anywhere."""
    import pyarrow

    frames = [
        pyarrow.compress(b'{"text": "%d"}\n' % i * 50, "zstd", asbytes=True) for i in range(50)
    ]
    path, data = folder / "x.jsonl.zst", folder / "d.yaml"
    data.write_text(f"sources: {{a: {{path: {path.name}}}}}")

    def prepared(content: bytes) -> tuple[int, str]:
        path.write_bytes(content)
        return command("data", "prepare", data, "--workers", 1)

    for count in (1, 2, 50):
        for between in (b"", b"\x50\x2a\x4d\x18\x04\0\0\0abcd"):
            code, said = prepared(between.join(frames[:count]) + between)
            what = f"{count} frames, {len(between)} bytes between"
            yield what, code == 0 and f"{count * 50:,}" in said, said[-100:]
    whole = b"".join(frames[:3])
    ends = {len(b"".join(frames[:count])) for count in range(4)}
    for cut in range(1, len(whole)):
        code, said = prepared(whole[:cut])
        held = code == 0 if cut in ends else code != 0 and "whole zstd" in said
        yield f"cut at {cut}", held, said[-100:]


@row("data", 300)
def masks_ahead_and_on_the_fly(folder: Path) -> Iterator[Try]:
    """Conversations give the same tokens and masks both ways, with bad rows and without."""
    (folder / "t.jinja").write_text(_TEMPLATE)
    ahead, live = folder / "a.yaml", folder / "b.yaml"

    def both(keys: str, steps: int) -> tuple[list[Piece], list[Piece]]:
        keys = f"path: chat.jsonl, format: chat, {keys}"
        ahead.write_text(f"sources: {{c: {{{keys}, long-sequence: truncate}}}}")
        live.write_text(f"sources: {{c: {{{keys}, tokenise: on-the-fly}}}}")
        return drawn(ahead, steps), drawn(live, steps)

    templates = {
        "": ("assistant", "last", "all"),
        "template: t.jinja, ": ("assistant", "last", "all"),
        "template: megatron:identity, ": ("assistant",),
    }
    every = [(template, train) for template, trains in templates.items() for train in trains]
    write_lines(folder / "chat.jsonl", chats(150, 3))
    for template, train in every:
        keys = f"bad-limit: 1.0, max-epochs: 1, {template}train-on: {train}"
        first, second = both(keys, 10**6)
        held = sorted(first) == sorted(second) and len(second) > 50
        yield f"with bad rows, {template}{train}", held, f"{len(first)} and {len(second)}"
    good = [one for one in chats(150, 4) if all(m.get("weight", 1) for m in one["messages"])]
    write_lines(folder / "chat.jsonl", good)
    for template, train in every[:-1]:
        first, second = both(f"{template}train-on: {train}", 8)
        yield f"without bad rows, {template}{train}", first == second, ""


@row("data", 900)
def damaged_caches(folder: Path) -> Iterator[Try]:
    """Of every file of every cache one bit is turned, or it is cut: refused, or the same tokens."""
    write_lines(folder / "chat.jsonl", chats(60, 5))
    write_lines(folder / "text.jsonl", texts(200))
    data, cache, whole = folder / "d.yaml", folder / "cache", folder / "whole"
    data.write_text(
        "sources:\n"
        "  c: {path: chat.jsonl, format: chat, bad-limit: 0.9, long-sequence: truncate}\n"
        "  t: {path: text.jsonl, long-sequence: truncate}\n"
        "  l: {path: text.jsonl, tokenise: on-the-fly}\n"
    )
    opening = replace(OPENING, cache_folder=cache)
    expected = drawn(data, 4, opening)
    shutil.copytree(cache, whole)
    draw = random.Random(1)
    for path in sorted(whole.iterdir()):
        size = path.stat().st_size
        places = range(size) if size <= _PLACES else sorted(draw.sample(range(size), _PLACES))
        changes: list[tuple[str, int]] = [("byte", place) for place in places]
        changes += [("cut to", cut) for cut in (0, size // 2, max(size - 1, 0))]
        for how, place in changes:
            shutil.rmtree(cache)
            shutil.copytree(whole, cache)
            damaged = cache / path.name
            if how == "byte":
                raw = bytearray(damaged.read_bytes())
                raw[place] ^= 1 << draw.randrange(8)
                damaged.write_bytes(raw)
            else:
                os.truncate(damaged, place)
            yield _same_or_refused(f"{path.suffix} {how} {place}", path, data, opening, expected)


def _same_or_refused(
    what: str, path: Path, data: Path, opening: Opening, expected: list[Piece]
) -> Try:
    try:
        found = drawn(data, 4, opening)
    except (ValueError, OSError) as error:
        return what, path.stem in str(error) or "source" in str(error), f"{error}"[:150]
    except Exception as error:  # a defect: the row tells it and continues
        return what, False, f"{type(error).__name__}: {error}"[:150]
    held = found == expected
    return what, held, "" if held else "other sequences, and nothing was said"
