"""``megatron-hdp preprocess``: text to Megatron's ``.bin/.idx``, one document a sequence."""

import argparse
import os
from collections.abc import Sequence

from megatron_hdp.cli.shared.numbers import number
from megatron_hdp.exit_codes import ExitCode

_ANY = "*"


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the subcommand."""
    parser = subparsers.add_parser(
        "preprocess", help="tokenise text files or JSON lines into Megatron's .bin/.idx"
    )
    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        help="folders (read in sorted order), text files (one document each), JSON lines (.jsonl, "
        "also .gz or .zst), Parquet or Arrow files",
    )
    parser.add_argument(
        "--json-key",
        metavar="KEY",
        help="key or column of the text (default: text); if given, every file but tables is read "
        "as JSON lines",
    )
    parser.add_argument(
        "--glob",
        default=_ANY,
        metavar="PATTERN",
        help="file names to take from folders, such as '*.py'",
    )
    parser.add_argument(
        "--tokenizer", required=True, metavar="NAME", help="byte, hf:PATH or tiktoken:NAME"
    )
    parser.add_argument(
        "--output-prefix",
        required=True,
        metavar="PREFIX",
        help="write PREFIX.bin, .idx and .sums",
    )
    parser.add_argument(
        "--append-eod",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="end every document with the tokenizer's end-of-document token (default: yes)",
    )
    number(
        parser.add_argument,
        *("--workers", "N", 1, 4096),
        "processes that tokenise (default: all CPUs of this process)",
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    prefix = arguments.output_prefix
    _check_prefix(prefix)
    files = _find_files(arguments.input, arguments.glob)
    _require_other_output(files, prefix)

    from megatron_hdp.data.prepare import Decoding, write_pair
    from megatron_hdp.data.tokenizers import available_cpus, build_tokenizer

    decoding = Decoding(
        tokenizer=build_tokenizer(arguments.tokenizer),
        key=arguments.json_key or "text",
        append_eod=arguments.append_eod,
    )
    counts = write_pair(
        files,
        prefix,
        decoding,
        lines=arguments.json_key is not None,
        workers=arguments.workers or available_cpus(),
        name="preprocess",
    )
    if counts.documents == 0:
        raise ValueError(
            f"--input: none of {len(files):,} files has a token ({counts.empty:,} empty "
            "documents): nothing was written"
        )
    _print_summary(prefix, len(files), counts.empty)
    return ExitCode.DONE


def _find_files(inputs: Sequence[str], glob: str) -> list[str]:
    """Return the given files, and those of the given folders (sorted) whose name matches."""
    from megatron_hdp.data.formats import files_below

    files: list[str] = []
    for path in inputs:
        if os.path.isdir(path):
            files += files_below(path, None if glob == _ANY else glob)
        elif os.path.isfile(path):
            files.append(path)
        else:
            raise ValueError(f"--input {path}: no such file or folder")
    if not files:
        raise ValueError(
            f"--input {' '.join(inputs)}: no file whose name matches --glob {glob!r} below it"
        )
    return files


def _check_prefix(prefix: str) -> None:
    """Refuse a prefix that names no file: what it gave would begin with a dot."""
    name = os.path.basename(prefix)
    if name in ("", os.curdir, os.pardir):
        example = os.path.join(prefix if name == "" else f"{prefix}/", "corpus")
        raise ValueError(
            f"--output-prefix {prefix!r} names no file, expected a path that .bin and .idx can be "
            f"added to, like {example}"
        )
    for path in (f"{prefix}.bin", f"{prefix}.idx", f"{prefix}.sums"):
        if os.path.islink(path) or (os.path.exists(path) and not os.path.isfile(path)):
            raise ValueError(
                f"--output-prefix {prefix}: found that {path} is no file but a link, folder or "
                "device, expected nothing or a file to replace: give another prefix"
            )


def _require_other_output(files: list[str], prefix: str) -> None:
    """Refuse to read what would be overwritten."""
    outputs = [prefix + suffix for suffix in (".bin", ".idx", ".sums")]
    for output in filter(os.path.exists, outputs):
        for path in files:
            if os.path.samefile(path, output):
                raise ValueError(
                    f"--input {path} is what --output-prefix {prefix} would overwrite: give "
                    "another prefix, or leave it out with --glob"
                )


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
