"""``megatron-hdp preprocess``: text to Megatron's ``.bin/.idx``, one document a sequence."""

import argparse
import os
import sys
import warnings
from typing import TYPE_CHECKING

from megatron_hdp.cli.documents import find_files, read_documents
from megatron_hdp.exit_codes import ExitCode

if TYPE_CHECKING:
    from megatron_hdp.data import Tokenizer
    from megatron_hdp.megatron.indexed_writer import IndexedWriter


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the subcommand."""
    parser = subparsers.add_parser(
        "preprocess", help="write text files or JSON lines as Megatron .bin/.idx"
    )
    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        help="folders (walked in sorted order), files (one document each) or .jsonl files",
    )
    parser.add_argument(
        "--json-key",
        metavar="KEY",
        help="key of the text in JSON lines (default text); once given, every file is JSON lines",
    )
    parser.add_argument(
        "--glob", default="*", metavar="PATTERN", help="names to take from folders, such as '*.py'"
    )
    parser.add_argument(
        "--tokenizer", required=True, metavar="NAME", help="byte, hf:PATH or tiktoken:NAME"
    )
    parser.add_argument(
        "--output-prefix", required=True, metavar="PREFIX", help="writes PREFIX.bin and PREFIX.idx"
    )
    parser.add_argument(
        "--append-eod",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="end every document with the tokenizer's end-of-document token (default: yes)",
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    prefix = arguments.output_prefix
    _check_prefix(prefix)
    files = find_files(arguments.input, arguments.glob)
    _require_other_output(files, prefix)

    from megatron_hdp.data import build_tokenizer

    tokenizer = build_tokenizer(arguments.tokenizer)
    with warnings.catch_warnings():  # megatron-core warns of GPU libraries that writing needs not
        warnings.simplefilter("ignore")
        from megatron_hdp.megatron.indexed_writer import IndexedWriter

    with IndexedWriter(prefix, tokenizer.vocab_size) as writer:
        num_empty = _write(writer, files, tokenizer, arguments.json_key, arguments.append_eod)
        if writer.num_documents == 0:
            raise ValueError(
                f"--input: none of {len(files):,} files has a token ({num_empty:,} empty "
                "documents): nothing was written"
            )
    _print_summary(prefix, len(files), num_empty)
    return ExitCode.DONE


def _check_prefix(prefix: str) -> None:
    """Refuse a prefix that names no file: what it gave would begin with a dot."""
    name = os.path.basename(prefix)
    if name in ("", os.curdir, os.pardir):
        example = os.path.join(prefix if name == "" else f"{prefix}/", "corpus")
        raise ValueError(
            f"--output-prefix {prefix!r} names no file, expected a path that .bin and .idx can be "
            f"added to, like {example}"
        )


def _require_other_output(files: list[str], prefix: str) -> None:
    """Refuse to read what would be overwritten."""
    outputs = [prefix + suffix for suffix in (".bin", ".idx")]
    for output in filter(os.path.exists, outputs):
        for path in files:
            if os.path.samefile(path, output):
                raise ValueError(
                    f"--input {path} is what --output-prefix {prefix} would overwrite: give "
                    "another prefix, or leave it out with --glob"
                )


def _write(
    writer: "IndexedWriter",
    files: list[str],
    tokenizer: "Tokenizer",
    json_key: str | None,
    append_eod: bool,
) -> int:
    """Write every document that has a token; return the number of those that have none."""
    import numpy as np
    from tqdm import tqdm

    num_empty = 0
    total = sum(map(os.path.getsize, files))
    interval = 0.2 if sys.stderr.isatty() else 10.0
    with tqdm(
        total=total, unit="B", unit_scale=True, desc="preprocess", mininterval=interval
    ) as progress:
        for path in files:
            for raw, num_bytes in read_documents(path, json_key):
                tokens = tokenizer.tokenize_bytes(raw)
                progress.update(num_bytes)
                if len(tokens) == 0:
                    num_empty += 1
                    continue
                writer.add(np.append(tokens, tokenizer.eod) if append_eod else tokens)
    return num_empty


def _print_summary(prefix: str, num_files: int, num_empty: int) -> None:
    import numpy as np

    from megatron_hdp.data import TokenFile

    lengths = TokenFile(prefix).lengths  # what was written, read back
    quantiles = np.quantile(lengths, [0.5, 0.9, 0.99], method="higher")
    print(f"{prefix}.bin, {prefix}.idx: {num_files:,} files")
    print(f"  documents      {len(lengths):,} ({num_empty:,} empty ones skipped)")
    print(f"  tokens         {lengths.sum():,}")
    print(
        f"  length         shortest {lengths.min():,}, median {quantiles[0]:,}, "
        f"90 % {quantiles[1]:,}, 99 % {quantiles[2]:,}, longest {lengths.max():,}"
    )
