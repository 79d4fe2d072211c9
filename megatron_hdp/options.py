"""One declaration for every knob: a dataclass field that flag, YAML key and table derive from.

A field made by :func:`option` carries its help. :func:`add_options` turns the fields of a dataclass
into argparse flags, :func:`markdown_table` into documentation, :func:`check_values` into
validation; :func:`yaml_to_argv` reads a YAML file as the same flags: argparse is the only parser.
This module imports nothing of the package, so that every room may declare options.
"""

import argparse
import difflib
import re
import types
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import yaml

T = TypeVar("T")

_PARTS = "config"  # of a YAML file: further files, whose keys its own win over
_RESEMBLANCE, _SLIP = 0.5, 0.9  # difflib's ratio, above which a name is meant, or misspelt


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
    required: bool = False,
    off_flag: str | None = None,
) -> Any:
    """Declare a knob as a dataclass field; its annotation gives the type of the value.

    Args:
        default: value without the flag. A bool that is True by default needs ``off_flag``.
        help: one sentence for ``--help`` and the documentation.
        choices: the values allowed.
        metavar: what stands for the value in ``--help``.
        minimum: least value allowed.
        maximum: greatest value allowed.
        required: :func:`check_values` refuses the default.
        off_flag: the flag that sets a bool to False (default: ``--no-`` and the name).
    """
    metadata = {
        "help": help,
        "choices": tuple(choices),
        "metavar": metavar,
        "minimum": minimum,
        "maximum": maximum,
        "required": required,
        "off_flag": off_flag,
    }
    return field(default=default, metadata=metadata)


