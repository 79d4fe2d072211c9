"""``megatron-hdp preprocess`` beside Megatron-LM's ``tools/preprocess_data.py``, on the same text.

``python scripts/benchmarks/bench_preprocess.py --megatron-lm DIR`` trains a byte-level BPE on the
sources of Python's standard library, writes them as JSON lines, and has both tools tokenise them in
turn. What is timed is the whole command, from its start to its end. Both must write the same
``.bin``.
"""

import argparse
import filecmp
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Mapping
from itertools import cycle
from pathlib import Path

_MB = 1e6
_END = "<|endoftext|>"


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--megatron-lm", required=True, metavar="DIR", help="a checkout")
    parser.add_argument("--megabytes", type=float, default=50.0, help="of text (default: 50)")
    parser.add_argument("--vocabulary", type=int, default=32_000, help="entries (default: 32,000)")
    parser.add_argument("--workers", type=int, default=2, help="of either tool (default: 2)")
    parser.add_argument("--rounds", type=int, default=3, help="of measuring (default: 3)")
    parser.add_argument(
        "--library-only",
        action="store_true",
        help="a tokenizer that puts a space before text, whose words are not remembered",
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        texts = _sources(int(options.megabytes * _MB))
        num_bytes = _write_text(folder / "text.jsonl", texts, int(options.megabytes * _MB))
        _train(folder / "tokenizer", texts, options.vocabulary, options.library_only)
        commands = _commands(folder, Path(options.megatron_lm), options.workers)
        seconds: dict[str, list[float]] = {tool: [] for tool in commands}
        for _ in range(options.rounds):
            for tool, command in commands.items():
                seconds[tool].append(_timed(command, options.megatron_lm))
            _require_equal(folder)
    _print(seconds, num_bytes, options.workers)


def _sources(num_bytes: int) -> list[str]:
    """Return texts of the standard library that are UTF-8, sorted by path, of about a size."""
    folder = Path(sysconfig.get_path("stdlib"))
    paths = sorted(path for path in folder.rglob("*.py") if "site-packages" not in path.parts)
    texts: list[str] = []
    for raw in map(Path.read_bytes, paths):
        text = raw.decode("utf-8", errors="replace")
        if text and "\ufffd" not in text and num_bytes > 0:
            texts.append(text)
            num_bytes -= len(raw)
    return texts


def _write_text(path: Path, texts: list[str], num_bytes: int) -> int:
    """Write texts as JSON lines, from the first again after the last; return bytes of text."""
    written = 0
    with path.open("w") as stream:
        for text in cycle(texts):
            if written >= num_bytes:
                break
            stream.write(json.dumps({"text": text}) + "\n")
            written += len(text.encode())
    return written


def _train(folder: Path, texts: list[str], vocabulary: int, prefix_space: bool) -> None:
    """Save a byte-level BPE as transformers does."""
    import tokenizers
    from tokenizers import models, pre_tokenizers, trainers

    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": _END}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def _commands(folder: Path, megatron_lm: Path, workers: int) -> Mapping[str, list[str]]:
    text, tokenizer, number = str(folder / "text.jsonl"), str(folder / "tokenizer"), str(workers)
    ours = ["-m", "megatron_hdp.cli.main", "preprocess", "--input", text, "--workers", number]
    ours += ["--tokenizer", f"hf:{tokenizer}", "--output-prefix", str(folder / "ours")]
    theirs = [str(megatron_lm / "tools" / "preprocess_data.py"), "--input", text, "--append-eod"]
    theirs += ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", tokenizer]
    theirs += ["--output-prefix", str(folder / "theirs"), "--workers", number]
    return {
        "megatron-hdp preprocess": [sys.executable, *ours],
        "tools/preprocess_data.py": [sys.executable, *theirs],
    }


def _timed(command: list[str], megatron_lm: str) -> float:
    places = [os.environ.get("PYTHONPATH", ""), megatron_lm]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, places))}
    began = time.perf_counter()
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    seconds = time.perf_counter() - began
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-2000:]}")
    return seconds


def _require_equal(folder: Path) -> None:
    if not filecmp.cmp(folder / "ours.bin", folder / "theirs_text_document.bin", shallow=False):
        sys.exit("the two tools wrote different .bin files, expected the same bytes")


def _print(seconds: Mapping[str, list[float]], num_bytes: int, workers: int) -> None:
    print(f"{num_bytes / _MB:.1f} MB of text, {workers} workers, {os.cpu_count()} CPUs, same .bin")
    medians = {}
    for tool, found in seconds.items():
        medians[tool] = statistics.median(found)
        each = ", ".join(f"{one:.1f}" for one in found)
        print(f"{tool:>26}: {num_bytes / _MB / medians[tool]:.2f} MB/s (seconds: {each})")
    ours, theirs = medians.values()
    print(f"{'ratio of medians':>26}: {theirs / ours:.2f}")


if __name__ == "__main__":
    main()
