"""Reads a YAML file as flags, so that argparse is the only parser."""

import argparse
from collections.abc import Iterator
from pathlib import Path

import yaml

from megatron_hdp.nearest import nearest
from megatron_hdp.options.declaration import OptionError, flag_of
from megatron_hdp.options.parser import RESEMBLANCE, did_you_mean
from megatron_hdp.options.yaml_nodes import (
    PLAIN_TAGS,
    AsWritten,
    is_nothing,
    is_text,
    shown,
    switch_of,
)

_PARTS = "config"  # of a YAML file: further files, whose keys its own win over
_SLIP = 0.9  # difflib's ratio, above which a name is misspelt
_MOST_PARTS = 50  # files that lead from one to the next


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
        OptionError: not YAML, an unknown or repeated key, a value that its flag does not take, or a
            file that names itself.
    """
    document = _read(path, including)
    if document is None:
        return []
    pairs = list(_pairs(path, document))
    parts = [value for key, value in pairs if key == _PARTS]
    argv = [
        argument
        for part in _parts(path, parts[0] if parts else None, including)
        for argument in yaml_to_argv(
            part, parser, skip_others=skip_others, including=(*including, path.resolve())
        )
    ]
    seen: dict[str, str] = {}
    for key, value in _flat(path, [pair for pair in pairs if pair[0] != _PARTS], parser, set()):
        flag = flag_of(key)
        action = parser._option_string_actions.get(flag)
        if action is None or isinstance(action, argparse._HelpAction):
            cutoff = _SLIP if skip_others else RESEMBLANCE
            near = nearest(flag, parser._option_string_actions, cutoff).removeprefix("--")
            if skip_others and not near:
                continue
            raise OptionError(f"{path}: unknown key '{key}'{did_you_mean(near)}")
        if other := seen.get(action.dest):
            raise OptionError(f"{path}: '{key}' repeats '{other}': keep one of them")
        seen[action.dest] = key
        try:
            argv += _arguments(parser, action, flag, value)
        except ValueError as error:
            raise OptionError(f"{path}: {key}: {error}") from None
    return argv


def _read(path: Path, including: tuple[Path, ...]) -> yaml.MappingNode | None:
    """The file's one mapping as it is written; None for an empty file."""
    try:
        node = yaml.compose(path.read_bytes(), Loader=AsWritten)
    except OSError as error:
        given = f"{including[-1]}: {_PARTS}" if including else "--config"
        raise OptionError(f"{given} {path}: {error.strerror}: give the path of a file") from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # the latter of odd escapes
        raise OptionError(f"{path}: not valid YAML: {error}") from None
    except RecursionError:
        raise OptionError(
            f"{path}: found lists or sections nested hundreds of levels deep, expected flags"
        ) from None
    if node is None or (isinstance(node, yaml.ScalarNode) and is_nothing(node)):
        return None
    if not isinstance(node, yaml.MappingNode):
        raise OptionError(f"{path}: found {shown(node)}, expected keys and values")
    return node


def _pairs(path: Path, mapping: yaml.MappingNode) -> Iterator[tuple[str, yaml.Node]]:
    """Keys and values of one mapping, in which no name may stand twice."""
    seen: dict[str, str] = {}
    for key_node, value in mapping.value:
        if not isinstance(key_node, yaml.ScalarNode):
            line = key_node.start_mark.line + 1
            raise OptionError(
                f"{path}, line {line}: found {shown(key_node)} as a key, expected a flag's name"
            )
        key = key_node.value
        if other := seen.get(flag_of(key)):
            raise OptionError(f"{path}: '{key}' repeats '{other}': keep one of them")
        seen[flag_of(key)] = key
        yield key, value


def _parts(path: Path, names: yaml.Node | None, including: tuple[Path, ...]) -> list[Path]:
    """The files that ``path`` names under ``config``."""
    if names is None:
        return []
    texts = [names] if isinstance(names, yaml.ScalarNode) else names.value
    if isinstance(names, yaml.MappingNode) or not all(is_text(text) for text in texts):
        raise OptionError(
            f"{path}: {_PARTS}: found {shown(names)}, expected a file or a list of files"
        )
    if len(including) >= _MOST_PARTS:
        raise OptionError(
            f"{path}: {_PARTS}: found more than {_MOST_PARTS} files that lead to one another, "
            "expected fewer: merge some"
        )
    found = [path.parent / text.value for text in texts]
    for part in found:
        if part.resolve() in (*including, path.resolve()):
            raise OptionError(f"{path}: {_PARTS}: {part} includes itself: remove it")
    return found


def _flat(
    path: Path,
    pairs: list[tuple[str, yaml.Node]],
    parser: argparse.ArgumentParser,
    sections: set[int],
) -> Iterator[tuple[str, yaml.Node]]:
    """The pairs with those of sections in the sections' places; an alias is no second section."""
    for key, value in pairs:
        is_flag = flag_of(key) in parser._option_string_actions
        if is_flag or not isinstance(value, yaml.MappingNode):
            yield key, value
            continue
        if id(value) in sections:
            raise OptionError(f"{path}: '{key}' repeats another section by an alias: remove it")
        sections.add(id(value))
        yield from _flat(path, list(_pairs(path, value)), parser, sections)


def _arguments(
    parser: argparse.ArgumentParser, action: argparse.Action, flag: str, value: yaml.Node
) -> list[str]:
    """Return the arguments that give ``value`` to ``flag``, having checked its type."""
    if value.tag not in PLAIN_TAGS:
        raise ValueError(f"found the tag {value.tag}, expected a plain value")
    if action.nargs == 0:
        wanted = switch_of(value)
        if wanted is None:
            raise ValueError(f"found {shown(value)}, expected true or false")
        return [flag if wanted else _opposite(parser, action)]
    if isinstance(value, yaml.SequenceNode):
        if action.nargs is None:
            raise ValueError(f"found a list, expected one {_type_name(action)}")
        if not value.value:
            raise ValueError(f"found an empty list, expected at least one {_type_name(action)}")
        return [flag, *(_one_of_many(action, part) for part in value.value)]
    if action.nargs is None:
        return [f"{flag}={_checked(action, value)}"]
    return [flag, _one_of_many(action, value)]


def _opposite(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    for other in parser._option_string_actions.values():
        if other.dest == action.dest and other.nargs == 0 and other.const != action.const:
            return other.option_strings[0]
    raise ValueError("found false, but this switch cannot be turned off: remove the key")


def _one_of_many(action: argparse.Action, value: yaml.Node) -> str:
    """Return one of several values of a flag, which argparse must not take for a flag."""
    text = _checked(action, value)
    if text.startswith("-") and action.type in (None, str):
        raise ValueError(f"found {shown(value)}, which looks like a flag: write ./ before a path")
    return text


def _checked(action: argparse.Action, value: yaml.Node) -> str:
    """Return ``value`` as the text of an argument."""
    expected = f"expected a value of type {_type_name(action)}"
    if not is_text(value):
        raise ValueError(f"found {shown(value)}, {expected}")
    text: str = value.value
    try:
        converted = action.type(text) if callable(action.type) else text
    except ValueError:
        raise ValueError(f"found {shown(value)}, {expected}") from None
    if action.choices and converted not in action.choices:
        choices = " or ".join(map(str, action.choices))
        raise ValueError(f"found {shown(value)}, expected {choices}")
    return text


def _type_name(action: argparse.Action) -> str:
    return getattr(action.type, "__name__", "str").lower()