def flag_of(name: str) -> str:
    """Return the flag of a field: ``num_layers`` -> ``--num-layers``."""
    return "--" + name.replace("_", "-")


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
                near = _nearest(flag, self._option_string_actions)
                self.error(f"unknown flag {flag}{_did_you_mean(near)}")
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

    Those named in ``leave_out`` are no flags.
    """
    group = parser.add_argument_group((cls.__doc__ or cls.__name__).split("\n")[0].rstrip("."))
    for item, kind in _declared(cls):
        if item.name in leave_out:
            continue
        if kind is bool:
            on_flag, off_flag = _switches(item)
            on_help, off_help = item.metadata["help"], argparse.SUPPRESS
            if item.default:
                on_help, off_help = off_help, on_help
            group.add_argument(
                on_flag, dest=item.name, action="store_true", default=item.default, help=on_help
            )
            group.add_argument(
                off_flag, dest=item.name, action="store_false", default=item.default, help=off_help
            )
            continue
        many = typing.get_origin(kind) is tuple
        group.add_argument(
            flag_of(item.name),
            type=typing.get_args(kind)[0] if many else kind,
            nargs="+" if many else None,
            default=item.default,
            choices=item.metadata["choices"] or None,
            metavar=_metavar(item, kind),
            help=item.metadata["help"].replace("%", "%%"),
        )


def from_namespace(cls: type[T], namespace: argparse.Namespace) -> T:
    """Make the dataclass ``cls`` from parsed flags; what it does not declare is left alone."""
    values = {}
    for item, _ in _declared(cls):
        value = getattr(namespace, item.name)
        values[item.name] = tuple(value) if isinstance(value, list) else value
    return cls(**values)


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
            cutoff = _SLIP if skip_others else _RESEMBLANCE
            near = _nearest(flag, parser._option_string_actions, cutoff).removeprefix("--")
            if skip_others and not near:
                continue
            raise OptionError(f"{path}: unknown key '{key}'{_did_you_mean(near)}")
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


def markdown_table(cls: type) -> str:
    """Return the Markdown table of the flags that dataclass ``cls`` declares."""
    lines = ["| flag, or key in YAML | meaning |", "|---|---|"]
    for item, kind in _declared(cls):
        flag, default = flag_of(item.name), ""
        if kind is bool:
            usage = f"`{_switches(item)[bool(item.default)]}`"
        else:
            choices = item.metadata["choices"]
            usage = " ".join(f"`{one}`" for one in (flag, *choices)) if choices else ""
            usage = usage or f"`{flag} {_metavar(item, kind)}`".replace("|", "\\|")
            default = "" if item.default in (None, ()) else f" Default: `{item.default}`."
        default = " Required." if item.metadata["required"] else default
        lines.append(f"| {usage} | {item.metadata['help']}{default} |")
    return "\n".join(lines) + "\n"


def check_values(options: Any) -> None:
    """Check each field of a dataclass of options by itself.

    Raises:
        OptionError: a required one is missing, or a value is outside its range or choices.
    """
    for item, _ in _declared(type(options)):
        value, limits, flag = getattr(options, item.name), item.metadata, flag_of(item.name)
        if limits["required"] and value in (None, ()):
            raise OptionError(f"{flag} is missing: give it as a flag or in the --config file")
        if value is None:
            continue
        if limits["choices"] and value not in limits["choices"]:
            raise OptionError(f"{flag}: found {value!r}, expected {' or '.join(limits['choices'])}")
        if limits["minimum"] is not None and not value >= limits["minimum"]:
            raise OptionError(f"{flag}: found {value}, expected at least {limits['minimum']}")
        if limits["maximum"] is not None and not value <= limits["maximum"]:
            raise OptionError(f"{flag}: found {value}, expected at most {limits['maximum']}")


def _declared(cls: type) -> Iterator[tuple[Field[Any], Any]]:
    """Yield each option of ``cls`` with its type, ``None`` taken off."""
    hints = typing.get_type_hints(cls)
    for item in fields(cls):
        if "help" not in item.metadata or item.default is MISSING:
            found = f"{cls.__name__}.{item.name}"
            raise TypeError(f"{found} is no option: declare it with option(default, help=...)")
        kind = hints[item.name]
        if isinstance(kind, types.UnionType):
            (kind,) = (part for part in typing.get_args(kind) if part is not type(None))
        yield item, kind


def _switches(item: Field[Any]) -> tuple[str, str]:
    on_flag = flag_of(item.name)
    return on_flag, item.metadata["off_flag"] or "--no-" + on_flag.removeprefix("--")


def _metavar(item: Field[Any], kind: Any) -> str | None:
    if item.metadata["choices"]:
        return None
    by_type = {int: "N", float: "X", Path: "PATH"}
    return item.metadata["metavar"] or by_type.get(kind, "TEXT")


def _nearest(flag: str, known: Iterable[str], cutoff: float = _RESEMBLANCE) -> str:
    return next(iter(difflib.get_close_matches(flag, list(known), n=1, cutoff=cutoff)), "")


def _did_you_mean(near: str) -> str:
    return f": did you mean '{near}'?" if near else ": see --help"


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


@dataclass(frozen=True, kw_only=True)
class HdpOptions:
    """Hybrid data parallelism."""

    hybrid_data_parallel: bool = option(
        False, help="Plan every global batch over one HDP dimension instead of a DP x CP mesh."
    )
    hdp_tokens_per_rank: int = option(
        None,
        minimum=1,
        help="Capacity C: tokens that one HDP rank can hold in one micro-batch.",
    )
    hdp_global_batch_tokens: int | None = option(
        None,
        minimum=1,
        help="Size of the global batch in tokens, instead of --global-batch-size in sequences.",
    )
    hdp_strategy: str = option(
        "auto",
        choices=("auto", "static", "naive", "bytescale", "dp-balance", "pp-balance"),
        help="How to plan: static is the fixed DP x CP mesh, the baseline; auto is pp-balance with "
        "pipeline stages, else dp-balance.",
    )
    hdp_offload: str = option(
        "off",
        choices=("off", "auto"),
        help="auto: activations of micro-batches that need it wait in host memory between forward "
        "and backward, where that saves ranks and the forward is long enough to hide the copies.",
    )
    hdp_long_sequence: str = option(
        "error",
        choices=("error", "truncate", "split"),
        help="What to do with a document longer than --seq-length.",
    )
    hdp_cost_model: Path | None = option(
        None,
        metavar="FILE",
        help="Measured cost model (JSON); without it, it is derived from the model's shape.",
    )
    hdp_slice_multiple: int = option(
        1,
        minimum=1,
        help="Pad each chunk of a sequence to a multiple of this, for kernels that want one.",
    )
    hdp_attention: str = option(
        "auto",
        choices=("auto", "transformer-engine", "flash-attn", "torch"),
        help="Whose attention kernels run on a GPU; auto takes the first of these that loads, fits "
        "and computes rightly, and says which.",
    )
    hdp_fused_loss: bool = option(
        True,
        help="Make the logits of all tokens before the loss: more memory, the same result.",
    )
    hdp_corrupt_limit: int = option(
        16,
        minimum=0,
        help="Stop after more than this many corrupt documents in a row; fewer are skipped.",
    )
    hdp_plot_plan: Path | None = option(
        None, metavar="FILE", help="Draw one step's plan, a Gantt chart per rank, into this file."
    )
    hdp_plot_step: int = option(1, minimum=1, help="The step that --hdp-plot-plan draws.")
    hdp_trace: Path | None = option(
        None,
        metavar="DIR",
        help="Write one timeline of all ranks, for Perfetto, into this folder: compute, waits and "
        "the plan laid over them. On GPUs it shows when work ran, not when it was launched.",
    )
    hdp_trace_steps: str | None = option(
        None, metavar="N|N-M", help="The steps that --hdp-trace shows: a few, like 5 or 5-7."
    )
    metrics_path: Path | None = option(
        None, metavar="FILE", help="Append one JSON object a step to this file."
    )

    def validate(
        self, *, global_batch_size: int | None, attention_dropout: float, train_iters: int
    ) -> None:
        """Check these options together, and with those of Megatron's that they depend on.

        Raises:
            OptionError: says what was found, what was expected and the remedy.
        """
        check_values(self)
        if not self.hybrid_data_parallel:
            self._check_unused()
            return
        if self.hdp_tokens_per_rank is None:
            raise OptionError(
                "--hybrid-data-parallel needs --hdp-tokens-per-rank: the tokens that one rank can "
                "hold in a micro-batch"
            )
        if (self.hdp_global_batch_tokens is None) == (global_batch_size is None):
            found = "neither" if global_batch_size is None else "both"
            raise OptionError(
                f"found {found} of --hdp-global-batch-tokens and --global-batch-size, expected "
                "exactly one: the global batch has a size in tokens or in sequences"
            )
        if attention_dropout != 0:
            raise OptionError(
                f"--attention-dropout is {attention_dropout}, and ring attention has no dropout: "
                "pass --attention-dropout 0"
            )

        self._check_trace(train_iters)

    def _check_trace(self, train_iters: int) -> None:
        if (self.hdp_trace is None) != (self.hdp_trace_steps is None):
            raise OptionError("--hdp-trace DIR and --hdp-trace-steps go together: give both")
        if self.hdp_trace_steps is None:
            return
        last = trace_steps(self.hdp_trace_steps)[-1]
        if last > train_iters:
            raise OptionError(
                f"--hdp-trace-steps {self.hdp_trace_steps} goes beyond --train-iters "
                f"{train_iters}: trace earlier steps"
            )

    def _check_unused(self) -> None:
        for item in fields(self):
            if item.name.startswith("hdp_") and getattr(self, item.name) != item.default:
                raise OptionError(
                    f"{flag_of(item.name)} has no effect without --hybrid-data-parallel: add "
                    "the one or remove the other"
                )


def trace_steps(text: str) -> range:
    """Return the steps of ``--hdp-trace-steps``.

    Raises:
        OptionError: not a step or a range of them.
    """
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= first <= last:
        raise OptionError(
            f"--hdp-trace-steps: found {text!r}, expected a step or the first and last of some, "
            "counted from 1, like 5 or 5-7"
        )
    return range(first, last + 1)
