"""``megatron-hdp preprocess`` writes what it read, and a mistake costs one line."""

import bz2
import gzip
import io
import json
import lzma
import os
import resource
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import psutil
import pytest

from megatron_hdp.cli.main import main
from megatron_hdp.data import TokenFile
from megatron_hdp.data.prepare import shards

REPOSITORY = Path(__file__).parents[2]


def documents(prefix):
    file = TokenFile(prefix)
    return [file.read(d, 0, int(n)).tolist() for d, n in enumerate(file.lengths)]


def run(*arguments):
    return main(["preprocess", "--tokenizer", "byte", *map(str, arguments)])


@pytest.fixture
def folder(tmp_path):
    for name, raw in {
        "b.py": b"b",
        "a/z.py": b"azz",
        "a/empty.py": b"",
        "a/note.txt": b"note",
        "c.py": b"ccc",
    }.items():
        path = tmp_path / "source" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(raw)
    return tmp_path / "source"


def fails(capsys, *expected):
    """Check that one line on stderr says every part; return nothing else was printed."""
    error = capsys.readouterr().err.strip().splitlines()
    assert error[-1].startswith("megatron-hdp preprocess: error: ")
    for part in expected:
        assert part in error[-1]
    assert not any("Traceback" in line for line in error)


def test_folders_are_walked_in_sorted_order(folder, tmp_path, capsys):
    assert run("--input", folder, "--glob", "*.py", "--output-prefix", tmp_path / "out") == 0
    assert documents(tmp_path / "out") == [[98, 256], [99] * 3 + [256], [97, 122, 122, 256]]
    printed = capsys.readouterr().out
    for part in ("4 files", "documents      3 (1 empty ones skipped)", "tokens         10"):
        assert part in printed
    assert "shortest 2, median 4, 90 % 4, 99 % 4, longest 4" in printed
    assert sorted(os.listdir(tmp_path)) == ["out.bin", "out.idx", "out.sums", "source"]


def test_files_keep_their_order_and_eod_can_be_left_out(folder, tmp_path):
    files = (folder / "c.py", folder / "b.py")
    assert run("--input", *files, "--output-prefix", tmp_path / "out", "--no-append-eod") == 0
    assert documents(tmp_path / "out") == [[99] * 3, [98]]


def test_json_lines(tmp_path):
    path = tmp_path / "data.jsonl"
    lines = [{"text": "ä"}, {"text": ""}, {"text": "b", "other": 1}]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    assert run("--input", path, "--output-prefix", tmp_path / "out") == 0
    assert documents(tmp_path / "out") == [[0xC3, 0xA4, 256], [98, 256]]


def test_a_json_key_makes_every_file_json_lines(tmp_path):
    path = tmp_path / "data.json"
    path.write_text('{"body": "x"}\n{"body": "?"}')
    prefix = tmp_path / "new/folder/out"
    assert run("--input", path, "--json-key", "body", "--output-prefix", prefix) == 0
    assert documents(prefix) == [[120, 256], [63, 256]]


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("{broken", "'{broken'"),
        ('["text"]', "string under 'text'"),
        ('{"body": "x"}', "--json-key"),
        ('{"text": 5}', "string under 'text'"),
        ("[" * 100_000, "maximum recursion depth"),
        ('{"text": ' + "9" * 5000 + "}", "Exceeds the limit"),
    ],
)
def test_a_bad_json_line_names_file_and_line(tmp_path, capsys, line, found):
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "good"}\n' + line + "\n")
    assert run("--input", path, "--output-prefix", tmp_path / "out") == 2
    fails(capsys, f"{path}, line 2: expected", found)
    assert os.listdir(tmp_path) == ["data.jsonl"]


