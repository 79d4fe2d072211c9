"""Files of other users: what nobody may read is named; what another user made is left alone."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from breaking.rows import Try, command, row
from breaking.sources import chats, texts, write_lines

_NOBODY = 65534
_PAIR = "sources: {a: {path: pair/x}}"
_CHAT = "sources: {a: {path: chat.jsonl, format: chat, bad-limit: 0.9, template: t.jinja}}"
_CASES = {
    "text": ("sources: {a: {path: text.jsonl}}", "text.jsonl"),
    "on the fly": ("sources: {a: {path: text.jsonl, tokenise: on-the-fly}}", "text.jsonl"),
    "idx": (_PAIR, "pair/x.idx"),
    "bin": (_PAIR, "pair/x.bin"),
    "folder of a pair": (_PAIR, "pair"),
    "template": (_CHAT, "t.jinja"),
    "primitives": (f"{_PAIR}\nprimitives: {{mix: mine.py:mix}}", "mine.py"),
    "data file": (_PAIR, "d.yaml"),
}


@row("data", 300)
def files_of_other_users(folder: Path) -> Iterator[Try]:
    """As root: commands run as nobody, on files that root made."""
    if os.geteuid() != 0:
        yield "another user", False, "needs root, to become another user"
        return
    folder.chmod(0o777)
    write_lines(folder / "text.jsonl", texts(200))
    write_lines(folder / "chat.jsonl", chats(30, 5))
    (folder / "t.jinja").write_text("{% for m in messages %}{{ m.content }}</s>{% endfor %}")
    (folder / "mine.py").write_text("def mix(w, p, l):\n    return w\n")
    (folder / "pair").mkdir()
    prefix = folder / "pair" / "x"
    source = ("--input", folder / "text.jsonl", "--output-prefix", prefix)
    command("preprocess", "--tokenizer", "byte", *source)
    for name, (content, file) in _CASES.items():
        for is_readable in (False, True):
            yield from _read_by_nobody(folder, name, content, folder / file, is_readable)
    yield from _caches_of_root(folder)


def _read_by_nobody(
    folder: Path, name: str, content: str, file: Path, is_readable: bool
) -> Iterator[Try]:
    data, cache = folder / "d.yaml", folder / "hdp-cache"
    shutil.rmtree(cache, ignore_errors=True)
    data.write_text(content)
    before = file.stat().st_mode
    if not is_readable:
        file.chmod(0)
    else:  # prepared: nobody may start workers of this interpreter
        command("data", "describe", data)
        for path in (cache, *cache.iterdir()) if cache.exists() else ():
            path.chmod(0o777)
    flags = ("--global-batch-size", 4, "--seq-length", 256, "--hdp-long-sequence", "truncate")
    for words in (("describe", data), ("plan", data, "--steps", 2, *flags)):
        code, said = _as_nobody("data", *words)
        held = code == 0
        if not is_readable and not (name == "primitives" and words[0] == "describe"):
            held = code == 2 and file.name in said and "Traceback" not in said
        what = f"{name}, {'readable' if is_readable else 'unreadable'}, {words[0]}"
        yield what, held, f"{code}: {said[-160:]}"
    file.chmod(before)


def _caches_of_root(folder: Path) -> Iterator[Try]:
    data, cache = folder / "d.yaml", folder / "hdp-cache"
    data.write_text(_CASES["text"][0])
    shutil.rmtree(cache, ignore_errors=True)
    command("data", "prepare", data)
    for path in (cache, *cache.iterdir()):
        path.chmod(0o555 if path.is_dir() else 0o444)
    code, said = _as_nobody("data", "describe", data)
    yield "a whole cache, read-only", code == 0, said[-160:]
    for path in cache.glob("*.json"):
        path.unlink()
    code, said = _as_nobody("data", "describe", data)
    held = code in (1, 2) and "hdp-cache" in said and "Traceback" not in said
    yield "a cache without its manifest", held, f"{code}: {said[-200:]}"
    cache.chmod(0o777)
    code, said = _as_nobody("data", "describe", data)
    yield "a lock's file", code in (0, 1, 2) and "Traceback" not in said, f"{code}: {said[-200:]}"


def _as_nobody(*words: object) -> tuple[int, str]:
    """What a command says in a process of another user, which already has its modules."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        code = 99
        try:
            os.setgroups([])
            os.setgid(_NOBODY)
            os.setuid(_NOBODY)
            code, said = command(*words)
        except BaseException as error:
            said = f"Traceback {type(error).__name__}: {error}"
        os.write(writer, said[-3000:].encode())
        os._exit(code)
    os.close(writer)
    with os.fdopen(reader, errors="replace") as stream:
        said = stream.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), said
