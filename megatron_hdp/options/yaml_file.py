"""A YAML file is flags written vertically: argparse stays the only parser."""

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from megatron_hdp.options.declaration import OptionError, flag_of
from megatron_hdp.options.parser import RESEMBLANCE, did_you_mean, nearest

_PARTS = "config"  # of a YAML file: further files, whose keys its own win over
_SLIP = 0.9  # difflib's ratio, above which a name is misspelt


def yaml_to_argv(
    path: Path,
    parser: argparse.ArgumentParser,
    *,
    skip_others: bool = False,
    including: tuple[Path, ...] = (),
) -> list[str]:
    """Write the YAML file ``path`` as the flags of ``parser``.

    A key is a flag's name, with ``-`` or ``_``; a mapping under a name that is no flag is a section
    for the reader's eye. Of a switch, ``true`` gives the flag and ``false`` its opposite. The key
    ``config`` names one or several files, relative to this one's folder, that are read first.
    ``skip_others`` leaves out the keys that are no flag, unless one is so near that it is a slip.
    ``including`` are the files that led to this one.

    Raises:
        OptionError: an unknown or repeated key, a value that its flag does not take, or a file that
            names itself.
    """
    try:
        document = yaml.safe_load(path.read_text())
    except OSError as error:
        given = f"{including[-1]}: {_PARTS}" if including else "--config"
        raise OptionError(f"{given} {path}: {error.strerror}: give the path of a file") from None
    except yaml.YAMLError as error:
        raise OptionError(f"{path}: not valid YAML: {error}") from None
    if document is None:
        return []
    if not isinstance(document, dict):
        raise OptionError(f"{path}: found a {type(document).__name__}, expected keys and values")
    parts = document.pop(_PARTS, [])
    argv = [
        argument
        for part in _parts(path, parts, including)
        for argument in yaml_to_argv(
            part, parser, skip_others=skip_others, including=(*including, path.resolve())
        )
    ]
    seen: dict[str, str] = {}
    for key, value in _flat(document, parser):
        flag = flag_of(str(key))
        action = parser._option_string_actions.get(flag)
        if action is None or isinstance(action, argparse._HelpAction):
            cutoff = _SLIP if skip_others else RESEMBLANCE
            near = nearest(flag, parser._option_string_actions, cutoff).removeprefix("--")
            if skip_others and not near:
                continue
            raise OptionError(f"{path}: unknown key '{key}'{did_you_mean(near)}")
        if other := seen.get(action.dest):
            raise OptionError(f"{path}: '{key}' repeats '{other}': keep one of them")
        seen[action.dest] = str(key)
        try:
            argv += _arguments(parser, action, flag, value)
        except ValueError as error:
            raise OptionError(f"{path}: {key}: {error}") from None
    return argv


def _parts(path: Path, names: Any, including: tuple[Path, ...]) -> list[Path]:
    """The files that ``path`` names under ``config``."""
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise OptionError(f"{path}: {_PARTS}: found {names!r}, expected a file or a list of files")
    found = [path.parent / name for name in names]
    for part in found:
        if part.resolve() in (*including, path.resolve()):
            raise OptionError(f"{path}: {_PARTS}: {part} leads back to itself: remove it")
    return found


def _flat(
    document: Mapping[Any, Any], parser: argparse.ArgumentParser
) -> Iterator[tuple[Any, Any]]:
    for key, value in document.items():
        is_section = isinstance(value, Mapping)
        if is_section and flag_of(str(key)) not in parser._option_string_actions:
            yield from _flat(value, parser)
        else:
            yield key, value


def _arguments(
    parser: argparse.ArgumentParser, action: argparse.Action, flag: str, value: Any
) -> list[str]:
    """Return the arguments that give ``value`` to ``flag``, having checked its type."""
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise ValueError(f"found {value!r}, expected true or false")
        return [flag if value else _opposite(parser, action)]
    if isinstance(value, list):
        if action.nargs is None:
            raise ValueError(f"found a list, expected one {_type_name(action)}")
        return [flag, *(_checked(action, part) for part in value)]
    text = _checked(action, value)
    return [f"{flag}={text}"] if action.nargs is None else [flag, text]


def _opposite(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    for other in parser._option_string_actions.values():
        if other.dest == action.dest and other.nargs == 0 and other.const != action.const:
            return other.option_strings[0]
    raise ValueError("found false, and this switch cannot be turned off: remove the key")


def _checked(action: argparse.Action, value: Any) -> str:
    """Return ``value`` as the text of an argument."""
    expected = f"expected a value of type {_type_name(action)}"
    if value is None or isinstance(value, bool | Mapping | list):
        raise ValueError(f"found {value!r}, {expected}")
    text = str(value)
    try:
        converted = action.type(text) if callable(action.type) else text
    except ValueError:
        raise ValueError(f"found {value!r}, {expected}") from None
    if action.choices and converted not in action.choices:
        raise ValueError(f"found {value!r}, expected {' or '.join(map(str, action.choices))}")
    return text


def _type_name(action: argparse.Action) -> str:
    return getattr(action.type, "__name__", "str").lower()