@pytest.mark.parametrize(
    ("path", "flags", "expected"),
    [
        ("absent", [], "absent: no such file or folder"),
        ("source", ["--glob", "*.rs"], "no file whose name matches --glob '*.rs'"),
        ("source/a/empty.py", [], "none of 1 files has a token (1 empty documents): nothing was"),
        ("source", ["--tokenizer", "gpt"], "'gpt': expected byte, hf:PATH"),
    ],
)
def test_nothing_to_write(folder, tmp_path, capsys, path, flags, expected):
    assert run("--input", tmp_path / path, *flags, "--output-prefix", tmp_path / "out") == 2
    fails(capsys, expected)
    assert os.listdir(tmp_path) == ["source"]


def zip_of(raw):
    with zipfile.ZipFile(stream := io.BytesIO(), "w") as archive:
        archive.writestr("a", raw)
    return stream.getvalue()


PACKERS = {"gzip": gzip.compress, "bzip2": bz2.compress, "xz": lzma.compress, "zip": zip_of}
PACKERS["zstd"] = b"\x28\xb5\x2f\xfd".__add__


@pytest.mark.parametrize("name", PACKERS)
@pytest.mark.parametrize("suffix", ["txt", "jsonl"])
def test_a_compressed_file_is_no_text(tmp_path, capsys, name, suffix):
    path = tmp_path / f"data.{suffix}"
    path.write_bytes(PACKERS[name](b'{"text": "a"}\n'))
    assert run("--input", path, "--output-prefix", tmp_path / "out") == 2
    fails(capsys, f"{path} is compressed ({name}), expected text: decompress it")
    assert os.listdir(tmp_path) == [path.name]


@pytest.mark.parametrize("raw", [b"\x7fELF\x02\x01\x01\x00", "text".encode("utf-16"), b"a\0"])
def test_a_binary_file_is_no_text(tmp_path, capsys, raw):
    path = tmp_path / "data"
    path.write_bytes(raw)
    assert run("--input", path, "--output-prefix", tmp_path / "out") == 2
    fails(capsys, f"{path} is binary (byte {raw.index(0)} is zero), expected UTF-8 text")


@pytest.mark.parametrize("prefix", ["", "new/", ".", "..", "new/."])
def test_a_prefix_without_a_name_is_refused(folder, tmp_path, capsys, monkeypatch, prefix):
    monkeypatch.chdir(tmp_path)
    assert run("--input", folder, "--output-prefix", prefix) == 2
    fails(capsys, f"--output-prefix {prefix!r} names no file", "corpus")
    assert os.listdir(tmp_path) == ["source"]


@pytest.mark.parametrize("suffix", [".bin", ".idx", ".sums"])
def test_a_link_is_not_replaced(folder, tmp_path, capsys, suffix):
    (tmp_path / f"out{suffix}").symlink_to("elsewhere")
    assert run("--input", folder, "--output-prefix", tmp_path / "out") == 2
    fails(capsys, f"out{suffix} is no file but a link")
    assert (tmp_path / f"out{suffix}").is_symlink()


@pytest.mark.parametrize("suffix", [".bin", ".idx", ".sums"])
def test_the_input_is_not_overwritten(tmp_path, capsys, suffix):
    path = tmp_path / f"data{suffix}"
    path.write_bytes(b"text")
    (tmp_path / "link").symlink_to(tmp_path)
    prefix = tmp_path / "link" / "data"
    for given in (path, tmp_path):
        assert run("--input", given, "--output-prefix", prefix) == 2
        fails(capsys, f"--input {path} is what --output-prefix {prefix} would overwrite")
    assert path.read_bytes() == b"text"


def test_a_full_disk_leaves_nothing(tmp_path, capsys):
    (tmp_path / "data.txt").write_bytes(b"x" * 2_000_000)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, limits[1]))
    try:
        assert run("--input", tmp_path / "data.txt", "--output-prefix", tmp_path / "out") == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    fails(capsys, "File too large")
    assert os.listdir(tmp_path) == ["data.txt"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_leaves_nothing(folder, tmp_path, capsys, monkeypatch, number):
    def end(self, documents):
        os.kill(os.getpid(), number)
        raise AssertionError("the signal did nothing")

    monkeypatch.setattr("megatron_hdp.data.tokenizers.ByteTokenizer.tokenize_batch", end)
    # ignored by what a shell starts with &
    signal.signal(signal.SIGINT, signal.default_int_handler)
    handlers = [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGHUP)]
    assert run("--input", folder, "--output-prefix", tmp_path / "out") == 130
    assert capsys.readouterr().err.endswith("megatron-hdp preprocess: interrupted\n")
    assert os.listdir(tmp_path) == ["source"]
    assert [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGHUP)] == handlers


