"""Nonsense for ``check``, ``plan``, ``simulate`` and ``profile``, and outputs that are no files."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from breaking.rows import Try, command, refused, row

_CONFIG = Path(__file__).parents[2] / "configs" / "tiny-cpu.yaml"
_KEYS = (
    *("num-layers", "hidden-size", "num-attention-heads", "seq-length", "hdp-tokens-per-rank"),
    *("lr", "train-iters", "global-batch-size", "ffn-hidden-size", "hdp-slice-multiple"),
    *("pipeline-model-parallel-size", "tensor-model-parallel-size", "kv-channels"),
)
_VALUES = ("-1", "0", "1.5", ".nan", ".inf", "abc", "[1, 2]", "{a: 1}", "1e400", "9" * 40, "''")
_FINE = {("lr", "0"), ("lr", "1.5"), ("hidden-size", "0")}
"""What may be meant so: a learning rate of 0, or one above 1."""
_FILES = {
    "empty": b"",
    "binary": b"\x7fELF\0\x01\xff\xfe" * 40,
    "not utf-8": b"num-layers: \xff\n",
    "utf-16": "num-layers: 2\n".encode("utf-16"),
    "no mapping": b"- 1\n- 2\n",
    "a text": b"hello\n",
    "a number": b"7\n",
    "twice the same key": b"num-layers: 2\nnum-layers: 4\n",
    "both spellings of a key": b"num-layers: 2\nnum_layers: 4\n",
    "an anchor in itself": b"a: &a\n  b: *a\n",
    "a list in itself": b"num-layers: &a [*a]\n",
    "a bomb of anchors": b"a: &a [1,1,1,1,1,1,1,1,1]\n"
    + b"".join(
        f"{n}: &{n} [{', '.join(['*' + p] * 9)}]\n".encode()
        for p, n in zip("abcdefgh", "bcdefghi", strict=True)
    ),
    "an anchor that nobody set": b"num-layers: *a\n",
    "a tag of Python": b"num-layers: !!python/object/apply:os.getpid []\n",
    "a tag": b"num-layers: !thing 2\n",
    "tabs": b"num-layers:\n\t- 2\n",
    "an open quote": b"num-layers: '2\n",
    "an open bracket": b"[" * 5000,
    "two documents": b"num-layers: 2\n---\nnum-layers: 4\n",
    "a zero byte": b"num-layers: 2\0\n",
    "a key of another type": b"2: num-layers\n",
    "a null key": b"~: 2\n",
    "a null value": b"num-layers:\n",
    "an unknown key": b"num-layer: 2\n",
    "a long key": b"a" * 100_000 + b": 2\n",
    "a date": b"num-layers: 2026-01-01\n",
    "a config in itself": b"config: bad.yaml\n",
}
_FLAGS = (
    *("--gpus 0", "--gpus -1", "--gpus 1.5", "--gpus nan", "--gpus 9999999999", "--gpus 3"),
    *("--gpus 4 --gpu-memory 0GB", "--gpus 4 --gpu-memory -1GB", "--gpus 4 --gpu-memory nanGB"),
    *("--gpus 4 --gpu-memory 80", "--gpus 4 --gpu-memory 1e3GB", "--gpus 4 --host-memory x"),
    *("--gpus 4 --preset x", "--gpus 4 --vocab-size 0", "--gpus 4 --gpus-per-node 0"),
    *("--gpus 4 --vocab-size 99999999999", "--gpus", "", "--gpus 4 --nonsense", "--gpus 4 ''"),
)
_TOGETHER = (
    "num-attention-heads: 7",
    "num-query-groups: 3",
    "hidden-size: 63",
    "tensor-model-parallel-size: 3",
    "pipeline-model-parallel-size: 3",
    "hdp-strategy: fastest",
    "hdp-cost-model: gone.json",
    "hdp-cost-model: .",
    "hdp-rank-speeds: gone.txt",
    "hdp-tokens-per-rank: 1",
    "seq-length: 1099511627776\nhdp-tokens-per-rank: 16",
    "bf16: true\nfp64: true",
    "num-experts: 3\nexpert-model-parallel-size: 2",
    "num-experts: 4\nmoe-router-topk: 9",
    "moe-layer-freq: '[0]*9'",
    "moe-layer-freq: '[1'",
    "pipeline-model-parallel-layout: E|L",
    "pipeline-model-parallel-layout: '(((('",
)


@row("cli", 600)
def check_on_nonsense(folder: Path) -> Iterator[Try]:
    """Files, values, flags and contradictions."""
    bad = folder / "bad.yaml"
    for name, content in _FILES.items():
        bad.write_bytes(content)
        yield from refused(name, "check", bad, "--gpus", 4)
    for key in _KEYS:
        for value in _VALUES:
            if (key, value) not in _FINE:
                bad.write_text(f"{key}: {value}\n")
                yield from refused(f"{key}: {value[:9]}", "check", _CONFIG, bad, "--gpus", 4)
    for text in _TOGETHER:
        bad.write_text(f"{text}\n")
        yield from refused(text, "check", _CONFIG, bad, "--gpus", 4)
    for flags in _FLAGS:
        yield from refused(f"flags {flags!r}", "check", _CONFIG, *flags.split())
    (folder / "loop.yaml").symlink_to("loop.yaml")
    for path in (
        folder,
        folder / "gone.yaml",
        folder / "loop.yaml",
        "/dev/null",
        "",
        "\0",
        "a" * 300,
    ):
        yield from refused(f"file {str(path)[:30]!r}", "check", path, "--gpus", 4)


@row("cli")
def outputs_that_are_no_files(folder: Path) -> Iterator[Try]:
    """A device, a pipe and a link stay what they are."""
    (folder / "lengths").write_text("10\n20\n")
    pipe, link = folder / "pipe.json", folder / "link.json"
    os.mkfifo(pipe)
    link.symlink_to("target.json")
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    plan = ("plan", "--lengths", folder / "lengths", "--ranks", 2, "--tokens-per-rank", 16)
    for flag in ("--output", "--trace"):
        code, said = command(*plan, flag, pipe)
        content = os.read(reader, 2**16)
        yield f"{flag} to a pipe", code == 0 and pipe.is_fifo() and bool(content), said
        code, said = command(*plan, flag, link)
        held = code == 0 and link.is_symlink() and (folder / "target.json").is_file()
        yield f"{flag} to a link", held, said
        code, said = command(*plan, flag, "/dev/null")
        yield f"{flag} to a device", code == 0 and not Path("/dev/null").is_file(), said
        yield from refused(f"{flag} to a folder", *plan, flag, folder)


@row("cli")
def readers_that_have_enough(folder: Path) -> Iterator[Try]:
    """`head` closes the pipe: nothing is said."""
    (folder / "lengths").write_text("10\n20\n")
    for words in (
        f"plan --lengths {folder}/lengths --ranks 2 --tokens-per-rank 16 --compare",
        f"simulate --config {_CONFIG} --gpus 4 --steps 1",
        f"check {_CONFIG} --gpus 4",
        f"check {_CONFIG} --gpus 4 --json",
        *("doctor", "doctor --json", "--help", "check --help"),
    ):
        reader, writer = os.pipe()
        os.close(reader)
        argv = [sys.executable, "-m", "megatron_hdp.cli.main", *words.split()]
        with os.fdopen(writer) as closed:
            done = subprocess.run(argv, stdout=closed, stderr=subprocess.PIPE, check=False)
        yield words, b"pipe" not in done.stderr.lower(), done.stderr.decode()[-300:]


@row("cli")
def sequences_beyond_the_context(folder: Path) -> Iterator[Try]:
    """Split or cut, and counted."""
    (folder / "lengths").write_text("10000000\n5\n")
    for policy in ("split", "truncate"):
        words = f"simulate --config {_CONFIG} --gpus 4 --steps 1 --data {folder}/lengths --"
        code, said = command(*words.split(), "--hdp-long-sequence", policy)
        yield policy, code == 0 and "1 of 2 sequences are longer" in said, said[:300]
    plan = ("plan", "--lengths", folder / "lengths", "--ranks", 2, "--tokens-per-rank", 4096)
    code, said = command(*plan, "--max-length", 8192)
    yield "plan", code == 0 and "1 of 2 sequences cut" in said, said[:300]


@row("cli")
def speeds_and_costs_out_of_range(folder: Path) -> Iterator[Try]:
    """Numbers of 300 digits, and models by which tokens cost nothing."""
    simulate = ("simulate", "--config", _CONFIG, "--gpus", 4, "--steps", 1)
    for speed in ("1e-300", "1e300", "nan", "-1", "0", "1e-320"):
        yield from refused(f"--slow 1:{speed}", *simulate, "--slow", f"1:{speed}")
        (folder / "speeds").write_text(f"1\n1\n1\n{speed}\n")
        yield from refused(f"speed {speed}", *simulate, "--rank-speeds", folder / "speeds")
    costs = folder / "costs.json"
    for text in (
        '{"a": 0, "b": 0, "kv_bytes_per_token": 1}',
        '{"a": NaN, "b": 1, "kv_bytes_per_token": 1}',
        '{"a": 1e-9, "b": 1e-6, "kv_bytes_per_token": 1, "doubt": 7}',
        *("{}", "[]", "", '{"a": "1"}'),
    ):
        costs.write_text(text)
        yield from refused(text, *simulate, "--cost-model", costs, told=["costs.json"])
    costs.write_text('{"a": 1e-9, "b": 1e-6, "kv_bytes_per_token": 512, "doubt": "it was busy"}')
    more = folder / "more.yaml"
    more.write_text(f"hdp-cost-model: {costs}\n")
    for words in ((*simulate, "--config", more), ("check", _CONFIG, more, "--gpus", 4)):
        code, said = command(*words)
        yield f"a doubt, {words[0]}", code == 0 and "it was busy" in said, said[:300]
