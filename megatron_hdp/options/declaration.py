"""A knob is declared once: a dataclass field that flag, YAML key and documentation derive from."""

import functools
import math
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, field, fields
from pathlib import Path
from typing import Any

GREATEST_INTEGER = 2**31 - 1
"""Greatest value of a whole number whose declaration names no other: what int32 holds."""

GREATEST_NUMBER = 3.4e38
"""The same of a number with a fraction: what float32 holds."""


class OptionError(ValueError):
    """A flag or YAML key is unknown, missing or has a value that cannot be used."""


def option(
    default: Any,
    *,
    help: str,  # argparse's word
    choices: Sequence[str] = (),
    metavar: str | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
    below: float | None = None,
    required: bool = False,
    off_flag: str | None = None,
    auto: bool = False,
) -> Any:
    """Declare a knob as a dataclass field; its annotation gives the type of the value.

    Args:
        default: value without the flag. A bool that is True by default needs ``off_flag``.
        help: says, for ``--help`` and the Reference, what the flag does; of a bool that is True by
            default, what it does unless it is turned off (see `shown_help`).
        choices: the values allowed.
        metavar: what stands for the value in ``--help``.
        minimum: least value allowed.
        maximum: greatest value allowed (default: what 32 bits hold).
        below: all values allowed are less than this.
        required: :func:`check_values` refuses the default.
        off_flag: the flag that sets a bool to False (default: ``--no-`` and the name).
        auto: of a whole number: the word ``auto`` is a value, too; the field is None then.
    """
    metadata = {
        "help": help,
        "choices": tuple(choices),
        "metavar": metavar,
        "minimum": minimum,
        "maximum": maximum,
        "below": below,
        "required": required,
        "off_flag": off_flag,
        "auto": auto,
    }
    return field(default=default, metadata=metadata)


def no_effect(flag: str, needed: str) -> OptionError:
    """Return the error of a flag that does nothing without another one."""
    return OptionError(f"{flag} has no effect without {needed}: add {needed} or remove {flag}")


def require_multiple(options: Any, name: str, of: str, remedy: str = "change one of them") -> None:
    """Refuse a field whose value, unless it is None, is not a multiple of another field's.

    Raises:
        OptionError: it is not.
    """
    found, divisor = getattr(options, name) or 0, getattr(options, of) or 1
    if found % divisor:
        raise OptionError(
            f"{flag_of(name)} {found} is not a multiple of {flag_of(of)} {divisor}: {remedy}"
        )


def flag_of(name: str) -> str:
    """Return the flag of a field: ``num_layers`` -> ``--num-layers``."""
    return "--" + name.replace("_", "-")


def check_values(options: Any) -> None:
    """Check each field of a dataclass of options by itself.

    Raises:
        OptionError: a required one is missing, or a value is outside its range or choices.
    """
    for item, kind in declared(type(options)):
        check_value(item, kind, getattr(options, item.name))


def check_value(item: Field[Any], kind: Any, value: Any) -> None:
    """Check a value of an option that `declared` gave; raises as `check_values` does."""
    limits, flag = item.metadata, flag_of(item.name)
    if limits["required"] and value in (None, ()):
        raise OptionError(f"{flag} is missing: give it as a flag or in the --config file")
    if value is None:
        return
    for one in value if typing.get_origin(kind) is tuple else (value,):
        if limits["choices"] and one not in limits["choices"]:
            expected = " or ".join(limits["choices"])
            raise OptionError(f"{flag}: found {one!r}, expected {expected}")
    if kind in (int, float):
        _check_range(flag, value, kind, limits)


def _check_range(flag: str, value: float, kind: type, limits: Mapping[str, Any]) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise OptionError(f"{flag}: found {value}, expected a finite number")
    if limits["minimum"] is not None and value < limits["minimum"]:
        raise OptionError(f"{flag}: found {value}, expected at least {limits['minimum']}")
    if limits["below"] is not None and value >= limits["below"]:
        raise OptionError(f"{flag}: found {value}, expected less than {limits['below']}")
    greatest = limits["maximum"]
    if greatest is None:
        greatest = GREATEST_INTEGER if kind is int else GREATEST_NUMBER
    if abs(value) > greatest:
        raise OptionError(f"{flag}: found {value}, expected at most {greatest}")


def declared(cls: Any) -> Sequence[tuple[Field[Any], Any]]:
    """Each option of dataclass ``cls`` with its type, ``None`` taken off."""
    return _declared(cls)


@functools.cache
def _declared(cls: Any) -> Sequence[tuple[Field[Any], Any]]:
    hints, found = typing.get_type_hints(cls), []
    for item in fields(cls):
        if "help" not in item.metadata or item.default is MISSING:
            name = f"{cls.__name__}.{item.name}"
            raise TypeError(f"{name} is no option: declare it with option(default, help=...)")
        kind = hints[item.name]
        if isinstance(kind, types.UnionType):
            (kind,) = (part for part in typing.get_args(kind) if part is not type(None))
        found.append((item, kind))
    return tuple(found)


def switches(item: Field[Any]) -> tuple[str, str]:
    """Return the flags that turn a bool on and off."""
    on_flag = flag_of(item.name)
    return on_flag, item.metadata["off_flag"] or "--no-" + on_flag.removeprefix("--")


def metavar(item: Field[Any], kind: Any) -> str | None:
    """Return what stands for the value; None where the choices do."""
    if item.metadata["choices"]:
        return None
    by_type = {int: "auto|N" if item.metadata["auto"] else "N", float: "X", Path: "PATH"}
    return item.metadata["metavar"] or by_type.get(kind, "TEXT")


def shown_help(item: Field[Any], kind: Any) -> str:
    """Return the help of the flag that is shown, which turns a default-on bool off."""
    text: str = item.metadata["help"]
    if kind is bool and item.default:
        return f"Turn this off: {text[0].lower()}{text[1:]}"
    return text


def markdown_table(cls: type) -> str:
    """Return the Markdown table of the flags that dataclass ``cls`` declares."""
    lines = ["| flag, or key in YAML | meaning |", "|---|---|"]
    for item, kind in declared(cls):
        flag, default = flag_of(item.name), ""
        if kind is bool:
            usage = f"`{switches(item)[bool(item.default)]}`"
            default = f" In YAML: `{flag[2:]}: false`." if item.default else ""
        else:
            choices = item.metadata["choices"]
            usage = " ".join(f"`{one}`" for one in (flag, *choices)) if choices else ""
            usage = usage or f"`{flag} {metavar(item, kind)}`".replace("|", "\\|")
            default = "" if item.default in (None, ()) else f" Default: `{item.default}`."
        default = " Required." if item.metadata["required"] else default
        lines.append(f"| {usage} | {shown_help(item, kind)}{default} |")
    return "\n".join(lines) + "\n"
