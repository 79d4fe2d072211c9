"""Declared options as flags of argparse, and back: a mistake is an error that names the remedy."""

import argparse
import typing
from collections.abc import Callable, Collection, Sequence
from typing import Any, NoReturn, TypeVar

from megatron_hdp.nearest import nearest
from megatron_hdp.options.declaration import (
    OptionError,
    declared,
    flag_of,
    metavar,
    shown_help,
    switches,
)

T = TypeVar("T")

RESEMBLANCE = 0.5  # difflib's ratio, above which a name is meant


class OptionParser(argparse.ArgumentParser):
    """An argument parser without abbreviations whose mistakes raise :class:`OptionError`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> Any:
        """Parse; an unknown flag is an error that gives the nearest flag there is."""
        namespace, unknown = self.parse_known_args(args, namespace)
        for argument in unknown:
            if argument.startswith("-"):
                flag = argument.split("=")[0]
                near = nearest(flag, self._option_string_actions, RESEMBLANCE)
                self.error(f"unknown flag {flag}{did_you_mean(near)}")
        if unknown:
            self.error(f"found {' '.join(unknown)}, expected a flag before it: see --help")
        return namespace

    def error(self, message: str) -> NoReturn:
        """Raise instead of leaving the interpreter."""
        raise OptionError(message)


def add_options(
    parser: argparse.ArgumentParser, cls: type, leave_out: Collection[str] = ()
) -> None:
    """Add the fields of dataclass ``cls`` to ``parser``, in a group named by its docstring.

    Those named in ``leave_out`` get no flag.
    """
    group = parser.add_argument_group((cls.__doc__ or cls.__name__).split("\n")[0].rstrip("."))
    for item, kind in declared(cls):
        if item.name in leave_out:
            continue
        if kind is bool:
            on_flag, off_flag = switches(item)
            on_help, off_help = shown_help(item, kind), argparse.SUPPRESS
            if item.default:
                on_help, off_help = off_help, on_help
            group.add_argument(
                on_flag, dest=item.name, action="store_true", default=item.default, help=on_help
            )
            group.add_argument(
                off_flag, dest=item.name, action="store_false", default=item.default, help=off_help
            )
            continue
        many, shown = typing.get_origin(kind) is tuple, metavar(item, kind)
        if item.metadata["auto"]:
            kind = auto_or(kind)
        group.add_argument(
            flag_of(item.name),
            type=typing.get_args(kind)[0] if many else kind,
            nargs="+" if many else None,
            default=item.default,
            choices=item.metadata["choices"] or None,
            metavar=shown,
            help=item.metadata["help"].replace("%", "%%"),
        )


def auto_or(read: Callable[[str], int]) -> Callable[[str], int | None]:
    """What reads a whole number, or the word ``auto`` as None."""

    def read_either(text: str) -> int | None:
        return None if text == "auto" else read(text)

    read_either.__name__ = "int or auto"  # in argparse's own messages
    return read_either


def from_namespace(cls: type[T], namespace: argparse.Namespace) -> T:
    """Make the dataclass ``cls`` from parsed flags; what it does not declare is left alone."""
    values = {}
    for item, _ in declared(cls):
        value = getattr(namespace, item.name)
        values[item.name] = tuple(value) if isinstance(value, list) else value
    return cls(**values)


def did_you_mean(near: str) -> str:
    """Return the end of a message about a name that is not known."""
    return f": did you mean '{near}'?" if near else ": see --help"