def lines_of(path, num_documents, longest=2000):
    texts = [chr(97 + i % 26) * (1 + i * 37 % longest) for i in range(num_documents)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return [[ord(letter) for letter in text] + [256] for text in texts]


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_any_number_of_workers_writes_the_same(tmp_path, monkeypatch, workers):
    monkeypatch.setattr(shards, "_LEAST_BYTES", 20_000)
    expected = lines_of(tmp_path / "data.jsonl", 200)
    prefix = tmp_path / "out"
    arguments = ("--input", tmp_path / "data.jsonl", "--output-prefix", prefix)
    assert run(*arguments, "--workers", workers) == 0
    assert documents(prefix) == expected
    assert sorted(os.listdir(tmp_path)) == ["data.jsonl", "out.bin", "out.idx", "out.sums"]


def test_bad_numbers_of_workers(tmp_path, capsys):
    for workers in ("0", "-1", "x"):
        with pytest.raises(SystemExit):
            run("--input", tmp_path, "--output-prefix", tmp_path / "out", "--workers", workers)
        assert "--workers" in capsys.readouterr().err


def test_a_mistake_in_a_worker_costs_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(shards, "_LEAST_BYTES", 20_000)
    path = tmp_path / "data.jsonl"
    lines_of(path, 200)
    with path.open("a") as stream:
        stream.write("broken\n")
    code = run("--input", path, "--output-prefix", tmp_path / "out", "--workers", 2)
    assert code == 2
    fails(capsys, f"{path}, line 201: expected one JSON object, found 'broken'")
    assert os.listdir(tmp_path) == ["data.jsonl"]


def test_compressed_lines_and_tables(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet", reason="pip install 'megatron-hdp[data]'")
    import pyarrow

    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n'))
    parquet.write_table(pyarrow.table({"text": ["b"]}), tmp_path / "b.parquet")
    lines = pyarrow.compress(b'{"text": "c"}\n', "zstd", asbytes=True)
    (tmp_path / "c.jsonl.zst").write_bytes(lines)
    assert run("--input", tmp_path, "--output-prefix", tmp_path / "out") == 0
    assert documents(tmp_path / "out") == [[97, 256], [98, 256], [99, 256]]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_workers_and_leaves_nothing(tmp_path, number):
    path = tmp_path / "data.jsonl"
    lines_of(path, 2000, longest=5000)
    program = (
        "import sys, time; from megatron_hdp.cli.main import main; "
        "from megatron_hdp.data import prepare; run = prepare.tokenising.concatenate_pairs; "
        "prepare.tokenising.concatenate_pairs = lambda *rest, **more: time.sleep(60); "
        "sys.exit(main(sys.argv[1:]))"
    )
    command = ["preprocess", "--tokenizer", "byte", "--workers", "2", "--input", str(path)]
    process = subprocess.Popen(
        [sys.executable, "-c", program, *command, "--output-prefix", str(tmp_path / "out")],
        cwd=REPOSITORY,
        stderr=subprocess.PIPE,
        text=True,
    )
    end = time.monotonic() + 60
    while not (shards := list(tmp_path.glob("out.tmp*/*.idx"))):
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.005)
    below = psutil.Process(process.pid).children()
    process.send_signal(number)
    _, error = process.communicate(timeout=570)
    assert (process.returncode, bool(shards)) == (130, True)
    assert error.endswith("megatron-hdp preprocess: interrupted\n") and "Traceback" not in error
    assert psutil.wait_procs(below, timeout=10)[1] == []
    assert os.listdir(tmp_path) == ["data.jsonl"]
