"""Megatron's flags of data, with Megatron's meaning: blends, files of them, splits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson

from megatron_hdp.data.mixture.schedule import SPLITS, MixtureSpec, Phase, Schedule
from megatron_hdp.data.spec import SourceSpec

_SFT_TEMPLATE = "megatron:"


@dataclass(frozen=True, kw_only=True)
class BlendFlags:
    """The values of Megatron's flags; empty ones were not given."""

    data_path: Sequence[str] = ()
    data_args_path: str | None = None
    train_data_path: Sequence[str] = ()
    valid_data_path: Sequence[str] = ()
    test_data_path: Sequence[str] = ()
    per_split_data_args_path: str | None = None
    split: str = "969,30,1"
    sft: bool = False
    sft_tokenizer_prompt_format: str | None = None
    preferences: str | None = None
    """The format of what is no ``.bin/.idx`` pair, where the run trains on preferences."""


def specs_of_flags(flags: BlendFlags) -> dict[str, MixtureSpec]:
    """Return what each split that the flags name draws from.

    Weights are shares of tokens, with ``--sft`` and preferences of rows; without weights a source
    counts by its size.

    Raises:
        ValueError: flags that do not go together, or a list that is no blend.
    """
    per_split = {f"--{name}-data-path": getattr(flags, f"{name}_data_path") for name in SPLITS}
    given = {
        "--data-path": flags.data_path,
        "--data-args-path": flags.data_args_path,
        "--train-data-path, --valid-data-path, --test-data-path": any(per_split.values()),
        "--per-split-data-args-path": flags.per_split_data_args_path,
    }
    found = [flag for flag, value in given.items() if value]
    if len(found) != 1:
        raise ValueError(
            f"found {' and '.join(found) or 'no flag that names data'}, expected one of "
            f"{'; '.join(given)}"
        )
    if flags.data_path or flags.data_args_path:
        words = list(flags.data_path)
        if flags.data_args_path is not None:
            words = _text_of("--data-args-path", flags.data_args_path).split()
        return {
            name: _spec(found[0], words, flags, split=flags.split, part=part)
            for part, name in enumerate(SPLITS)
        }
    if flags.per_split_data_args_path is not None:
        lists = _lists_of_file(flags.per_split_data_args_path)
        return {name: _spec(f"{found[0]}: {name}", words, flags) for name, words in lists.items()}
    return {
        name: _spec(flag, list(words), flags)
        for name, (flag, words) in zip(SPLITS, per_split.items(), strict=True)
        if words
    }


def _spec(
    origin: str, words: Sequence[str], flags: BlendFlags, *, split: str = "1", part: int = 0
) -> MixtureSpec:
    weights, paths = _blend(origin, words)
    names = _names(paths)
    phase = Phase(weights=None if weights is None else dict(zip(names, weights, strict=True)))
    template = None
    if flags.sft and flags.sft_tokenizer_prompt_format is not None:
        template = _SFT_TEMPLATE + flags.sft_tokenizer_prompt_format
    kind = "chat" if flags.sft else "tokens"

    def format_of(path: str) -> str:
        is_pair = Path(f"{path}.idx").is_file()
        return kind if flags.preferences is None or is_pair else flags.preferences

    sources = tuple(
        SourceSpec(name=name, path=path, format=format_of(path), template=template)
        for name, path in zip(names, paths, strict=True)
    )
    return MixtureSpec(
        sources=sources,
        origin=origin,
        schedule=Schedule(phases=(phase,)),
        weight_unit="sequences" if flags.sft or flags.preferences else "tokens",
        split=split,
        part=part,
    )


def _blend(origin: str, words: Sequence[str]) -> tuple[list[float] | None, list[str]]:
    """Return weights, None where there are none, and prefixes.

    As in Megatron: a list is weights and prefixes in turn where their number is even and every
    other word is a number, else it is prefixes.
    """
    if not words:
        raise ValueError(
            f"{origin}: found an empty list, expected prefixes, or weights and prefixes"
        )
    weights = [_number(word) for word in words[::2]]
    if len(words) % 2 or all(weight is None for weight in weights):
        return None, list(words)
    for word, weight in zip(words[::2], weights, strict=True):
        if weight is None:
            raise ValueError(
                f"{origin}: found {word!r} in the place of a weight, expected weights and prefixes "
                "in turn, or prefixes alone"
            )
    chosen = [weight for weight in weights if weight is not None]
    if not all(0 <= weight <= 1e300 for weight in chosen) or not any(chosen):
        raise ValueError(
            f"{origin}: found the weights {', '.join(words[::2])}, expected numbers from 0 on, at "
            "least one above 0"
        )
    return chosen, list(words[1::2])


def _names(paths: Sequence[str]) -> list[str]:
    """Return a name for each: the last part of its path where that is its alone, else all of it."""
    short = [Path(path).name for path in paths]
    names = [
        one if one and short.count(one) == 1 else path
        for one, path in zip(short, paths, strict=True)
    ]
    return [  # one that stands there twice is drawn from twice, as in Megatron
        name if names.index(name) == i else f"{name}#{names[:i].count(name) + 1}"
        for i, name in enumerate(names)
    ]


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def _text_of(flag: str, path: str) -> str:
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise ValueError(f"{flag} {path}: {reason}: give the path of a text file") from None


def _lists_of_file(path: str) -> dict[str, list[str]]:
    """Return the lists of ``--per-split-data-args-path``: JSON, each a list or one text."""
    flag = "--per-split-data-args-path"
    expected = f"expected an object with lists of words under {', '.join(SPLITS)}"
    try:
        record = orjson.loads(_text_of(flag, path))
    except orjson.JSONDecodeError as error:
        raise ValueError(f"{flag} {path}: not valid JSON ({error}), {expected}") from None
    if not isinstance(record, Mapping) or not set(record) <= set(SPLITS) or "train" not in record:
        raise ValueError(f"{flag} {path}: found other keys, {expected}")
    lists = {}
    for name, value in record.items():
        words = value.split() if isinstance(value, str) else value
        if words is not None and not isinstance(words, list):
            raise ValueError(f"{flag} {path}: {name} is {str(value)[:60]!r}, {expected}")
        if words:
            lists[name] = [str(word) for word in words]
    return lists
