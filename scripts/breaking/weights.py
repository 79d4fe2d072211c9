"""Conversions and their checkpoints: killed, damaged, with code in them, on full disks."""

import hashlib
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from breaking.rows import Try, command, row

_FAMILIES = ("llama3", "qwen3", "qwen3-moe", "gpt-oss", "deepseek")
_OF_A_PLACE = (".metadata", "checksums.json", "model.yaml")  # they hold a time or a path
_KILLS, _DAMAGES = 12, 40


def _sums(folder: Path) -> dict[str, str]:
    """Checksums of a folder's files."""
    files = [one for one in sorted(folder.rglob("*")) if one.is_file()]
    return {
        str(one.relative_to(folder)): hashlib.md5(one.read_bytes()).hexdigest()
        for one in files
        if one.name not in _OF_A_PLACE
    }


def _converted(folder: Path, name: str = "qwen3") -> dict[str, tuple[object, ...]]:
    """A model and its conversion: what precedes the target, there and back."""
    from tests.convert.models import save_model

    model, weights = save_model(name, folder / "model"), folder / "weights"
    code, said = command("convert", "--from-hf", model, "--to", weights)
    assert code == 0, said
    return {
        "there": ("convert", "--from-hf", model, "--to"),
        "back": ("convert", "--from", weights, "--to-hf"),
    }


@row("convert", 400)
def conversions_killed(folder: Path) -> Iterator[Try]:
    """SIGKILL at a random moment, and the same command again: the files are those of no kill."""
    draw = random.Random(3)
    for way, words in _converted(folder).items():
        whole = folder / f"{way}-whole"
        command(*words, whole)
        expected = _sums(whole)
        for number in range(_KILLS // 2):
            target = folder / f"{way}-{number}"
            argv = [sys.executable, "-m", "megatron_hdp.cli.main", *map(str, (*words, target))]
            run = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            partial = target.with_name(f"{target.name}.partial")
            while run.poll() is None and not partial.exists():
                time.sleep(0.002)
            time.sleep(draw.random() * 0.15)
            run.send_signal(signal.SIGKILL)
            run.wait()
            code, said = (0, "done before") if target.exists() else command(*words, target)
            yield f"{way}, kill {number}", code == 0 and _sums(target) == expected, said[-160:]


@row("convert", 400)
def checkpoints_damaged(folder: Path) -> Iterator[Try]:
    """One bit of one file: verify names it; convert refuses it, or gives the same files."""
    back, weights = _converted(folder)["back"], folder / "weights"
    command(*back, folder / "good")
    expected = _sums(folder / "good")
    draw = random.Random(5)
    for number in range(_DAMAGES):
        with_sums = number % 2 == 0
        copy, made = folder / "copy", folder / "made"
        shutil.copytree(weights, copy)
        if not with_sums:
            (copy / "release" / "checksums.json").unlink()
        path = draw.choice(sorted((copy / "release").iterdir()))
        content = bytearray(path.read_bytes())
        place = draw.randrange(len(content))
        content[place] ^= 1 << draw.randrange(8)
        path.write_bytes(content)
        verdict, _ = command("verify", copy)
        code, said = command("convert", "--from", copy, "--to-hf", made)
        held = code == 2 or (code == 0 and _sums(made) == expected)
        held = held and verdict in ((1,) if with_sums else (0, 1, 2))
        for left in (copy, made, folder / "made.partial"):
            shutil.rmtree(left, ignore_errors=True)
        sums = "with" if with_sums else "without"
        note = f"verify {verdict}, convert {code}: {said[-90:]}"
        yield f"byte {place} of {path.name}, {sums} checksums", held, note


@row("convert", 120)
def code_in_checkpoints(folder: Path) -> Iterator[Try]:
    """A list of tensors that would run code when it is read."""
    from megatron_hdp.megatron.checkpoint import checksums

    ran = folder / "ran"

    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return os.mkdir, (str(ran),)

    _converted(folder)
    for with_sums in (True, False):
        copy = folder / f"evil-{with_sums}"
        shutil.copytree(folder / "weights", copy)
        release = copy / "release"
        kept = checksums.read_sums(release) or {}
        (release / ".metadata").write_bytes(pickle.dumps(Evil()))
        (release / "checksums.json").unlink()
        if with_sums:
            sums = checksums.FileSum.of_file(release / ".metadata")
            checksums.merge(release, [kept | {".metadata": sums}])
        for words in (("verify", copy), ("convert", "--from", copy, "--to-hf", folder / "x")):
            code, said = command(*words)
            held = not ran.exists() and code == (1 if words[0] == "verify" else 2)
            sums_too = "with" if with_sums else "without"
            yield f"{words[0]}, {sums_too} checksums", held, f"{code}: {said[-110:]}"


@row("convert", 400)
def conversions_on_full_disks(folder: Path) -> Iterator[Try]:
    """As root: a disk of each size gives one sentence and nothing whole, then it resumes."""
    ways, disk = _converted(folder), folder / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", disk], check=True)

    def resize(size: str) -> None:
        subprocess.run(["mount", "-o", f"remount,size={size}", disk], check=True)

    try:
        for way, words in ways.items():
            for kib in range(12, 260, 12):
                for left in disk.iterdir():
                    shutil.rmtree(left)
                resize(f"{kib}k")
                code, said = command(*words, disk / "w")
                held = code == 0 or (
                    code == 2 and "bytes free" in said and not (disk / "w").exists()
                )
                resize("4m")
                again = 0 if code == 0 else command(*words, disk / "w")[0]
                yield f"{way} on {kib} KiB", held and again == 0, f"{code}, {again}: {said[-100:]}"
    finally:
        subprocess.run(["umount", disk], check=True)


@row("convert", 120)
def targets_that_cannot_be_made(folder: Path) -> Iterator[Try]:
    """As root: a file, a link, a read-only disk, a long name, a device."""
    ways, disk = _converted(folder), folder / "disk"
    (folder / "file").write_text("mine")
    (folder / "link").symlink_to(folder / "nowhere")
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "ro,size=1m", "tmpfs", disk], check=True)
    try:
        for name in ("file", "file/below", "link", "disk/w", "long" * 80, "/proc/w", "/dev/null"):
            for way, words in ways.items():
                code, said = command(*words, folder / name)
                held = code == 2 and "expected" in said
                yield f"{way} to {name[:20]}", held, f"{code}: {said[-120:]}"
    finally:
        subprocess.run(["umount", disk], check=True)
    yield "the file", (folder / "file").read_text() == "mine", ""


@row("convert", 400)
def losses_there_and_back(folder: Path) -> Iterator[Try]:
    """Of transformers, of each family, before and after."""
    import torch
    import transformers

    ids = torch.randint(0, 300, (1, 40), generator=torch.Generator().manual_seed(1))
    for name in _FAMILIES:
        place = folder / name
        place.mkdir()
        code, _ = command(*_converted(place, name)["back"], place / "back")
        losses = []
        for one in (place / "model", place / "back"):
            loaded = transformers.AutoModelForCausalLM.from_pretrained(one, dtype=torch.float32)
            with torch.no_grad():
                losses.append(loaded(ids, labels=ids).loss.item())
        yield name, code == 0 and losses[0] == losses[1], f"{losses}"
